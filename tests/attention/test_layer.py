"""The adjacency-enhanced attention layer."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from oracles import dense_adjacency
from sfiformer import SFiAttention
from sfiformer.attention import Adjacency
from sfiformer.attention.inputs import graph_sizes
from sfiformer.flow import flows_from_scores

SIZES = (5, 0, 1, 8)
PTR = torch.tensor([0, 5, 5, 6, 14])


@pytest.fixture
def batch():
    """Node features, edges within graphs (parallel ones and self-loops too), offsets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, 12, generator=generator, dtype=torch.float64)
    parts = [
        start + torch.randint(size, (2, 3 * size), generator=generator)
        for start, size in ((0, 5), (5, 1), (6, 8))
    ]
    return x, torch.cat(parts, 1), PTR


def _layer(**arguments) -> SFiAttention:
    torch.manual_seed(1)
    return SFiAttention(12, 3, **arguments).double()


def _heads(projected: torch.Tensor, layer: SFiAttention, normalise: bool) -> torch.Tensor:
    x = projected.view(len(projected), layer.heads, -1).transpose(0, 1)  # [heads, nodes, width]
    root_mean_square = (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
    return x / root_mean_square if normalise else x


def _flows_by_hand(layer: SFiAttention, x: torch.Tensor, lams, scaling="absolute", friction="learned"):
    """The flows of every graph from the layer's projections."""
    q, k = (_heads(part(x), layer, layer.qk_norm) for part in (layer.query, layer.key))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if friction == "tied":
        frictions = -scores
    else:
        qf, kf = (
            _heads(part(x), layer, layer.qk_norm) for part in (layer.friction_query, layer.friction_key)
        )
        frictions = qf @ kf.mT / math.sqrt(q.shape[-1])
    flows = []
    for graph, lam in enumerate(lams):
        own = slice(PTR[graph], PTR[graph + 1])
        alpha = {"alpha": layer.alpha} if scaling == "absolute" else {}
        flows.append(
            flows_from_scores(scores[:, own, own], frictions[:, own, own], lam=lam, scaling=scaling, **alpha)
        )
    return flows


def _layer_by_hand(layer: SFiAttention, x, edge_index, flows, gamma: float) -> torch.Tensor:
    """LayerNorm((1 + γ)⁻¹ Σ_h [Ã + γ Z^h] X W_V^h W_O^h + b_O) with dense matrices."""
    adjacency = dense_adjacency(edge_index, len(x))
    width = layer.value.out_features // layer.heads
    out = torch.zeros(len(x), layer.dim, dtype=x.dtype)
    for head in range(layer.heads):
        own = slice(head * width, (head + 1) * width)
        values = F.linear(x, layer.value.weight[own], layer.value.bias[own])
        z = torch.block_diag(*(graph[head] for graph in flows if graph.numel()))
        mixed = (adjacency + gamma * z) / (1 + gamma)
        out = out + mixed @ values @ layer.out.weight[:, own].T
    out = out + layer.out.bias
    return out if layer.norm is None else F.layer_norm(out, (layer.dim,), layer.norm.weight, layer.norm.bias)


def _sizes(dim: int, heads: int, projections: int, extra: int) -> int:
    """Projections to heads of full width, the output projection and its bias, LayerNorm, and a few scalars."""
    return heads * (projections * (dim * dim + dim) + dim * dim) + dim + 2 * dim + extra


@pytest.mark.parametrize(("dim", "heads"), [(68, 4), (32, 8), (235, 4)])
def test_parameter_count(dim, heads):
    """DESIGN's attention share of a layer: 6Hd² + 5Hd + d, and 2d + 2."""

    def count(**arguments):
        return sum(p.numel() for p in SFiAttention(dim, heads, **arguments).parameters())

    assert count() == 6 * heads * dim**2 + 5 * heads * dim + dim + 2 * dim + 2
    assert count(friction="tied") == _sizes(dim, heads, 3, 2)
    assert count(mode="dfi") == _sizes(dim, heads, 3, 1)
    assert count(adjacency=False) == _sizes(dim, heads, 5, 1)
    assert count(attention=False) == _sizes(dim, heads, 1, 0)
    assert count(norm=False) == count() - 2 * dim


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("friction", ["learned", "tied"])
def test_layer_by_hand(batch, friction, qk_norm):
    """λ = λ*/n with n the graph's own size, γ = 1 and the factor of λ* 1 to begin with."""
    x, edge_index, ptr = batch
    layer = _layer(lam=0.8, lam_scaling="graph", friction=friction, qk_norm=qk_norm)
    flows = _flows_by_hand(layer, x, [0.8 / max(n, 1) for n in SIZES], friction=friction)
    torch.testing.assert_close(layer.flows(x, ptr), flows)
    torch.testing.assert_close(layer(x, edge_index, ptr), _layer_by_hand(layer, x, edge_index, flows, 1.0))


def test_gamma_and_lam_factor_take_part(batch):
    x, edge_index, ptr = batch
    layer = _layer(lam=0.5, lam_scaling="graph")
    assert float(layer.gamma.detach()) == pytest.approx(1)
    assert float(layer.lam_factor.detach()) == pytest.approx(1)
    with torch.no_grad():
        layer.raw_gamma.fill_(2.0)
        layer.raw_lam_factor.fill_(-0.5)
    gamma, factor = (float(F.softplus(torch.tensor(x, dtype=torch.float64))) for x in (2.0, -0.5))
    flows = _flows_by_hand(layer, x, [0.5 * factor / max(n, 1) for n in SIZES])
    torch.testing.assert_close(layer(x, edge_index, ptr), _layer_by_hand(layer, x, edge_index, flows, gamma))


def test_sizes_may_be_known(batch):
    """A stack of layers makes them once; an empty graph counts as one node, and half precision does not round them."""
    layer, sizes = _layer(), graph_sizes(PTR, torch.float64)
    assert sizes.tolist() == [5, 1, 1, 8]
    assert torch.equal(layer(*batch, sizes=sizes), layer(*batch))
    assert graph_sizes(torch.tensor([0, 457]), torch.bfloat16).tolist() == [457]


def test_every_parameter_learns(batch):
    layer = _layer()
    layer(*batch).square().sum().backward()
    unmoved = [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()]
    assert unmoved == []


def test_potential_scaling(batch):
    x, edge_index, ptr = batch
    layer = _layer(lam=0.8, lam_scaling="potential")
    flows = _flows_by_hand(layer, x, [0.8] * 4, scaling="potential")
    torch.testing.assert_close(layer.flows(x, ptr), flows)
    torch.testing.assert_close(layer(x, edge_index, ptr), _layer_by_hand(layer, x, edge_index, flows, 1.0))


def test_largest_graph_scaling_keeps_that_of_training(batch):
    x, edge_index, ptr = batch
    layer = _layer(lam=0.8, lam_scaling="largest")
    largest = torch.cat([x, x])  # one graph of 28 nodes
    layer.eval()
    before = layer(x, edge_index, ptr)  # no training yet: the batch's own largest
    layer.train()
    in_training = _layer_by_hand(layer, x, edge_index, _flows_by_hand(layer, x, [0.8 / 8] * 4), 1.0)
    torch.testing.assert_close(before, in_training)
    torch.testing.assert_close(layer(x, edge_index, ptr), in_training)
    layer(largest, edge_index, torch.tensor([0, 28]))
    torch.testing.assert_close(layer(x, edge_index, ptr), in_training)
    layer.eval()
    kept = _layer_by_hand(layer, x, edge_index, _flows_by_hand(layer, x, [0.8 / 28] * 4), 1.0)
    torch.testing.assert_close(layer(x, edge_index, ptr), kept)
    copy = _layer(lam=0.8, lam_scaling="largest")
    copy.load_state_dict(layer.state_dict())
    torch.testing.assert_close(copy.eval()(x, edge_index, ptr), kept)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 449), (torch.float16, 70_001)])
