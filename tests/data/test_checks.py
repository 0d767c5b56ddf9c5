"""Unsound data are refused with the place in the message."""

import pytest
import torch

from sfiformer.data import GraphStore


def parts(**changes):
    """Two graphs, of 3 nodes and 2 edges, and of 2 nodes and 1 edge."""
    base = {
        "node_ptr": torch.tensor([0, 3, 5]),
        "edge_ptr": torch.tensor([0, 2, 3]),
        "edge_index": torch.tensor([[0, 2, 1], [1, 1, 0]]),
        "node": {"x": torch.rand(5, 2)},
        "edge": {"edge_attr": torch.rand(3, 2)},
    }
    return base | changes


def test_sound_data_pass():
    assert len(GraphStore(**parts())) == 2


@pytest.mark.parametrize("ends", [[[0, 2, 1], [1, 1, 2]], [[0, 2, -1], [1, 1, 0]]])
def test_edge_out_of_range(ends):
    with pytest.raises(ValueError, match=r"graph 1: edge 0 \(.*\) is out of range.*0 to 1"):
        GraphStore(**parts(edge_index=torch.tensor(ends)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite(value):
    x = torch.rand(5, 2)
    x[4, 1] = value
    with pytest.raises(ValueError, match=r"graph 1, node 1: 'x' is not finite \(.* in column 1\)"):
        GraphStore(**parts(node={"x": x}))
    edge_attr = torch.rand(3, 2)
    edge_attr[1, 0] = value
    with pytest.raises(ValueError, match=r"graph 0, edge 1: 'edge_attr' is not finite"):
        GraphStore(**parts(edge={"edge_attr": edge_attr}))


def test_missing_targets_are_allowed():
    store = GraphStore(**parts(graph={"y": torch.tensor([1.0, float("nan")])}))
    assert store.batch([1]).y.isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_ptr": torch.tensor([0])}, "the dataset is empty"),
        ({"node_ptr": torch.tensor([0, 5, 5]), "edge_ptr": torch.tensor([0, 3, 3])}, "graph 1 has no nodes"),
        ({"edge_ptr": torch.tensor([0, 3])}, "edge_ptr has shape"),
        ({"edge_ptr": torch.tensor([0, 2, 4])}, "edge_ptr ends at 4"),
        ({"node_ptr": torch.tensor([1, 3, 5])}, "must start at 0"),
        ({"edge_index": torch.rand(2, 3)}, "must be integers"),
        ({"node": {"x": torch.rand(4, 2)}}, "first dimension must be 5"),
        ({"node": {"not a name": torch.rand(5)}}, "cannot name a node field"),
        ({"link": {"edge_label": torch.ones(1)}}, "need link_ptr"),
        ({"link_ptr": torch.tensor([0, 0, 1])}, "need the link field 'edge_label_index'"),
        (
            {"link_ptr": torch.tensor([0, 0, 1]), "link": {"edge_label_index": torch.tensor([[0, 2]])}},
            r"graph 1: link 0 \(0 → 2\) is out of range",
        ),
    ],
)
def test_other_faults(changes, message):
    with pytest.raises(ValueError, match=message):
        GraphStore(**parts(**changes))


def test_edges_are_sorted_stably_with_their_features():
    store = GraphStore(
        node_ptr=torch.tensor([0, 3, 5]),
        edge_ptr=torch.tensor([0, 4, 5]),
        edge_index=torch.tensor([[0, 1, 2, 0, 1], [2, 0, 2, 0, 0]]),
        edge={"edge_attr": torch.tensor([0, 1, 2, 3, 4])},
    )
    assert store.edge_index.tolist() == [[1, 0, 0, 2, 1], [0, 0, 2, 2, 0]]
    assert store.edge["edge_attr"].tolist() == [1, 3, 0, 2, 4]
