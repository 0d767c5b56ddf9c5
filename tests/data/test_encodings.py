"""Encodings against dense matrices written out from their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data

from sfiformer.data import AddEncodings, ESLapPE, GraphStore, LapPE, RandomWalkSE, encodings, flip_signs

RING = np.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
GRAPHS = {
    "one node": (1, np.zeros((2, 0), int)),
    "one node with a loop": (1, np.array([[0], [0]])),
    "no edges": (4, np.zeros((2, 0), int)),
    "smaller than k": (3, np.array([[0, 1], [1, 2]])),
    "ring, every eigenvalue twice": (6, RING),
    "two rings and an isolated node": (13, np.concatenate([RING, RING + 6], axis=1)),
    "multi-edges and loops": (5, np.array([[0, 0, 1, 1, 2, 2, 3, 4], [1, 1, 0, 2, 2, 3, 4, 4]])),
    "star": (9, np.array([[0] * 8, list(range(1, 9))])),
    "directed": (8, np.array([[0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 5, 6, 7]])),
}


def dense_adjacency(n: int, edge_index: np.ndarray) -> np.ndarray:
    adjacency = np.zeros((n, n))
    for u, v in edge_index.T.tolist():
        if u != v:
            adjacency[u, v] = adjacency[v, u] = 1.0
    return adjacency


def dense_laplacian(n: int, edge_index: np.ndarray, normalised: bool) -> np.ndarray:
    adjacency = dense_adjacency(n, edge_index)
    degree = adjacency.sum(0)
    if not normalised:
        return np.diag(degree) - adjacency
    matrix = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i == j and degree[i] > 0:
                matrix[i, j] = 1.0
            elif adjacency[i, j]:
                matrix[i, j] = -1.0 / np.sqrt(degree[i] * degree[j])
    return matrix


def assert_same_eigenspaces(values: np.ndarray, vectors: np.ndarray, matrix: np.ndarray, atol: float) -> None:
    """The columns are orthonormal eigenvectors of the smallest eigenvalues.

    Where an eigenvalue is repeated, single vectors are arbitrary: compare the projectors onto its eigenspace,
    or, for a space cut off at k, check that the vectors lie inside it.
    """
    oracle_values, oracle_vectors = np.linalg.eigh(matrix)
    k = values.size
    np.testing.assert_allclose(values, oracle_values[:k], atol=atol)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(k), atol=atol)
    start = 0
    while start < k:
        same = np.abs(oracle_values - oracle_values[start]) < 1e-6
        columns = np.flatnonzero(same[:k])
        projector = oracle_vectors[:, same] @ oracle_vectors[:, same].T
        if columns.size == same.sum():
            np.testing.assert_allclose(vectors[:, columns] @ vectors[:, columns].T, projector, atol=atol)
        np.testing.assert_allclose(projector @ vectors[:, columns], vectors[:, columns], atol=atol)
        start = columns[-1] + 1


def check_laplacian_encodings(n: int, edge_index: np.ndarray, k: int) -> None:
    fields = LapPE(k)(n, edge_index)
    vectors, values = fields["lappe_vectors"], fields["lappe_values"]
    assert vectors.shape == (n, k)
    assert values.shape == (1, k)
    assert vectors.dtype == values.dtype == np.float32
    kept = min(n, k)
    assert np.isnan(vectors[:, kept:]).all()
    assert np.isnan(values[:, kept:]).all()
    matrix = dense_laplacian(n, edge_index, normalised=False)
    assert_same_eigenspaces(values[0, :kept], vectors[:, :kept], matrix, 1e-5)

    vectors = ESLapPE(k)(n, edge_index)["eslappe_vectors"]
    assert (vectors[:, kept:] == 0).all()
    matrix = dense_laplacian(n, edge_index, normalised=True)
    values = np.einsum("ik,ij,jk->k", vectors, matrix, vectors)[:kept]
    assert_same_eigenspaces(values, vectors[:, :kept], matrix, 1e-5)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("k", [1, 4, 10])
def test_laplacian_encodings(name, k):
    check_laplacian_encodings(*GRAPHS[name], k)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 30), edges=st.integers(0, 60), seed=st.integers(0, 2**32 - 1))
def test_laplacian_encodings_of_random_graphs(n, edges, seed):
    check_laplacian_encodings(n, np.random.default_rng(seed).integers(0, n, (2, edges)), 6)


@pytest.mark.parametrize("name", ["grid", "star", "two rings"])
def test_large_graphs_use_the_sparse_solver_and_agree(name, monkeypatch):
    if name == "grid":  # square: eigenvalues come in pairs
        index = np.arange(144).reshape(12, 12)
        down, right = [index[:-1].ravel(), index[1:].ravel()], [index[:, :-1].ravel(), index[:, 1:].ravel()]
        n, edge_index = 144, np.concatenate([down, right], axis=1)
    elif name == "star":
        n, edge_index = 150, np.stack([np.zeros(149, int), np.arange(1, 150)])
    else:
        ring = np.stack([np.arange(80), (np.arange(80) + 1) % 80])
        n, edge_index = 160, np.concatenate([ring, ring + 80], axis=1)
    monkeypatch.setattr(encodings, "DENSE_NODES", 20)
    check_laplacian_encodings(n, edge_index, 9)


@pytest.mark.parametrize("name", GRAPHS)
def test_random_walk_return_probabilities(name):
    n, edge_index = GRAPHS[name]
    adjacency = dense_adjacency(n, edge_index)
    degree = adjacency.sum(1, keepdims=True)
    walk = np.divide(adjacency, degree, out=np.zeros_like(adjacency), where=degree > 0)
    expected = np.stack([np.diag(np.linalg.matrix_power(walk, t)) for t in range(1, 8)], axis=1)
    np.testing.assert_allclose(RandomWalkSE(7)(n, edge_index)["rwse"], expected, atol=1e-6)


def test_encodings_repeat_exactly_with_the_largest_entry_positive():
    rng = np.random.default_rng(0)
    edge_index = rng.integers(0, 40, (2, 90))
    first, second = LapPE(8)(40, edge_index), LapPE(8)(40, edge_index)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    vectors = first["lappe_vectors"]
    largest = np.abs(vectors).argmax(0)
    assert (vectors[largest, np.arange(8)] > 0).all()


def test_transform_adds_fields_that_collate():
    transform = AddEncodings([LapPE(4), ESLapPE(3), RandomWalkSE(5)])
    graphs = [
        Data(edge_index=torch.from_numpy(ends), num_nodes=n)
        for n, ends in (GRAPHS["star"], GRAPHS["no edges"])
    ]
    batch = Batch.from_data_list([transform(data) for data in graphs])
    assert "rwse" not in graphs[0]
    shapes = {
        name: tuple(batch[name].shape)
        for name in ("lappe_vectors", "lappe_values", "eslappe_vectors", "rwse")
    }
    assert shapes == {
        "lappe_vectors": (13, 4),
        "lappe_values": (2, 4),
        "eslappe_vectors": (13, 3),
        "rwse": (13, 5),
    }
    store = GraphStore.from_pyg([transform(data) for data in graphs])
    assert set(store.graph) == {"lappe_values"}


def test_signs_flip_by_graph_and_eigenvector():
    vectors = torch.rand(50, 6) + 0.1
    vectors[:20, 5] = float("nan")
    batch = torch.tensor([0] * 20 + [1] * 30)
    flipped = flip_signs(vectors, batch, 2, torch.Generator().manual_seed(3))
    signs = flipped / vectors
    for graph in (0, 1):
        rows = signs[batch == graph]
        assert torch.equal(rows.nan_to_num(), rows[:1].nan_to_num().expand_as(rows))
    assert set(signs.nan_to_num(1.0).unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(flipped.isnan(), vectors.isnan())
    again = flip_signs(vectors, batch, 2, torch.Generator().manual_seed(3))
    assert torch.equal(again.nan_to_num(), flipped.nan_to_num())
