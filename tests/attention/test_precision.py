"""Dtypes, autocast and wide scores."""

import math

import pytest
import torch

import oracles
from packing import Packed, attend, one_by_one, packed
from sfiformer import SFiAttention, dfi_attention, sfi_attention

SIZES = (12, 0, 1, 20)
CASES = [{"lam": 0.05}, {"lam": 0.05, "alpha": math.inf}, {"lam": 0.7, "scaling": "potential"}]


def _error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.detach().double() - exact.detach()).abs().max())


@pytest.mark.parametrize("arguments", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_that_of_the_type(dtype, arguments):
    """At most twice the error (three times for gradients) of rounding inputs and results alone, and a few units of type."""
    inputs = packed(SIZES, heads=3, width=16).to(dtype).leaves()
    exact = inputs.to(torch.float64).leaves()
    out, expected = attend(inputs, **arguments), one_by_one(exact, **arguments)
    assert out.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert _error(out, expected) <= 8 * unit * float(expected.detach().abs().max())
    weight = torch.randn_like(expected).to(dtype)
    got = torch.autograd.grad((out * weight).sum(), inputs[:5])
    true = torch.autograd.grad((expected * weight.double()).sum(), exact[:5])
    for x, y in zip(got, true, strict=True):
        assert x.dtype == dtype
        assert _error(x, y) <= 30 * unit * float(y.abs().max())


@pytest.mark.parametrize("double", ["q", "k", "v", "q_friction", "k_friction"])
@pytest.mark.parametrize("return_flows", [False, True])
def test_mixed_dtypes_are_computed_in_the_widest(double, return_flows):
    inputs = packed(SIZES)
    narrow = inputs.to(torch.float32)
    mixed = narrow._replace(**{double: getattr(inputs, double)})
    out = attend(mixed, lam=0.05, return_flows=return_flows)
    out = out[0] if return_flows else out
    assert out.dtype == mixed.v.dtype
    torch.testing.assert_close(out, attend(mixed.to(torch.float64), lam=0.05).to(out.dtype))


@pytest.mark.parametrize("double", ["q", "k", "v"])
def test_mixed_dtypes_of_dense_attention(double):
    inputs = packed(SIZES)
    mixed = inputs.to(torch.float32)._replace(**{double: getattr(inputs, double)})
    q, k, v, _, _, ptr = mixed
    expected = dfi_attention(q.double(), k.double(), v.double(), ptr)
    torch.testing.assert_close(dfi_attention(q, k, v, ptr), expected.to(v.dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_offsets_of_any_integers(dtype):
    inputs = packed(SIZES)
    q, k, v, _, _, ptr = inputs
    narrow = inputs._replace(ptr=ptr.to(dtype))
    torch.testing.assert_close(attend(narrow, lam=0.05), attend(inputs, lam=0.05))
    torch.testing.assert_close(dfi_attention(q, k, v, narrow.ptr), dfi_attention(q, k, v, ptr))
    layer, x, edges = (
        SFiAttention(4, 2, lam_scaling="graph"),
        torch.randn(len(q), 4),
        torch.tensor([[0], [1]]),
    )
    torch.testing.assert_close(layer(x, edges, narrow.ptr), layer(x, edges, ptr))


def test_mixed_dtypes_give_that_of_the_values():
    inputs = packed(SIZES)
    mixed = inputs._replace(q=inputs.q.float(), k_friction=inputs.k_friction.float(), v=inputs.v.bfloat16())
    out = attend(mixed, lam=0.05)
    assert out.dtype == torch.bfloat16
    assert _error(out, attend(inputs, lam=0.05)) < 0.02


@pytest.mark.parametrize("return_flows", [False, True])
def test_autocast_keeps_the_solve_in_float32(return_flows):
    inputs = packed(SIZES, dtype=torch.float32).leaves()
    expected = attend(inputs, lam=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(inputs, lam=0.05, return_flows=return_flows)
        out = out[0] if return_flows else out
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)
    for gradient in torch.autograd.grad(out.float().square().sum(), inputs[:5]):
        assert bool(gradient.isfinite().all())


def test_autocast_of_halves():
    """Projections under autocast hand over bfloat16."""
    inputs = packed(SIZES, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(inputs, lam=0.05)
    assert out.dtype == torch.bfloat16
    assert _error(out, one_by_one(inputs.to(torch.float64), 0.05)) < 0.03


def _column(values: list[float], size: float = 1.0) -> torch.Tensor:
    return (torch.tensor(values) * size).half().view(-1, 1, 1).requires_grad_()


@pytest.mark.parametrize("nodes", [3, 90])
@pytest.mark.parametrize("return_flows", [False, True])
def test_gradients_end_where_float16_does(return_flows, nodes):
    """Of keys that are alike, and so have steep ones; they are few, or more than the loops for few nodes take."""
    rest, ptr = [0.0] * (nodes - 3), torch.tensor([0, nodes])
    q, k, v = _column([1.0] * nodes), _column([10.0, 10.0, -10.0, *rest]), _column([1.0, -1.0, 2.0, *rest])
    qf, kf = _column([1.0] * nodes), _column([0.0, 0.0, 5.0, *([5.0] * len(rest))])
    out = sfi_attention(q, k, v, qf, kf, ptr, lam=1.0, alpha=math.inf, return_flows=return_flows)
    out = out[0] if return_flows else out
    gradients = torch.autograd.grad(out.float().sum(), (q, k, v, qf, kf))
    assert all(bool(x.isfinite().all()) for x in gradients)
    torch.testing.assert_close(gradients[4].flatten()[:2], torch.tensor([-65504.0, 65504.0]).half())


@pytest.mark.parametrize("nodes", [3, 90])
def test_gradients_of_dense_attention_end_where_float16_does(nodes):
    values = [1.0, -1.0, 2.0] * (nodes // 3)
    q, k, v = _column([1.0] * nodes), _column(values, 1e4), _column(values, 3e4)
    out = dfi_attention(q, k, v, torch.tensor([0, nodes]), scale=1e-4)
    gradients = torch.autograd.grad(out, (q, k, v), torch.full_like(out, 100.0))
    assert all(bool(x.isfinite().all()) for x in gradients)
    torch.testing.assert_close(gradients[0], torch.full_like(q, 65504.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arguments", CASES)
def test_never_nan_at_wide_scores(arguments, dtype):
    for spread in (10.0, 60.0, 200.0, 1000.0):
        inputs = packed((1, 2, 25), width=6, dtype=dtype, spread=spread).leaves()
        out = attend(inputs, **arguments)
        assert bool(out.isfinite().all())
        assert float(out.detach().abs().max()) <= 1.01 * float(inputs.v.detach().abs().max())
        for gradient in torch.autograd.grad(out.sum(), inputs[:5]):
            assert bool(gradient.isfinite().all())


def test_identical_nodes_never_give_nan():
    """Automorphic nodes: equal keys and equal frictions."""
    for spread in (1.0, 60.0):
        inputs = packed((6,), dtype=torch.float32, spread=spread)
        twins = Packed(*(torch.cat([x, x, x]) for x in inputs[:5]), torch.tensor([0, 18])).leaves()
        out = attend(twins, lam=0.1)
        torch.testing.assert_close(out[:6], out[6:12], atol=1e-5, rtol=1e-4)
        for gradient in torch.autograd.grad((out * torch.randn_like(out)).sum(), twins[:5]):
            assert bool(gradient.isfinite().all())


def _precise(
    inputs: Packed, weight: torch.Tensor, arguments: dict
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients of one graph of one head, the rows in decimal arithmetic of many digits."""
    q, k, v, qf, kf = (x[:, 0].detach().double() for x in inputs[:5])
    scale = q.shape[-1] ** -0.5
    s, u, g = q @ k.T * scale, qf @ kf.T * scale, weight[:, 0].double() @ v.T
    lam, alpha, potential = arguments["lam"], arguments.get("alpha", 0.1), "scaling" in arguments
    flows, by_s, by_u = [], [], []
    for row in zip(s.tolist(), u.tolist(), g.tolist(), strict=True):
        precise = oracles.PreciseRow(*row[:2])
        strength = precise.potential_lam(lam) if potential else lam
        flows.append(precise.flows(strength, math.inf if potential else alpha))
        ds, du, _ = precise.gradients(lam, alpha, row[2], potential)
        by_s.append(ds)
        by_u.append(du)
    z, ds, du = (torch.tensor(x, dtype=torch.float64) for x in (flows, by_s, by_u))
    gradients = [ds @ k, ds.T @ q, du @ kf, du.T @ qf]
    by_q, by_k, by_qf, by_kf = (x * scale for x in gradients)
    return z @ v, [by_q, by_k, z.T @ weight[:, 0].double(), by_qf, by_kf]


@pytest.mark.parametrize("arguments", CASES)
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 10.0])
def test_gradients_against_decimal_arithmetic(spread, arguments):
    """float64, relative to each gradient's largest entry."""
    inputs = packed((18,), heads=1, width=5, spread=spread, seed=2).leaves()
    weight = torch.randn(18, 1, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    out = attend(inputs, **arguments)
    expected, true = _precise(inputs, weight, arguments)
    torch.testing.assert_close(out[:, 0], expected, atol=1e-10, rtol=0)
    for got, gradient in zip(torch.autograd.grad((out * weight).sum(), inputs[:5]), true, strict=True):
        assert _error(got[:, 0], gradient) <= 1e-9 * max(1.0, float(gradient.abs().max()))


@pytest.mark.parametrize("arguments", CASES)
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_float32_gradients_against_decimal_arithmetic(spread, arguments):
    inputs = packed((18,), heads=1, width=5, spread=spread, seed=2, dtype=torch.float32).leaves()
    weight = torch.randn(18, 1, 5, generator=torch.Generator().manual_seed(3))
    out = attend(inputs, **arguments)
    expected, true = _precise(inputs, weight, arguments)
    assert _error(out[:, 0], expected) <= 1e-4
    for got, gradient in zip(torch.autograd.grad((out * weight).sum(), inputs[:5]), true, strict=True):
        assert _error(got[:, 0], gradient) <= 1e-3 * max(1.0, float(gradient.abs().max()))
