"""Badly scaled rows against decimal arithmetic of hundreds of digits."""

import itertools
import math
from functools import cache

import pytest
import torch

import oracles
from sfiformer.flow import flows_from_scores

SPREADS = [0.1, 1.0, 5.0, 20.0, 60.0]
ALPHAS = [0.01, 0.1, math.inf]
STRENGTHS = [0.5, 1.0, 5.0]  # λ*, for λ = λ*/n
BOUND = 2e-5
ROWS, KEYS = 200, 16


def _scores(s_spread: float, u_spread: float, rows: int = ROWS, keys: int = KEYS, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    s, u = torch.randn(2, rows, keys, generator=generator)
    return s * s_spread, u * u_spread


@cache
def _precise(s_spread: float, u_spread: float, rows: int = ROWS, keys: int = KEYS):
    s, u = _scores(s_spread, u_spread, rows, keys)
    return [oracles.PreciseRow(a, b) for a, b in zip(s.tolist(), u.tolist(), strict=True)]


def _row_errors(z: torch.Tensor, expected: list[list[float]]) -> torch.Tensor:
    """Largest error of a flow in each row."""
    return (z.double() - torch.tensor(expected, dtype=torch.float64)).abs().amax(-1)


@pytest.mark.parametrize("u_spread", SPREADS)
@pytest.mark.parametrize("s_spread", SPREADS)
def test_float32_rows(s_spread, u_spread):
    s, u = _scores(s_spread, u_spread)
    rows = _precise(s_spread, u_spread)
    for alpha, strength in itertools.product(ALPHAS, STRENGTHS):
        lam = strength / KEYS
        z = flows_from_scores(s, u, lam=lam, alpha=alpha)
        error = _row_errors(z, [row.flows(lam, alpha) for row in rows])
        assert error.max() <= BOUND, f"alpha={alpha}, lam*={strength}, row {int(error.argmax())}"


@pytest.mark.parametrize("u_spread", SPREADS)
@pytest.mark.parametrize("s_spread", [1.0, 20.0, 60.0])
def test_float32_rows_by_potential(s_spread, u_spread):
    s, u = _scores(s_spread, u_spread)
    rows = _precise(s_spread, u_spread)
    for strength in STRENGTHS:
        z = flows_from_scores(s, u, lam=strength, scaling="potential")
        error = _row_errors(z, [row.flows(row.potential_lam(strength), math.inf) for row in rows])
        assert error.max() <= BOUND, f"lam*={strength}, row {int(error.argmax())}"


@pytest.mark.parametrize("spreads", [(5.0, 5.0), (20.0, 1.0), (60.0, 20.0)])
def test_float32_rows_of_many_keys(spreads):
    s, u = _scores(*spreads, rows=12, keys=160)
    rows = _precise(*spreads, rows=12, keys=160)
    for alpha, strength in itertools.product(ALPHAS, STRENGTHS):
        lam = strength / 160
        error = _row_errors(
            flows_from_scores(s, u, lam=lam, alpha=alpha), [row.flows(lam, alpha) for row in rows]
        )
        assert error.max() <= BOUND


@pytest.mark.parametrize("spreads", [(200.0, 200.0), (200.0, 0.1), (0.1, 200.0)])
def test_float64_rows_beyond(spreads):
    s, u = (x.double() for x in _scores(*spreads, rows=6))
    rows = _precise(*spreads, rows=6)
    for alpha, strength in itertools.product(ALPHAS, STRENGTHS):
        lam = strength / KEYS
        error = _row_errors(
            flows_from_scores(s, u, lam=lam, alpha=alpha), [row.flows(lam, alpha) for row in rows]
        )
        assert error.max() <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("arguments", [{"alpha": alpha} for alpha in ALPHAS] + [{"scaling": "potential"}])
def test_never_nan(arguments, dtype):
    """Flows stay flows and gradients finite, for every pair of spreads, in rows of many lengths."""
    for s_spread, u_spread, keys in itertools.product(
        [0.1, 1.0, 20.0, 200.0], [0.1, 1.0, 20.0, 200.0], [2, 37]
    ):
        s, u = (x.to(dtype).requires_grad_() for x in _scores(s_spread, u_spread, keys=keys, seed=1))
        for strength in STRENGTHS:
            lam = strength if "scaling" in arguments else strength / keys
            lam = torch.tensor(lam, dtype=torch.float64, requires_grad=True)
            z = flows_from_scores(s, u, lam=lam, **arguments)
            assert bool(((z >= 0) & (z <= 1 + BOUND)).all())
            assert bool((z.sum(-1) <= 1 + BOUND).all())
            for gradient in torch.autograd.grad((z * torch.randn_like(z)).sum(), (s, u, lam)):
                assert bool(gradient.isfinite().all()), (s_spread, u_spread, keys, strength)


def test_mild_rows_beside_wide_ones():
    """What a row needs of the arithmetic does not show in its neighbours."""
    s, u = _scores(1.0, 1.0, rows=40)
    wide_s, wide_u = _scores(60.0, 60.0, rows=40)
    for arguments in ({"alpha": 0.1}, {"alpha": math.inf}, {"scaling": "potential"}):
        alone = flows_from_scores(s, u, lam=0.5, **arguments)
        beside = flows_from_scores(torch.cat([s, wide_s]), torch.cat([u, wide_u]), lam=0.5, **arguments)[:40]
        torch.testing.assert_close(beside, alone, atol=2e-6, rtol=0)


def test_extreme_scores():
    """The largest and least finite scores, and frictions that underflow."""
    top = torch.finfo(torch.float32).max
    for s, u in itertools.product(([top, -top, 0.0], [1e4, -1e4, 3.0], [0.0, 0.0, 0.0]), repeat=2):
        for alpha in ALPHAS:
            z = flows_from_scores(torch.tensor([s]), torch.tensor([u]), lam=1.0, alpha=alpha)
            assert bool((z >= 0).all())
            assert float(z.sum()) <= 1 + BOUND
            if math.isinf(alpha):
                assert float(z.sum()) == pytest.approx(1, abs=BOUND)


def _duplicated(s_spread: float, u_spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every key twice, some thrice."""
    s, u = _scores(s_spread, u_spread, rows=100, keys=6)
    return torch.cat([s, s, s[:, :2]], -1), torch.cat([u, u, u[:, :2]], -1)


@pytest.mark.parametrize("u_spread", [0.1, 5.0, 60.0])
@pytest.mark.parametrize("s_spread", [0.1, 5.0, 20.0, 60.0])
def test_duplicated_keys(s_spread, u_spread):
    """Twins carry the same flow; gradients are those of decimal arithmetic, saturated towards the type's end.

    Saturated gradients may leave room for the sums that they enter: 1e28 of float32's 3e38.
    """
    s, u = _duplicated(s_spread, u_spread)
    keys, top = s.shape[1], 1e28
    weight = torch.randn(s.shape, generator=torch.Generator().manual_seed(5))
    rows = [oracles.PreciseRow(a, b) for a, b in zip(s[:20].tolist(), u[:20].tolist(), strict=True)]
    for alpha in ALPHAS:
        s_leaf, u_leaf = s.clone().requires_grad_(), u.clone().requires_grad_()
        z = flows_from_scores(s_leaf, u_leaf, lam=1 / keys, alpha=alpha)
        assert _row_errors(z[:20].detach(), [row.flows(1 / keys, alpha) for row in rows]).max() <= BOUND
        torch.testing.assert_close(z[:, :6], z[:, 6:12], atol=1e-6, rtol=1e-5)
        by_s, by_u = torch.autograd.grad((z * weight).sum(), (s_leaf, u_leaf))
        assert bool(by_s.isfinite().all())
        assert bool(by_u.isfinite().all())
        for i, row in enumerate(rows):
            true_s, true_u, _ = row.gradients(1 / keys, alpha, weight[i].tolist())
            for got, true in ((by_s[i], true_s), (by_u[i], true_u)):
                got, true = (torch.as_tensor(x, dtype=torch.float64).clamp(-top, top) for x in (got, true))
                scale = true.abs().max().clamp(min=1)
                assert (got - true).abs().max() <= 1e-3 * scale, (alpha, i, got, true)


def test_duplicated_keys_at_any_spread_have_finite_gradients():
    for s_spread, u_spread in itertools.product([0.1, 1.0, 20.0, 200.0], repeat=2):
        s, u = (x.requires_grad_() for x in _duplicated(s_spread, u_spread))
        for arguments in ({"alpha": 0.01}, {"alpha": math.inf}, {"scaling": "potential"}):
            z = flows_from_scores(s, u, lam=0.5, **arguments)
            for gradient in torch.autograd.grad((z * torch.randn_like(z)).sum(), (s, u)):
                assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("height", [10.0, 20.0, 40.0, 60.0])
@pytest.mark.parametrize("keys", [2, 5])
def test_a_key_of_no_weight_and_all_the_friction_leaves(height, keys, dtype):
    """Its weight is lost in rounding beside the other's; what friction takes from it is not."""
    s = torch.tensor([0.0] * (keys - 1) + [height], dtype=dtype)
    u = torch.tensor([0.0] * (keys - 1) + [-height], dtype=dtype)
    for alpha, lam in itertools.product(ALPHAS, (0.1, 0.5, 2.0)):
        expected = [oracles.PreciseRow(s.tolist(), u.tolist()).flows(lam, alpha)]
        z = flows_from_scores(s[None], u[None], lam=lam, alpha=alpha)
        assert _row_errors(z, expected).max() <= BOUND, (alpha, lam)
