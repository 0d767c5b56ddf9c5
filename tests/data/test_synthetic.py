"""Generated PATTERN and CLUSTER against their definition and the published statistics."""

import numpy as np
import pytest
import torch

from sfiformer.data import cluster, pattern


@pytest.fixture(scope="module")
def cluster_graphs():
    return cluster((600, 30, 20), seed=1)


@pytest.fixture(scope="module")
def pattern_graphs():
    return pattern((600, 30, 20), seed=1)


def undirected_pairs(store, index):
    """Edges of a graph as a set of (u, v), after checking that both directions and no loops are there."""
    batch = store.batch([index])
    pairs = list(zip(*batch.edge_index.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert {(v, u) for u, v in pairs} == set(pairs)
    assert all(u != v for u, v in pairs)
    return {(u, v) for u, v in pairs if u < v}, batch


def test_cluster_statistics(cluster_graphs):
    """Published: 117.2 nodes and 2,150.9 edges a graph, each edge counted once."""
    train = cluster_graphs["train"]
    assert [len(store) for store in cluster_graphs.values()] == [600, 30, 20]
    assert train.num_nodes / len(train) == pytest.approx(117.2, rel=0.03)
    assert train.num_edges / len(train) / 2 == pytest.approx(2150.9, rel=0.06)
    share = np.bincount(train.node["y"].numpy(), minlength=6) / train.num_nodes
    np.testing.assert_allclose(share, 1 / 6, atol=0.01)


def test_cluster_marks_one_node_of_each_community(cluster_graphs):
    store = cluster_graphs["val"]
    for graph in range(len(store)):
        batch = store.batch([graph])
        assert batch.x.dtype == torch.float32
        assert batch.x.shape[1] == 7
        assert (batch.x.sum(1) == 1).all()
        marked = batch.x[:, 0] == 0
        assert sorted(batch.y[marked].tolist()) == list(range(6))
        assert torch.equal(batch.x[marked].argmax(1), batch.y[marked] + 1)
        sizes = batch.y.bincount(minlength=6)
        assert 5 <= sizes.min() <= sizes.max() <= 34


def edge_rate(store, graphs, within):
    """Share of joined pairs among those with `within(y_u, y_v)`."""
    joined = total = 0
    for graph in range(graphs):
        edges, batch = undirected_pairs(store, graph)
        u, v = np.triu_indices(batch.num_nodes, 1)
        y = batch.y.numpy()
        chosen = within(y[u], y[v])
        total += chosen.sum()
        joined += sum((a, b) in edges for a, b in zip(u[chosen], v[chosen], strict=True))
    return joined / total


def test_cluster_edge_probabilities(cluster_graphs):
    assert edge_rate(cluster_graphs["val"], 12, lambda a, b: a == b) == pytest.approx(0.55, abs=0.02)
    assert edge_rate(cluster_graphs["val"], 12, lambda a, b: a != b) == pytest.approx(0.25, abs=0.01)


def test_pattern_statistics(pattern_graphs):
    """Published: 118.9 nodes and 3,039.3 edges; the expectation over patterns is 117.0 and 2,935."""
    train = pattern_graphs["train"]
    assert train.num_nodes / len(train) == pytest.approx(118.9, rel=0.05)
    assert train.num_edges / len(train) / 2 == pytest.approx(3039.3, rel=0.1)
    assert train.node["y"].float().mean() == pytest.approx(1 / 6, abs=0.02)
    np.testing.assert_allclose(train.node["x"].float().mean(0).numpy(), 1 / 3, atol=0.02)


def test_pattern_edge_probabilities(pattern_graphs):
    store = pattern_graphs["val"]
    assert edge_rate(store, 12, lambda a, b: a != b) == pytest.approx(0.5, abs=0.02)
    # Five communities of mean size 19.5: 544.5 pairs within at 0.5, 1,330.9 across at 0.35.
    assert edge_rate(store, 12, lambda a, b: (a == 0) & (b == 0)) == pytest.approx(0.383, abs=0.02)


def test_the_same_pattern_returns_in_every_split(pattern_graphs):
    """Graphs 3 of all splits hide pattern 3: same size, same features, and as a graph the same degrees."""

    def hidden(store, index):
        edges, batch = undirected_pairs(store, index)
        nodes = batch.y.nonzero().ravel().tolist()
        degree = dict.fromkeys(nodes, 0)
        for u, v in edges:
            if u in degree and v in degree:
                degree[u] += 1
                degree[v] += 1
        return sorted((degree[node], int(batch.x[node].argmax())) for node in nodes)

    first = hidden(pattern_graphs["train"], 3)
    assert hidden(pattern_graphs["val"], 3) == first
    assert hidden(pattern_graphs["train"], 103) == first
    assert hidden(pattern_graphs["train"], 4) != first


@pytest.mark.parametrize("make", [cluster, pattern])
def test_seeds_decide(make):
    one, same, other = make((5, 2, 2), seed=7), make((5, 2, 2), seed=7), make((5, 2, 2), seed=8)
    assert torch.equal(one["train"].edge_index, same["train"].edge_index)
    assert torch.equal(one["test"].node["x"], same["test"].node["x"])
    assert not torch.equal(one["train"].node_ptr, other["train"].node_ptr)
    assert not torch.equal(one["train"].node_ptr[:3], one["val"].node_ptr)


def test_small_and_wrong_sizes():
    assert sum(len(store) for store in cluster("small").values()) == 900
    with pytest.raises(ValueError, match="'tiny' is none of full, small"):
        pattern("tiny")
    with pytest.raises(ValueError, match="three positive numbers"):
        cluster((3, 0, 1))