def test_half_precision_does_not_round_the_largest_graph(dtype, size):
    layer = SFiAttention(12, 3, lam_scaling="largest")
    lam = layer.strengths(torch.tensor([0, size]), torch.zeros(0, 12, dtype=dtype)).lam
    torch.testing.assert_close(lam.detach(), torch.tensor([1 / size]))


def test_a_layer_begun_anew_has_seen_no_graph(batch):
    x, edge_index, ptr = batch
    layer = _layer(lam_scaling="largest")
    layer(x, edge_index, ptr)
    assert layer.largest > 0
    layer.reset_parameters()
    assert layer.largest == 0


def test_evaluation_does_not_change_the_largest_graph(batch):
    x, edge_index, ptr = batch
    layer = _layer(lam_scaling="largest")
    layer(x, edge_index, ptr)
    layer.eval()
    expected = layer(x, edge_index, ptr)
    layer(torch.cat([x, x]), edge_index, torch.tensor([0, 28]))
    torch.testing.assert_close(layer(x, edge_index, ptr), expected)


def test_looking_at_flows_does_not_change_the_largest_graph(batch):
    x, edge_index, ptr = batch
    layer = _layer(lam_scaling="largest")
    layer(x, edge_index, ptr)
    seen = layer.largest.clone()
    layer.flows(torch.cat([x, x]), torch.tensor([0, 28]))
    assert torch.equal(layer.largest, seen)


