"""Batches gathered with tensor operations alone, exact and padded, against the store's plain ones."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graphs import random_graphs
from sfiformer.data import GraphStore
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
