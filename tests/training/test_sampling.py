import numpy as np
import pytest

from sfiformer.training.sampling import (
    Stream,
    derived_seed,
    epoch_order,
    in_batches,
    share,
    train_subset,
)


def test_an_epoch_takes_every_graph_once_in_an_order_of_its_own():
    orders = [epoch_order(50, 3, epoch) for epoch in (0, 1, 0)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert (orders[0] != orders[1]).any()
    assert (orders[0] == orders[2]).all()
    assert (epoch_order(50, 4, 0) != orders[0]).any()


@pytest.mark.parametrize("graphs", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_are_disjoint_whole_and_even(graphs, ranks):
    batch = np.arange(graphs) * 10
    parts = [batch[share(batch, rank, ranks)] for rank in range(ranks)]
    assert np.concatenate(parts).tolist() == batch.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_batches_leave_nothing_out():
    assert [batch.tolist() for batch in in_batches(np.arange(5), 2)] == [[0, 1], [2, 3], [4]]


def test_subset_is_fixed_and_sorted():
    chosen = train_subset(100, 10, 0)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) == 10
    assert train_subset(4, 10, 0).tolist() == [0, 1, 2, 3]


def test_seeds_differ_by_stream_and_place():
    seeds = {derived_seed(0, stream, *place) for stream in Stream for place in ((0, 0), (0, 1), (1, 0))}
    assert len(seeds) == 3 * len(Stream)
    assert all(0 <= seed < 2**63 for seed in seeds)
