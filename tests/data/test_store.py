"""The store's batches against PyG's collate, and what it refuses."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data

from graphs import random_graphs
from sfiformer.data import GraphStore


def sorted_by_destination(data: Data) -> Data:
    order = np.argsort(data.edge_index[1].numpy(), kind="stable")
    return data.clone().update({"edge_index": data.edge_index[:, order], "edge_attr": data.edge_attr[order]})


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), links=st.booleans(), picks=st.lists(st.integers(0, 6), max_size=9))
def test_batch_equals_pyg_collate(seed, links, picks):
    graphs = random_graphs(seed, 7, links)
    store = GraphStore.from_pyg(graphs)
    batch = store.batch(picks)
    assert batch.num_graphs == len(picks)
    assert batch.graph_ids.tolist() == picks
    if not picks:
        assert batch.num_nodes == batch.num_edges == batch.max_nodes == 0
        return
    expected = Batch.from_data_list([sorted_by_destination(graphs[i]) for i in picks])
    assert batch.max_nodes == max(graphs[i].num_nodes for i in picks)
    assert bool((batch.edge_index[1].diff() >= 0).all())
    for name in expected.keys():  # noqa: SIM118 (a PyG batch iterates over graphs)
        got, want = getattr(batch, name), expected[name]
        assert got.dtype == want.dtype, name
        assert torch.equal(got, want), name


def test_number_of_operations_does_not_depend_on_the_number_of_graphs():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    store = GraphStore.from_pyg(random_graphs(0, 40, links=True))
    counts = []
    for graphs in (10, 40):
        Count.calls = 0
        with Count():
            store.batch(range(graphs))
        counts.append(Count.calls)
    assert counts[0] == counts[1]


def test_small_dtypes_inside_plain_ones_outside():
    store = GraphStore.from_pyg(random_graphs(1, 5))
    assert store.edge_index.dtype == store.node["x"].dtype == torch.uint8
    one_hot = Data(x=torch.eye(3), edge_index=torch.zeros(2, 0, dtype=torch.int64), y=torch.tensor([1.0]))
    store = GraphStore.from_pyg([one_hot])
    assert store.node["x"].dtype == torch.float16
    batch = store.batch([0])
    assert batch.x.dtype == batch.y.dtype == torch.float32
    assert batch.edge_attr is None
    with pytest.raises(AttributeError, match="rwse"):
        _ = batch.rwse


def test_node_ids_beyond_small_integers():
    nodes = 40_000
    data = Data(edge_index=torch.tensor([[0, nodes - 1], [nodes - 1, 300]]), num_nodes=nodes)
    store = GraphStore.from_pyg([data, data])
    assert store.edge_index.dtype == torch.int32
    assert store.batch([1, 0]).edge_index.tolist() == [
        [nodes - 1, 0, 2 * nodes - 1, nodes],
        [300, nodes - 1, nodes + 300, 2 * nodes - 1],
    ]


def test_subset_is_a_store_of_its_own():
    store = GraphStore.from_pyg(random_graphs(2, 9, links=True))
    part = store.subset([4, -1, 0])
    assert len(part) == 3
    got, want = part.batch([2, 0]), store.batch([0, 4])
    for name in ("x", "edge_index", "edge_attr", "y", "ptr", "edge_label_index", "edge_label", "node_mask"):
        assert torch.equal(getattr(got, name), getattr(want, name))


def test_batch_moves_replaces_and_pickles():
    batch = GraphStore.from_pyg(random_graphs(3, 4)).batch([0, 2])
    other = batch.replace(rwse=torch.zeros(batch.num_nodes, 2))
    assert "rwse" in other
    assert "rwse" not in batch
    assert other.to("meta").x.device.type == "meta"
    again = pickle.loads(pickle.dumps(other))
    assert torch.equal(again.edge_index, batch.edge_index)
    assert "rwse=" in repr(again)
    again.note = "of the caller's own"
    assert not hasattr(again.to("cpu"), "note")


def test_index_out_of_range():
    store = GraphStore.from_pyg(random_graphs(4, 3))
    with pytest.raises(IndexError, match="no graph 3 in a store of 3"):
        store.batch([0, 3])


def test_with_fields_adds_and_checks():
    store = GraphStore.from_pyg(random_graphs(5, 3))
    more = store.with_fields(node={"rwse": torch.full((store.num_nodes, 2), 0.1)})
    assert more.batch([1]).rwse.shape == (more.batch([1]).num_nodes, 2)
    assert "rwse" not in store.node
    with pytest.raises(ValueError, match="first dimension must be 3"):
        store.with_fields(graph={"z": torch.zeros(2)})
    with pytest.raises(ValueError, match="both a node field and a graph field"):
        store.with_fields(graph={"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="reserved"):
        store.with_fields(node={"batch": torch.zeros(store.num_nodes)})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_batch_on_the_gpu():
    store = GraphStore.from_pyg(random_graphs(6, 9, links=True))
    got, want = store.to("cuda").batch([7, 1, 1]), store.batch([7, 1, 1])
    for name in ("x", "edge_index", "edge_attr", "y", "ptr", "batch", "graph_ids", "edge_label_index"):
        assert getattr(got, name).device.type == "cuda"
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name))
