"""GCN with edge states against its equations with a dense Ã."""

import pytest
import torch
from torch.nn import functional as F

from sfiformer import ModelConfig, SFiFormer
from sfiformer.attention import Adjacency
from sfiformer.nn import EdgeGCN
from sfiformer.nn.local import make_local

# Node 3 receives nothing, 0 → 1 comes twice, 2 has an edge to itself.
EDGES = torch.tensor([[0, 0, 1, 2, 2, 3], [1, 1, 2, 2, 0, 1]])
COUNTED = [(0, 0, 1), (2, 1, 2), (4, 2, 0), (5, 3, 1)]  # edge, source, target


def by_equations(layer, x, e):
    """x̂, with Ã written out: rows are targets."""
    a = torch.eye(4, dtype=x.dtype)
    for _, j, i in COUNTED:
        a[i, j] = 1
    root = a.sum(1).rsqrt()
    a = root[:, None] * a * root[None, :]
    of_nodes, of_edges = layer.projection.weight.split(x.size(1), dim=1)
    sums = []
    for i in range(4):
        total = layer.projection.bias + sum(a[i, j] * (of_nodes @ x[j]) for j in range(4))
        for k, j, target in COUNTED:
            if target == i:
                total = total + a[i, j] * (of_edges @ e[k])
        sums.append(total)
    return torch.stack(sums)


@pytest.mark.parametrize("residual", [1, 0])
@pytest.mark.parametrize("known", [False, True])
def test_against_the_equations(known, residual):
    torch.manual_seed(0)
    layer = EdgeGCN(6, activation="gelu", dropout=0.5, residual=bool(residual)).double().eval()
    layer.norm.running_mean.normal_()
    x, e = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    found, expected = [], []
    for results, call in (
        (
            found,
            lambda x, e: layer(x, e, EDGES, adjacency=Adjacency.of(EDGES, 4, x.dtype) if known else None)[0],
        ),
        (expected, lambda x, e: residual * x + F.gelu(layer.norm(by_equations(layer, x, e)))),
    ):
        inputs = [x.clone().requires_grad_(), e.clone().requires_grad_()]
        out = call(*inputs)
        results += [out, *torch.autograd.grad(out.sin().sum(), [*inputs, *layer.projection.parameters()])]
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def test_without_edges():
    layer = EdgeGCN(4)
    x = torch.randn(3, 4, requires_grad=True)
    new_x, new_e = layer(x, torch.zeros(0, 4), torch.zeros(2, 0, dtype=torch.long))
    new_x.sum().backward()
    assert new_x.isfinite().all()
    assert new_e.shape == (0, 4)
    assert x.grad.isfinite().all()


def test_in_a_model(make_batch):
    config = ModelConfig(
        dim=24, layers=2, heads=2, local="edge-gcn", node_encoder="linear", node_features=5, edge_encoder="linear",
        edge_features=2, head="graph", outputs=3,
    )  # fmt: skip
    assert config.uses_edges
    assert isinstance(make_local(config, last=True), EdgeGCN)
    model = SFiFormer(config)
    batch = make_batch(config)
    model(batch).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
