import pytest
import torch

from sfiformer.data.official import DATASETS, find
from sfiformer.data.official.packing import read_splits

SPLITS = ("train", "val", "test")


@pytest.mark.parametrize("name", DATASETS)
def test_the_stores_hold_what_pyg_reads(name, make_raw, assert_as_pyg):
    raw = make_raw(name)
    dataset = find(name)
    stores = dict(read_splits(dataset, raw))
    assert list(stores) == list(SPLITS)
    for split, store in stores.items():
        assert_as_pyg(store, name, raw.parent.parent, split)
        task = dataset.task
        assert (store.link_ptr is not None) == (task.level == "link")
        assert ("y" in store.node, "y" in store.graph) == (task.level == "node", task.level == "graph")
        assert store.node["x"].shape == (store.node_ptr[-1], dataset.node_width)
        assert store.node["x"].is_floating_point() != dataset.molecular
        if dataset.edge_width:
            assert store.edge["edge_attr"].shape == (store.edge_ptr[-1], dataset.edge_width)
        else:
            assert not store.edge


def molecule(**changes):
    fields = {
        "x": torch.zeros(3, 9, dtype=torch.int64),
        "edge_attr": torch.zeros(2, 3, dtype=torch.int64),
        "edge_index": torch.tensor([[0, 1], [1, 2]]),
        "y": torch.zeros(1, 10),
    }
    return tuple((fields | changes).values())


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (molecule(x=torch.zeros(3, 8)), r"graph 1: x has shape \[3, 8\], not \[3, 9\]"),
        (molecule(edge_attr=torch.zeros(1, 3)), r"graph 1: edge_index has shape \[2, 2\], not \[2, 1\]"),
        (molecule(edge_index=torch.zeros(2)), r"graph 1: edge_index has shape \[2\], not \[2, 2\]"),
        (molecule(y=torch.zeros(1, 9)), r"graph 1: y has shape \[1, 9\], not \[1, 10\]"),
        (molecule(y="label"), r"graph 1, y: expected a tensor.* found str"),
        (molecule(edge_index=torch.tensor([[0, 1], [1, 3]])), r"graph 1.*edge 1"),
        (molecule()[:3], r"graph 1: expected the fields x, edge_attr, edge_index, y"),
        ({"x": torch.zeros(3, 9)}, r"graph 1: expected the fields x"),
        (7, r"graph 1: expected the fields x"),
    ],
)
def test_a_bad_graph_is_named(make_raw, graph, message):
    graphs = {"train": [molecule()], "val": [molecule(), graph], "test": [molecule()]}
    raw = make_raw("peptides-func", graphs)
    with pytest.raises(ValueError, match=rf"val\.pt.*{message}"):
        list(read_splits(find("peptides-func"), raw))


def superpixels(label, value=0.0):
    x = torch.zeros(2, 14)
    x[1, 3] = value
    return x, torch.zeros(1, 2), torch.tensor([[0], [1]]), [0, label]


@pytest.mark.parametrize(
    ("name", "graph", "message"),
    [
        ("pascalvoc-sp", superpixels(21), "graph 1: label 21 of row 1 is none of the 21 classes"),
        ("pascalvoc-sp", superpixels(-1), "graph 1: label -1 of row 1"),
        ("coco-sp", superpixels(12), "graph 1: label 12 of row 1 is none of the 81 classes"),
        ("coco-sp", superpixels(91), "graph 1: label 91 of row 1"),
        ("coco-sp", superpixels(-7), "graph 1: label -7 of row 1"),
        ("coco-sp", superpixels(0, float("nan")), r"graph 1.*node 1"),
    ],
)
def test_a_bad_label_or_feature_is_named(make_raw, name, graph, message):
    good = superpixels(20)
    raw = make_raw(name, {"train": [good, graph, good], "val": [good], "test": [good]})
    with pytest.raises(ValueError, match=rf"train\.pickle.*{message}"):
        list(read_splits(find(name), raw))


def test_bad_files_are_named(make_raw):
    raw = make_raw("peptides-func", {"train": [], "val": [molecule()], "test": [molecule()]})
    with pytest.raises(ValueError, match=r"train\.pt: expected a list of graphs"):
        list(read_splits(find("peptides-func"), raw))
    raw = make_raw("cluster")
    torch.save([[], []], raw / "CLUSTER_v2.pt")
    with pytest.raises(ValueError, match=r"CLUSTER_v2\.pt must hold a list of three splits"):
        list(read_splits(find("cluster"), raw))
