"""Batches gathered with tensor operations alone, exact and padded, against the store's plain ones."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graphs import random_graphs
from sfiformer.data import BatchShape, GraphStore
from sfiformer.data.gather import gather
from sfiformer.data.shapes import exact_shape, graph_sizes


def gathered(store: GraphStore, picks) -> object:
    picks = np.array(picks, dtype=np.int64)
    return gather(store, torch.from_numpy(picks), exact_shape(graph_sizes(store, picks)))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), links=st.booleans(), picks=st.lists(st.integers(0, 6), max_size=9))
def test_an_exact_shape_gives_the_plain_batch(seed, links, picks):
    store = GraphStore.from_pyg(random_graphs(seed, 7, links))
    want = store.batch(picks)
    got = gathered(store, picks)
    assert set(got) == set(want)
    assert got.max_nodes == want.max_nodes
    assert got.real_nodes is got.real_edges is got.real_graphs is None
    for name in ("edge_index", "batch", "ptr", "graph_ids", *want):
        assert getattr(got, name).dtype == getattr(want, name).dtype, name
        assert torch.equal(getattr(got, name), getattr(want, name)), name


class Operations(TorchDispatchMode):
    """Counts what would be launched on a device: all but views."""

    VIEWS = ("select", "slice", "view", "split", "t", "transpose", "detach", "expand", "unsqueeze", "alias")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name not in self.VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_few_operations_and_none_that_waits():
    store = GraphStore.from_pyg(random_graphs(0, 40))
    _ = store.tables
    counts = {}
    for graphs in (10, 40):
        with Operations() as seen:
            gathered(store, range(graphs))
        assert not {"_local_scalar_dense", "nonzero", "item"} & set(seen.names)
        counts[graphs] = len(seen.names)
    assert counts[10] == counts[40] <= 25, seen.names


LEVELS = {
    "num_nodes": ("x", "pos", "node_mask", "batch"),
    "num_edges": ("edge_attr", "edge_index"),
    "num_graphs": ("y", "graph_ids"),
    "links": ("edge_label_index", "edge_label"),
}


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    links=st.booleans(),
    picks=st.lists(st.integers(0, 6), max_size=9),
    more=st.tuples(st.integers(1, 40), st.integers(0, 50), st.integers(0, 9), st.integers(0, 3)),
)
def test_padding_comes_after_the_plain_batch(seed, links, picks, more):
    store = GraphStore.from_pyg(random_graphs(seed, 7, links))
    sizes = graph_sizes(store, np.array(picks, dtype=np.int64))
    shape = padded_shape(store, sizes, *more)
    want, got = store.batch(picks), store.batch(picks, shape)
    real = {"num_nodes": want.num_nodes, "num_edges": want.num_edges, "num_graphs": len(picks)}
    real["links"] = want.edge_label.numel() if links else 0
    assert (int(got.real_nodes), int(got.real_edges), int(got.real_graphs)) == tuple(real.values())[:3]
    for level, names in LEVELS.items():
        for name in set(names) & {"edge_index", "batch", "graph_ids", *want}:
            dim = 1 if name.endswith("_index") else 0
            part = getattr(got, name).narrow(dim, 0, real[level])
            assert part.dtype == getattr(want, name).dtype, name
            assert torch.equal(part, getattr(want, name)), name
    assert torch.equal(got.ptr[: len(picks) + 1], want.ptr)
    check_conventions(got, shape, real, links)


def padded_shape(store, sizes, nodes, edges, links, graphs) -> BatchShape:
    filler = min(16, int(store.node_ptr.diff().min()))
    more = (nodes, edges if store.num_edges else 0, 0 if store.link_ptr is None else links)
    total = (sizes.sum(0) + more).tolist()
    return BatchShape(len(sizes) + -(-nodes // filler) + graphs, *total, 12, filler)


def check_conventions(batch, shape: BatchShape, real: dict, links: bool) -> None:
    """What models rely on, and that nothing real meets padding."""
    assert (batch.num_graphs, batch.num_nodes, batch.num_edges) == (shape.graphs, shape.nodes, shape.edges)
    assert int(batch.ptr[0]) == 0
    assert int(batch.ptr[-1]) == shape.nodes
    sizes = batch.ptr.diff()
    assert bool((sizes >= 0).all())
    assert int(sizes[real["num_graphs"] :].max()) <= shape.filler
    assert torch.equal(batch.batch, torch.repeat_interleave(sizes))
    source, target = batch.edge_index
    assert bool((target.diff() >= 0).all())
    assert torch.equal(batch.batch[source], batch.batch[target])
    pads = target[real["num_edges"] :]
    assert torch.equal(source[real["num_edges"] :], pads)
    assert bool((pads >= real["num_nodes"]).all())
    counts = torch.bincount(pads - real["num_nodes"], minlength=shape.nodes - real["num_nodes"])
    assert int(counts.max() - counts.min()) <= 1  # evenly
    assert bool((batch.graph_ids[real["num_graphs"] :] == -1).all())
    assert bool(batch.y[real["num_graphs"] :].isnan().all())
    assert not bool(batch.pos.isnan().any())
    if links:
        assert bool((batch.edge_label_index[:, real["links"] :] >= real["num_nodes"]).all())
        assert bool((batch.edge_label[real["links"] :] == -1).all())


def test_missing_targets_of_every_dtype():
    truth = torch.tensor([[True, False], [False, True]])
    for y, expected in (
        (torch.tensor([3, 200]), -1),
        (torch.tensor([0.5, 1.0]), float("nan")),
        (truth, float("nan")),
    ):
        store = two_graphs(y)
        plain, padded = store.batch([1, 0]), store.batch([1, 0], BatchShape(4, 7, 3, 0, 3, 2))
        values = padded.y[2:].to(torch.float64)
        assert torch.equal(values, torch.full_like(values, expected)) or bool(values.isnan().all())
        assert torch.equal(padded.y[:2], plain.y.to(padded.y.dtype))
        assert padded.y.dtype in (torch.int64, torch.float32)
        assert gathered(store, [1, 0]).y.dtype == plain.y.dtype


def two_graphs(y: torch.Tensor) -> GraphStore:
    return GraphStore(
        torch.tensor([0, 3, 5]), torch.tensor([0, 1, 3]), torch.tensor([[0, 1, 0], [2, 0, 1]]), graph={"y": y}
    )


def test_links_without_labels_get_them_from_padding():
    store = GraphStore(
        torch.tensor([0, 3, 5]),
        torch.tensor([0, 0, 0]),
        torch.zeros(2, 0, dtype=torch.int64),
        link_ptr=torch.tensor([0, 1, 3]),
        link={"edge_label_index": torch.tensor([[0, 2], [1, 0], [0, 1]])},
    )
    assert "edge_label" not in gathered(store, [0, 1])
    batch = store.batch([1], BatchShape(3, 4, 0, 4, 3, 2))
    assert batch.edge_label.tolist() == [1, 1, -1, -1]
    assert batch.edge_label_index.tolist() == [[1, 0, 2, 3], [0, 1, 2, 3]]


def test_a_shape_that_does_not_hold_the_graphs():
    store = two_graphs(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="does not hold"):
        store.batch([0, 1], BatchShape(3, 5, 3, 0, 3, 2))
    with pytest.raises(ValueError, match="have 2 nodes, not 1"):
        store.batch([0, 1], BatchShape(9, 6, 3, 0, 3, 1))


def test_the_fields_stay_what_they_were():
    store, same = (GraphStore.from_pyg(random_graphs(1, 5, links=True)) for _ in range(2))
    bytes_before = store.nbytes
    _ = store.tables
    assert store.nbytes == bytes_before
    assert torch.equal(store.edge_index, same.edge_index)
    for name in ("x", "pos", "node_mask"):
        assert torch.equal(store.node[name], same.node[name])
    other = store.with_fields(node={"rwse": torch.zeros(store.num_nodes, 2)})
    assert "rwse" in gathered(other, [0])
    assert "rwse" not in gathered(store, [0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_cuda_graph_holds_it():
    store = GraphStore.from_pyg(random_graphs(6, 9, links=True))
    shape = BatchShape(80, 64, 128, 16, 12, min(16, int(store.node_ptr.diff().min())))
    held = store.to("cuda")
    ids = torch.from_numpy(shape.slots(np.array([7, 1, 1]))).cuda()
    gather(held, ids, shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gather(held, ids, shape)
    ids.copy_(torch.from_numpy(shape.slots(np.array([2, 5]))))
    graph.replay()
    want = store.batch([2, 5], shape)
    for name in ("ptr", "batch", "edge_index", "graph_ids", *want):
        assert torch.equal(getattr(got, name).cpu().nan_to_num(), getattr(want, name).nan_to_num()), name
    assert int(got.real_nodes) == int(want.real_nodes)
