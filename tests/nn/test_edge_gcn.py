"""GCN with edges against its equations, an edge at a time."""

import pytest
import torch
from torch.nn import functional as F

from sfiformer import ModelConfig, SFiFormer
from sfiformer.attention import EdgeOrder
from sfiformer.nn import EdgeGCN
from sfiformer.nn.local import make_local

# Node 3 receives nothing, 0 → 1 comes twice, 2 has an edge to itself.
EDGES = torch.tensor([[0, 0, 1, 2, 2, 3], [1, 1, 2, 2, 0, 1]])


def by_equations(layer, x, e):
    """x̂, of which node 3's is 0."""
    sums = [torch.zeros(6, dtype=x.dtype) for _ in range(4)]
    for k, (j, i) in enumerate(EDGES.T.tolist()):
        message = layer.projection.weight @ x[j] + layer.projection.bias + e[k]
        sums[i] = sums[i] + message.clamp(min=0)
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
            lambda x, e: layer(x, e, EDGES, order=EdgeOrder.of(EDGES, 4) if known else None)[0],
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


def test_gcn_plus_has_its_published_number_of_parameters():
    model = SFiFormer.from_preset(
        "peptides-func", layers=3, dim=275, local="edge-gcn", attention="none", norm="none", residual=False,
        feed_forward=False, pe="rwse", pe_size=32, pe_dim=28, head_layers=4,
    )  # fmt: skip
    assert model.num_parameters == 507_351
