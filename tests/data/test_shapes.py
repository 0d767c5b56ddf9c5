"""Which shape a batch is padded to."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import random_graphs
from sfiformer.data import BatchShape, GraphStore, Ladder
from sfiformer.data.shapes import exact_shape, graph_sizes


def store_of(seed: int, count: int = 60, low: int = 30, high: int = 100) -> GraphStore:
    """Graphs of sizes between bounds, with 3 edges a node."""
    nodes = np.random.default_rng(seed).integers(low, high, count)
    node_ptr = torch.from_numpy(np.concatenate([[0], nodes.cumsum()]))
    source = torch.cat([torch.arange(n).repeat_interleave(3) for n in nodes])
    return GraphStore(node_ptr, 3 * node_ptr, torch.stack([source, source]))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 8), count=st.integers(1, 8))
def test_a_rung_holds_its_batch_and_none_below_does(seed, size, count):
    store = store_of(seed)
    ladder = Ladder(store, size)
    picks = np.random.default_rng(seed).integers(0, len(store), min(count, size))
    sizes, shape = graph_sizes(store, picks), ladder.shape(picks)
    assert shape.holds(sizes)
    assert shape.max_nodes == int(store.node_ptr.diff().max())
    assert shape.nodes % 64 == shape.edges % 64 == 0
    below = [rung for rung in ladder.rungs if rung.nodes < shape.nodes]
    assert not any(rung.holds(sizes) for rung in below)
    assert store.batch(picks, shape).num_nodes == shape.nodes


def test_a_whole_epoch_takes_few_shapes():
    store = store_of(0, 1000)
    ladder = Ladder(store, 32)
    order = np.random.default_rng(1).permutation(1000)
    shapes = [ladder.shape(part) for part in np.split(order, range(32, 1000, 32))]
    assert all(shape.filler == 16 for shape in shapes)
    assert len(set(shapes)) <= 5
    nodes = sum(shape.nodes for shape in shapes)
    assert nodes < 1.12 * store.num_nodes  # little is wasted


def test_what_no_rung_holds_keeps_its_own_shape():
    store = store_of(0, 200, low=2, high=200)
    ladder = Ladder(store, 2)
    largest = np.argsort(graph_sizes(store)[:, 0])[-1:].repeat(40)
    shape = ladder.shape(largest)
    assert shape == exact_shape(graph_sizes(store, largest))
    assert shape.filler == 0


def test_the_batches_of_a_step_take_one_shape():
    store = store_of(0, 1000)
    ladder = Ladder(store, 32)
    order = np.random.default_rng(1).permutation(1000)
    parts = np.split(order, range(32, 1000, 32))[:-1]
    steps = [ladder.shapes(parts[first : first + 3]) for first in range(0, 30, 3)]
    assert len({ladder.shape(part) for part in parts}) > 1
    assert all(len(set(shapes)) == 1 for shapes in steps)
    assert all(shapes[0].holds(graph_sizes(store, part)) for shapes in steps[:1] for part in parts[:3])
    few = parts[0], order[:1]  # too little for the other's shape
    assert ladder.shapes(few) == tuple(map(ladder.shape, few))


def test_links_and_graphs_without_edges():
    ladder = Ladder(GraphStore.from_pyg(random_graphs(0, 20, links=True)), 8)
    assert ladder.rungs[7].links > 0
    store = GraphStore(torch.arange(0, 50, 5), torch.zeros(10, dtype=torch.int64), torch.zeros(2, 0).long())
    shape = Ladder(store, 4).shape(np.array([1, 2]))
    assert (shape.edges, shape.links, shape.filler) == (0, 0, 5)
    assert store.batch([1, 2], shape).num_edges == 0


def test_exact_shapes_hold_only_their_own():
    shape = BatchShape(2, 5, 3, 0, 3)
    assert shape.holds(np.array([[3, 1, 0], [2, 2, 0]]))
    assert not shape.holds(np.array([[3, 1, 0], [1, 2, 0]]))
    assert not shape.holds(np.array([[4, 1, 0], [1, 2, 0]]))
