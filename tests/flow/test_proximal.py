"""The paper's iteration, corrected."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from sfiformer.flow import Proximal, flows_from_scores, solve_flows

LAM, ALPHA = 0.08, 0.3


def _scores(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *shape, generator=generator, dtype=torch.float64)


def _solve(s, u, mask=None, **settings) -> torch.Tensor:
    return flows_from_scores(s, u, lam=LAM, alpha=ALPHA, mask=mask, solver=Proximal(**settings))


@pytest.mark.parametrize("start", ["uniform", "constant", "softmax"])
def test_converges_to_the_exact_flows(start):
    s, u = _scores(2, 6, 6)
    exact = flows_from_scores(s, u, lam=LAM, alpha=ALPHA)
    torch.testing.assert_close(_solve(s, u, iterations=3000, start=start), exact, atol=1e-7, rtol=0)
    assert (_solve(s, u, iterations=3000, start=start) == 0).sum() == (exact == 0).sum() > 0


def test_takes_resistances_too():
    r, f = torch.rand(2, 6, 6, dtype=torch.float64) + 0.1
    exact = solve_flows(r, f, lam=LAM, alpha=ALPHA)
    z = solve_flows(r, f, lam=LAM, alpha=ALPHA, solver=Proximal(iterations=2000))
    torch.testing.assert_close(z, exact, atol=1e-8, rtol=0)


def test_its_name_is_ten_steps_from_the_seeded_start():
    s, u = _scores(2, 6, 6)
    named = flows_from_scores(s, u, lam=LAM, alpha=ALPHA, solver="proximal")
    assert torch.equal(named, _solve(s, u, iterations=10, start="uniform", seed=0))


def test_starts():
    s, u = _scores(3, 5, 7)
    uniform = _solve(s, u, iterations=0)
    torch.testing.assert_close(uniform.sum(-1), torch.ones(3, 5, dtype=torch.float64))
    assert bool((uniform >= 0).all())
    assert torch.equal(uniform, _solve(s, u, iterations=0, seed=0))
    assert not torch.equal(uniform, _solve(s, u, iterations=0, seed=1))
    constant = _solve(s, u, iterations=0, start="constant")
    torch.testing.assert_close(constant, torch.full_like(s, 1 / 7))
    torch.testing.assert_close(_solve(s, u, iterations=0, start="softmax"), s.softmax(-1))


def test_the_uniform_start_is_uniform_and_knows_places_alone():
    large, other = (Proximal(0, seed=seed).first(*_ones(3, 200, 200)) for seed in (0, 1))
    small = Proximal(0).first(*_ones(2, 3, 7, 9))
    ratio = small / large[:, :7, :9]
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))  # rows that are normalised otherwise
    numbers = large / large.amax(-1, keepdim=True)  # rows of uniform numbers have their end near 1
    for moment in (1, 2, 3):
        assert float((numbers**moment).mean()) == pytest.approx(1 / (moment + 1), rel=0.02)
    centred = numbers - numbers.mean()
    for near in (
        centred[:, 1:] * centred[:, :-1],
        centred[..., 1:] * centred[..., :-1],
        centred * centred.mT,
        centred[0] * centred[1],
    ):
        assert abs(float(near.mean())) < 0.02 / 12
    again = other / other.amax(-1, keepdim=True)
    assert abs(float((centred * (again - again.mean())).mean())) < 0.02 / 12


def _ones(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.bool)


def test_first_step_by_hand():
    """Y = Z − t (R∘Z + α (Z1 − 1) 1ᵀ), Z ← sign(Y) max(|Y| − t λ F, 0), t = 1/(1 + α n)."""
    s, u = _scores(5, 5)
    r, f, z, t = (-s).softmax(-1), u.softmax(-1), torch.full_like(s, 0.2), 1 / (1 + ALPHA * 5)
    y = z - t * (r * z + ALPHA * (z.sum(-1, keepdim=True) - 1))
    expected = y.sign() * (y.abs() - t * LAM * f).clamp(min=0)
    torch.testing.assert_close(_solve(s, u, iterations=1, start="constant"), expected)


def test_second_step_has_the_barzilai_borwein_length_of_its_matrix():
    s, u = _scores(3, 5, 5)
    r, f = (-s).softmax(-1), u.softmax(-1)
    z, moved = (_solve(s, u, iterations=count, start="constant") for count in (0, 1))
    slope, new = (r * x + ALPHA * (x.sum(-1, keepdim=True) - 1) for x in (z, moved))
    change, bend = moved - z, new - slope
    t = (change * bend).sum((1, 2), keepdim=True) / (bend * bend).sum((1, 2), keepdim=True)
    y = moved - t * new
    expected = y.sign() * (y.abs() - t * LAM * f).clamp(min=0)
    torch.testing.assert_close(_solve(s, u, iterations=2, start="constant"), expected)


def test_matrices_do_not_share_a_step():
    s, u = _scores(4, 6, 6)
    s[1] *= 3
    together = _solve(s, u, iterations=20, start="constant")
    for matrix in range(4):
        alone = _solve(s[matrix], u[matrix], iterations=20, start="constant")
        torch.testing.assert_close(together[matrix], alone)


def test_mask_leaves_the_problem_of_the_other_keys():
    s, u = _scores(6, 6)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[:, 4:] = False
    z = _solve(s, u, mask=mask, iterations=2000)
    assert not z[~mask].any()
    exact = flows_from_scores(s[:, :4], u[:, :4], lam=LAM, alpha=ALPHA)
    torch.testing.assert_close(z[:, :4], exact, atol=1e-8, rtol=0)


def test_tolerance_ends_it_early():
    s, u = _scores(2, 8, 8)
    loose = _solve(s, u, iterations=5000, tolerance=1e-2, start="constant")
    tight = _solve(s, u, iterations=5000, tolerance=1e-10, start="constant")
    exact = flows_from_scores(s, u, lam=LAM, alpha=ALPHA)
    steps = next(
        count for count in range(5000) if torch.equal(_solve(s, u, iterations=count, start="constant"), loose)
    )
    assert 0 < steps < 1000
    assert (tight - exact).norm() < 1e-6 < (loose - exact).norm()


def test_gradient_runs_through_the_steps():
    s, u = (x.requires_grad_() for x in _scores(2, 4, 4))
    lam = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    solver = Proximal(iterations=6)
    assert gradcheck(
        lambda s, u, lam, alpha: flows_from_scores(s, u, lam=lam, alpha=alpha, solver=solver),
        (s, u, lam, alpha),
    )


def test_many_steps_have_about_the_gradient_of_the_exact_flows():
    """About: a step length is a ratio of differences, whose own derivative is noise once they vanish."""
    s, u = (x.requires_grad_() for x in _scores(5, 5))
    weight = torch.randn(5, 5, dtype=torch.float64)
    exact = flows_from_scores(s, u, lam=LAM, alpha=ALPHA)
    expected = torch.autograd.grad((exact * weight).sum(), (s, u))
    got = torch.autograd.grad((_solve(s, u, iterations=1500) * weight).sum(), (s, u))
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=0)


def test_needs_a_penalty():
    s, u = _scores(3, 3)
    with pytest.raises(ValueError, match="alpha"):
        flows_from_scores(s, u, lam=0.1, alpha=math.inf, solver="proximal")
    with pytest.raises(ValueError, match="scaling"):
        flows_from_scores(s, u, lam=0.1, alpha=0.1, scaling="potential", solver="proximal")


@pytest.mark.parametrize(
    "settings", [{"iterations": -1}, {"tolerance": -1.0}, {"tolerance": math.nan}, {"start": "zeros"}]
)
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Proximal(**settings)
