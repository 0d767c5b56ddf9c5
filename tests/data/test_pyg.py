"""From PyG and back."""

import pytest
import torch
from torch_geometric.data import Data

from sfiformer.data import GraphStore

NO_EDGES = torch.zeros(2, 0, dtype=torch.int64)


def triangle(**fields) -> Data:
    return Data(edge_index=torch.tensor([[1, 2, 0], [0, 1, 2]]), **{"x": torch.rand(3, 2), **fields})


def lonely(**fields) -> Data:
    return Data(**{"edge_index": NO_EDGES, "x": torch.rand(2, 2), **fields})


def round_trip(graphs: list[Data], **options) -> tuple[GraphStore, list[Data]]:
    store = GraphStore.from_pyg(graphs, **options)
    back = store.to_pyg()
    assert len(back) == len(graphs)
    for got, want in zip(back, graphs, strict=True):
        assert got.num_nodes == want.num_nodes
        assert set(got.to_dict()) - {"num_nodes"} == set(want.to_dict()) - {"num_nodes"}
        for name, value in want.to_dict().items():
            if name != "num_nodes":
                assert torch.equal(got[name], value), name
    return store, back


def test_graph_targets():
    store, _ = round_trip([triangle(y=torch.tensor([4])), lonely(y=torch.tensor([300]))])
    assert store.graph["y"].tolist() == [4, 300]


def test_node_targets_and_edge_features():
    graphs = [
        triangle(y=torch.tensor([0, 1, 2]), edge_attr=torch.rand(3, 2)),
        lonely(y=torch.tensor([1, 1]), edge_attr=torch.zeros(0, 2)),
    ]
    store, _ = round_trip(graphs)
    assert store.node["y"].tolist() == [0, 1, 2, 1, 1]
    assert list(store.edge) == ["edge_attr"]


def test_links():
    graphs = [
        triangle(edge_label_index=torch.tensor([[0, 1], [2, 2]]), edge_label=torch.tensor([1, 0])),
        lonely(edge_label_index=NO_EDGES, edge_label=torch.zeros(0, dtype=torch.int64)),
    ]
    store, _ = round_trip(graphs)
    assert store.link["edge_label_index"].tolist() == [[0, 2], [1, 2]]
    assert store.link_ptr.tolist() == [0, 2, 2]


def test_all_graphs_without_edges_and_without_features():
    store, _ = round_trip([Data(edge_index=NO_EDGES, num_nodes=2), Data(edge_index=NO_EDGES, num_nodes=1)])
    assert store.batch([1, 0]).ptr.tolist() == [0, 1, 3]
    assert store.batch([0]).x is None


def test_numbers_become_graph_fields_and_text_is_left_out():
    store = GraphStore.from_pyg([triangle(y=2.5, smiles="C"), lonely(y=1.5, smiles="CC")])
    assert store.batch([1, 0]).y.tolist() == [1.5, 2.5]
    assert list(store.graph) == ["y"]


def test_levels_settle_a_tie():
    graphs = [Data(x=torch.ones(1, 1), edge_index=NO_EDGES, y=torch.tensor([3]))]
    assert "y" in GraphStore.from_pyg(graphs).graph
    assert "y" in GraphStore.from_pyg(graphs, levels={"y": "node"}).node
    with pytest.raises(ValueError, match="must be one of node, edge, graph"):
        GraphStore.from_pyg(graphs, levels={"y": "vertex"})


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ([], "the dataset is empty"),
        ([triangle(), lonely(x=torch.rand(2, 3))], r"graph 1: 'x' has rows of shape \[3\]"),
        ([triangle(), lonely(y=torch.ones(1))], "graph 1: 'y' is a field of this graph or of graph 0"),
        ([triangle(y=torch.ones(4))], r"graph 0: 'y' has shape \[4\].*\[1, ...\]"),
        (
            [triangle(y=torch.ones(3)), lonely(y=torch.ones(4))],
            "graph 1: 'y' has shape .* as a node field it",
        ),
        ([Data(x=torch.rand(2, 1))], "graph 0 has no edge_index"),
        ([triangle(edge_label=torch.ones(2))], "needs 'edge_label_index'"),
        ([triangle(), lonely(edge_index=torch.tensor([[0], [2]]))], r"graph 1: edge 0 \(0 → 2\)"),
    ],
)
def test_faults(graphs, message):
    with pytest.raises(ValueError, match=message):
        GraphStore.from_pyg(graphs)