def test_the_default_device_does_not_matter(batch):
    layer = _layer().eval()
    expected = layer(*batch)
    torch.set_default_device("meta")
    try:
        torch.testing.assert_close(layer(*batch), expected)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("arguments", [{}, {"lam_scaling": "graph"}, {"mode": "dfi"}, {"friction": "tied"}])
def test_a_graph_does_not_feel_its_batch_mates(batch, arguments):
    x, edge_index, ptr = batch
    layer = _layer(**arguments)
    out = layer(x, edge_index, ptr)
    own = edge_index[:, edge_index[0] >= 6] - 6
    torch.testing.assert_close(layer(x[6:], own, torch.tensor([0, 8])), out[6:])


def test_permutation_equivariance(batch):
    x, edge_index, ptr = batch
    layer = _layer()
    order = torch.cat([torch.randperm(5), torch.tensor([5]), 6 + torch.randperm(8)])
    place = order.argsort()  # where each old node went
    out = layer(x[order], place[edge_index], ptr)
    torch.testing.assert_close(out, layer(x, edge_index, ptr)[order])


def test_dense_mode(batch):
    x, edge_index, ptr = batch
    layer = _layer(mode="dfi")
    q, k = (_heads(part(x), layer, True) for part in (layer.query, layer.key))
    scores = q @ k.mT / math.sqrt(12)
    flows = [scores[:, a:b, a:b].softmax(-1) for a, b in pairwise(PTR.tolist())]
    torch.testing.assert_close(layer.flows(x, ptr), flows)
    torch.testing.assert_close(layer(x, edge_index, ptr), _layer_by_hand(layer, x, edge_index, flows, 1.0))


@pytest.mark.parametrize("mode", ["sfi", "dfi"])
def test_without_adjacency(batch, mode):
    x, edge_index, ptr = batch
    layer = _layer(mode=mode, adjacency=False, norm=False)
    values = layer.value(x).view(14, 3, 12)
    parts = [
        torch.einsum("hij,jhd->ihd", z, values[PTR[g] : PTR[g + 1]])
        for g, z in enumerate(layer.flows(x, ptr))
    ]
    expected = layer.out(torch.cat(parts).flatten(1))
    torch.testing.assert_close(layer(x, edge_index, ptr), expected)


def test_without_attention(batch):
    x, edge_index, ptr = batch
    layer = _layer(attention=False, norm=False)
    near = dense_adjacency(edge_index, 14) @ (layer.value(x) @ layer.out.weight.T)
    torch.testing.assert_close(layer(x, edge_index, ptr), near + layer.out.bias)


