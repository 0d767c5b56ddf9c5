"""Ã against dense matrices."""

import pytest
import torch

from oracles import dense_adjacency
from sfiformer.attention import Adjacency

EDGES = {
    "directed": [[0, 1, 2, 3], [1, 2, 3, 0]],
    "both ways": [[0, 1, 1, 2], [1, 0, 2, 1]],
    "parallel": [[0, 0, 0, 1, 1], [1, 1, 1, 2, 2]],
    "self-loops": [[0, 0, 2, 2, 2], [0, 1, 2, 2, 1]],
    "star": [[1, 2, 3, 4, 1], [0, 0, 0, 0, 0]],
    "none": [[], []],
}


@pytest.mark.parametrize("name", EDGES)
def test_equals_the_dense_matrix(name):
    edge_index = torch.tensor(EDGES[name], dtype=torch.int64)
    x = torch.randn(5, 3, dtype=torch.float64)
    product = Adjacency.of(edge_index, 5, torch.float64).matmul(x)
    torch.testing.assert_close(product, dense_adjacency(edge_index, 5) @ x)


def test_random_multigraph_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(12, (2, 80), generator=generator)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    dense = dense_adjacency(edge_index, 12)
    product = Adjacency.of(edge_index, 12, torch.float64).matmul(x)
    torch.testing.assert_close(product, dense @ x)
    torch.testing.assert_close(torch.autograd.grad((product * weight).sum(), x)[0], dense.T @ weight)


def test_order_of_edges_does_not_matter():
    edge_index = torch.randint(8, (2, 40))
    x = torch.randn(8, 2, dtype=torch.float64)
    shuffled = edge_index[:, torch.randperm(40)]
    products = [Adjacency.of(edges, 8, torch.float64).matmul(x) for edges in (edge_index, shuffled)]
    torch.testing.assert_close(*products)


def test_no_nodes():
    none = torch.empty(2, 0, dtype=torch.int64)
    assert Adjacency.of(none, 0).matmul(torch.empty(0, 3)).shape == (0, 3)


def test_edges_in_int32_do_not_overflow():
    """Sources that are 2¹⁵ apart, of 2¹⁷ nodes: their products differ by 2³²."""
    edges = torch.tensor([[0, 1 << 15], [5, 5]])
    narrow, wide = (Adjacency.of(each, 1 << 17).weight for each in (edges.int(), edges))
    torch.testing.assert_close(narrow, wide)
    assert bool((wide > 0).all())