def test_adjacency_made_beforehand(batch):
    x, edge_index, ptr = batch
    layer = _layer()
    made = Adjacency.of(edge_index, len(x), x.dtype)
    assert torch.equal(layer(x, edge_index, ptr, adjacency=made), layer(x, edge_index, ptr))


@pytest.mark.parametrize("options", [{}, {"mode": "dfi"}, {"friction": "tied"}, {"qk_norm": False}])
def test_heads_padded_as_on_a_gpu_change_nothing(batch, monkeypatch, options):
    x, edge_index, ptr = batch
    layer = _layer(**options)
    expected, scores, flows = layer(x, edge_index, ptr), layer.scores(x), layer.flows(x, ptr)
    monkeypatch.setattr("sfiformer.attention.widths.wide", lambda width, like: width + 3)
    torch.testing.assert_close(layer(x, edge_index, ptr), expected)
    for padded, plain in zip(layer.scores(x), scores, strict=True):
        assert padded.shape[-1] == plain.shape[-1] + 3
        torch.testing.assert_close(padded[..., :-3], plain)
    for padded, plain in zip(layer.flows(x, ptr), flows, strict=True):
        torch.testing.assert_close(padded, plain)


def test_normalised_queries_and_keys_bound_the_scores(batch):
    """The size of queries and keys does not matter; with every key alike scores stay within ±√width."""
    x, edge_index, ptr = batch
    layer = _layer()
    expected = layer(x, edge_index, ptr)
    with torch.no_grad():
        for part in (layer.query, layer.key, layer.friction_query, layer.friction_key):
            part.weight *= 1e4
            part.bias *= 1e4
    torch.testing.assert_close(layer(x, edge_index, ptr), expected, atol=1e-6, rtol=1e-6)
    dense = _layer(mode="dfi")
    for z in (flow.detach() for flow in dense.flows(1e6 * x, ptr)):
        if z.numel():
            spread = z.clamp(min=1e-300).log()
            assert float((spread.amax(-1) - spread.amin(-1)).max()) <= 2 * math.sqrt(12) + 1e-9


def test_friction_of_ones_own(batch):
    x, edge_index, ptr = batch

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = (torch.nn.Linear(12, 36) for _ in range(2))

        def forward(self, x):
            return self.query(x).view(-1, 3, 12), self.key(x).view(-1, 3, 12)

    learned = _layer()
    own = Own().double()
    own.query.load_state_dict(learned.friction_query.state_dict())
    own.key.load_state_dict(learned.friction_key.state_dict())
    layer = _layer(friction=own)
    shared = {name: p for name, p in learned.state_dict().items() if not name.startswith("friction")}
    layer.load_state_dict(shared, strict=False)
    torch.testing.assert_close(layer(x, edge_index, ptr), learned(x, edge_index, ptr))
    layer(x, edge_index, ptr).square().sum().backward()
    assert bool(own.query.weight.grad.any())
    assert any(p is own.query.weight for p in layer.parameters())
    plain = _layer(
        friction=lambda x: (x.new_zeros(len(x), 3, 12), x.new_zeros(len(x), 3, 12)), alpha=math.inf
    )
    dense = _layer(mode="dfi")
    dense.load_state_dict({n: p for n, p in plain.state_dict().items() if n != "raw_lam_factor"})
    torch.testing.assert_close(plain(x, edge_index, ptr), dense(x, edge_index, ptr))


@pytest.mark.parametrize("mode", ["sfi", "dfi"])
def test_dropout_only_in_training(batch, mode):
    x, edge_index, ptr = batch
    layer = _layer(mode=mode, dropout=0.5)
    assert not torch.equal(layer(x, edge_index, ptr), layer(x, edge_index, ptr))
    layer.eval()
    torch.testing.assert_close(layer(x, edge_index, ptr), _layer(mode=mode)(x, edge_index, ptr))


def test_narrow_heads(batch):
    layer = _layer(head_width=4)
    assert layer.query.out_features == 12
    assert layer(*batch).shape == (14, 12)
    assert [tuple(z.shape) for z in layer.flows(batch[0], PTR)] == [(3, n, n) for n in SIZES]


def test_proximal_solver(batch):
    from sfiformer.flow import Proximal

    solver, soft = Proximal(iterations=1500, start="constant"), {"lam_scaling": "graph", "alpha": 0.3}
    torch.testing.assert_close(
        _layer(solver=solver, **soft)(*batch), _layer(**soft)(*batch), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("mode", ["sfi", "dfi"])
@pytest.mark.parametrize("sizes", [(), (0,), (1,), (0, 1)])
def test_tiny_batches(mode, sizes):
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    none = torch.empty(2, 0, dtype=torch.int64)
    for arguments in ({}, {"lam_scaling": "graph"}, {"lam_scaling": "largest"}):
        layer = _layer(mode=mode, **arguments)
        out = layer(torch.randn(sum(sizes), 12, dtype=torch.float64), none, ptr)
        assert out.shape == (sum(sizes), 12)
        assert bool(out.isfinite().all())
        out.sum().backward()


@pytest.mark.parametrize("mode", ["sfi", "dfi"])
def test_low_precision(batch, mode):
    x, edge_index, ptr = batch
    expected = _layer(mode=mode)(x, edge_index, ptr)
    for dtype, atol in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        out = _layer(mode=mode).to(dtype)(x.to(dtype), edge_index, ptr)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=atol, rtol=0)
    layer = _layer(mode=mode).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x.float(), edge_index, ptr)
    torch.testing.assert_close(out.double(), expected, atol=0.1, rtol=0)
    out.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


def test_repr():
    assert "sfi" in repr(SFiAttention(12, 3))
    assert "adjacency=False" in repr(SFiAttention(12, 3, adjacency=False))


def test_a_layer_whose_gain_starts_at_0_starts_as_nothing_and_learns(batch):
    x, edges, ptr = batch
    layer = _layer(gain=0.0)
    out = layer(x, edges, ptr)
    assert torch.equal(out, torch.zeros_like(out))
    out.backward(torch.randn_like(out))
    assert layer.norm.weight.grad.abs().min() > 0
    layer.reset_parameters()
    assert torch.equal(layer.norm.weight, torch.zeros_like(layer.norm.weight))
    assert torch.equal(SFiAttention(4, 2).norm.weight, torch.ones(4))
    with pytest.raises(ValueError, match="gain must be finite"):
        SFiAttention(4, 2, gain=float("inf"))


def test_reset_parameters(batch):
    layer = _layer()
    before = layer.query.weight.clone()
    with torch.no_grad():
        layer.raw_gamma.fill_(3.0)
    layer.reset_parameters()
    assert float(layer.gamma.detach()) == pytest.approx(1)
    assert not torch.equal(before, layer.query.weight)


def test_friction_of_ones_own_is_reset_as_pytorch_makes_it():
    mix = torch.nn.MultiheadAttention(8, 2)
    layer = SFiAttention(8, 2, friction=torch.nn.Sequential(mix))
    before = {name: p.clone() for name, p in mix.named_parameters()}
    with torch.no_grad():
        mix.in_proj_bias.fill_(1.0)
    layer.reset_parameters()
    assert not torch.equal(mix.in_proj_weight, before["in_proj_weight"])
    assert not torch.equal(mix.out_proj.weight, before["out_proj.weight"])
    assert not mix.in_proj_bias.any()
    assert not mix.out_proj.bias.any()


def test_friction_of_ones_own_is_reset_part_by_part():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.made = torch.nn.Linear(8, 2 * 2 * 8)

        def forward(self, x):
            return self.made(x).view(len(x), 2, 2, 8).unbind(1)

    layer = SFiAttention(8, 2, friction=Twice())
    before = layer.friction.made.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.friction.made.weight, before)
