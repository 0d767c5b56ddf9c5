"""The exact flows against oracles, and what the problem's definition promises of them."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.func import grad, jvp, vmap

import oracles
from sfiformer.flow import flows_from_scores, solve_flows

ALPHAS = [0.01, 0.1, 2.0, math.inf]


def _row(n: int, seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Resistances and frictions that sum to one, [n] each."""
    s, u = torch.randn(2, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    return (-s).softmax(-1), u.softmax(-1)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("lam", [0.0, 0.05, 0.3, 2.0])
def test_equals_brute_force_over_active_sets(lam, alpha):
    for n in (1, 2, 3, 6, 10):
        for spread in (0.5, 3.0):
            r, f = _row(n, seed=n, spread=spread)
            expected = oracles.brute_force(r.numpy(), f.numpy(), lam, alpha)
            np.testing.assert_allclose(solve_flows(r, f, lam=lam, alpha=alpha), expected, atol=1e-9)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_flow_against_the_current_pays(alpha):
    """Brute force over signs as well: the minimum over all of ℝⁿ is the solver's."""
    for seed in range(5):
        r, f = _row(6, seed)
        expected = oracles.brute_force(r.numpy(), f.numpy(), 0.4, alpha, signs=(-1, 0, 1))
        np.testing.assert_allclose(solve_flows(r, f, lam=0.4, alpha=alpha), expected, atol=1e-9)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("n", [20, 60])
def test_equals_a_general_purpose_solver(n, alpha):
    for seed, strength in enumerate((0.5, 1.0, 5.0)):
        r, f = _row(n, seed)
        expected = oracles.general_purpose(r.numpy(), f.numpy(), strength / n, alpha)
        z = solve_flows(r, f, lam=strength / n, alpha=alpha).numpy()
        np.testing.assert_allclose(z, expected, atol=2e-6)
        terms = r.numpy(), f.numpy(), strength / n, alpha
        assert oracles.energy(z, *terms) <= oracles.energy(expected, *terms) + 1e-9


def test_any_resistances_and_frictions_not_only_softmaxes():
    generator = torch.Generator().manual_seed(0)
    for alpha in ALPHAS:
        r, f = torch.rand(2, 8, generator=generator, dtype=torch.float64) * 5 + 0.01
        f[2] = 0
        expected = oracles.brute_force(r.numpy(), f.numpy(), 0.7, alpha)
        np.testing.assert_allclose(solve_flows(r, f, lam=0.7, alpha=alpha), expected, atol=1e-9)


def test_scores_and_resistances_are_the_same_problem():
    s, u = torch.randn(2, 3, 5, 9, dtype=torch.float64)
    for alpha in ALPHAS:
        z = solve_flows((-s).softmax(-1), u.softmax(-1), lam=0.2, alpha=alpha)
        torch.testing.assert_close(flows_from_scores(s, u, lam=0.2, alpha=alpha), z)


def test_strengths_broadcast_over_rows():
    s, u = torch.randn(2, 4, 3, 7, dtype=torch.float64)
    lam, alpha = torch.rand(4, 1, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.1
    z = flows_from_scores(s, u, lam=lam, alpha=alpha)
    for i in range(4):
        for j in range(3):
            row = flows_from_scores(s[i, j], u[i, j], lam=lam[i, 0].item(), alpha=alpha[j].item())
            torch.testing.assert_close(z[i, j], row)


@pytest.mark.parametrize("arguments", [{"alpha": 0.1}, {"alpha": math.inf}, {"scaling": "potential"}])
@pytest.mark.parametrize("lam", [0.0, 0.02, 0.3])
def test_mask_leaves_the_problem_of_the_other_keys(lam, arguments):
    generator = torch.Generator().manual_seed(3)
    s, u = torch.randn(2, 10, 12, generator=generator, dtype=torch.float64)
    mask = torch.rand(10, 12, generator=generator) < 0.6
    noise = torch.where(mask, 0.0, math.nan)  # what is masked must not be looked at
    z = flows_from_scores(s + noise, u + noise, lam=lam, mask=mask, **arguments)
    assert not z[~mask].any()
    for i in range(10):
        alone = flows_from_scores(s[i, mask[i]], u[i, mask[i]], lam=lam, **arguments)
        torch.testing.assert_close(z[i, mask[i]], alone)


@pytest.mark.parametrize("alpha", [0.1, math.inf])
@pytest.mark.parametrize("lam", [0.0, 0.02, 0.3])
def test_mask_leaves_the_other_resistances(lam, alpha):
    generator = torch.Generator().manual_seed(4)
    r, f = torch.rand(2, 10, 8, generator=generator, dtype=torch.float64) + 0.01
    mask = torch.rand(10, 8, generator=generator) < 0.6
    noise = torch.where(mask, 0.0, math.nan)
    z = solve_flows(r + noise, f + noise, lam=lam, alpha=alpha, mask=mask)
    assert not z[~mask].any()
    for i in range(10):
        expected = oracles.brute_force(r[i, mask[i]].numpy(), f[i, mask[i]].numpy(), lam, alpha)
        np.testing.assert_allclose(z[i, mask[i]], expected, atol=1e-9)


@pytest.mark.parametrize("masked", [1.0, 0.0, -1.0, math.inf, math.nan])
def test_resistances_of_a_row_without_links_are_not_looked_at(masked):
    mask = torch.tensor([[True, True, False], [False, False, False]])
    r, f = (torch.rand(2, 3, dtype=torch.float64).add(0.1).masked_fill(~mask, masked) for _ in range(2))
    z = solve_flows(r.requires_grad_(), f.requires_grad_(), lam=0.1, alpha=0.3, mask=mask)
    assert not z[~mask].any()
    for gradient in torch.autograd.grad(z.sum(), (r, f)):
        assert gradient.isfinite().all()
        assert not gradient[~mask].any()


@pytest.mark.parametrize("masked", [1.0, -math.inf, math.nan])
@pytest.mark.parametrize("solver", ["exact", "proximal"])
def test_a_row_without_links_has_no_flow_and_no_gradient(solver, masked):
    mask = torch.tensor([[True, True, False], [False, False, False]])
    scores = torch.tensor([[0.3, -0.2, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    s = scores.masked_fill(~mask, masked).requires_grad_()
    u = (2 * scores).masked_fill(~mask, masked).requires_grad_()
    z = flows_from_scores(s, u, lam=0.1, alpha=0.5, mask=mask, solver=solver)
    assert not z[~mask].any()
    for gradient in torch.autograd.grad((z * scores).sum(), (s, u)):
        assert bool((gradient[~mask] == 0).all())
        assert bool(gradient[0, :2].any())


def test_without_friction_the_hard_constraint_gives_softmax():
    s, u = torch.randn(2, 6, 20, dtype=torch.float64) * 3
    for arguments in ({}, {"scaling": "potential"}):
        z = flows_from_scores(s, u, lam=0.0, alpha=math.inf, **arguments)
        torch.testing.assert_close(z, s.softmax(-1))
    r = (-s).softmax(-1)
    torch.testing.assert_close(solve_flows(r, u.softmax(-1), lam=0.0), s.softmax(-1))


def test_uniform_friction_and_the_hard_constraint_give_softmax():
    s = torch.randn(6, 20, dtype=torch.float64) * 3
    for arguments in ({}, {"scaling": "potential"}):
        z = flows_from_scores(s, torch.full_like(s, 2.5), lam=4.0, alpha=math.inf, **arguments)
        torch.testing.assert_close(z, s.softmax(-1))


def test_without_friction_a_penalty_scales_softmax():
    s = torch.randn(6, 20, dtype=torch.float64)
    c = s.exp().sum(-1, keepdim=True) * (-s).exp().sum(-1, keepdim=True)
    z = flows_from_scores(s, torch.randn_like(s), lam=0.0, alpha=0.1)
    torch.testing.assert_close(z, s.softmax(-1) / (1 + 1 / (0.1 * c)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hard_constraint_sums_to_one(dtype):
    generator = torch.Generator().manual_seed(0)
    for spread in (0.1, 1, 10, 60):
        s, u = torch.randn(2, 100, 30, generator=generator, dtype=dtype) * spread
        for arguments in ({}, {"scaling": "potential"}):
            total = flows_from_scores(s, u, lam=0.1, alpha=math.inf, **arguments).sum(-1)
            torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)


def test_potential_scaling_by_its_definition():
    """z_j = p_j (η − λ* n f_j)₊ with Σ z = 1; the same as λ = λ* n / C on the absolute scale."""
    s, u = torch.randn(2, 5, 8, dtype=torch.float64)
    p, f = s.softmax(-1), u.softmax(-1)
    z = flows_from_scores(s, u, lam=0.9, alpha=0.3, scaling="potential")
    on = z > 0
    eta = (1 + 0.9 * 8 * (p * f * on).sum(-1, keepdim=True)) / (p * on).sum(-1, keepdim=True)
    assert bool((on == (eta > 0.9 * 8 * f)).all())
    torch.testing.assert_close(z, p * (eta - 0.9 * 8 * f).relu())
    c = s.exp().sum(-1) * (-s).exp().sum(-1)
    torch.testing.assert_close(z, flows_from_scores(s, u, lam=0.9 * 8 / c, alpha=math.inf))


def test_potential_scaling_is_the_absolute_one_at_uniform_scores():
    s, u = torch.full((4, 9), 1.7, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    z = flows_from_scores(s, u, lam=0.8, scaling="potential")
    torch.testing.assert_close(z, flows_from_scores(s, u, lam=0.8 / 9, alpha=math.inf))


def test_one_key():
    one = torch.randn(3, 1, dtype=torch.float64)
    for lam, alpha in ((0.03, 0.1), (0.0, 2.0), (0.5, 0.1)):
        z = flows_from_scores(one, one, lam=lam, alpha=alpha)
        torch.testing.assert_close(z, torch.full_like(one, max(alpha - lam, 0) / (1 + alpha)))
    torch.testing.assert_close(flows_from_scores(one, one, lam=0.5, alpha=math.inf), torch.ones_like(one))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("solver", ["exact", "proximal"])
def test_no_key_or_no_row(shape, solver):
    empty = torch.randn(shape, requires_grad=True)
    for solve in (flows_from_scores, solve_flows):
        z = solve(empty, empty, lam=1.0, alpha=0.1, solver=solver)
        assert z.shape == shape
        z.sum().backward()


def test_no_flow_where_none_pays():
    """α ≤ λ min f: zero flows, zero gradients."""
    s, u = (torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lam = torch.full((4,), 3.0, dtype=torch.float64, requires_grad=True)
    least = 3.0 * u.softmax(-1).amin(-1)
    alpha = (least * torch.tensor([0.5, 0.9, 0.999, 1.001], dtype=torch.float64)).detach().requires_grad_()
    z = flows_from_scores(s, u, lam=lam, alpha=alpha)
    assert not z[:3].any()
    assert bool(z[3].any())
    for gradient in torch.autograd.grad((z * torch.randn_like(z)).sum(), (s, u, lam, alpha)):
        assert not gradient[:3].any()
        assert bool(gradient[3].any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    s, u = torch.randn(2, 30, 25, dtype=torch.float64).to(dtype)
    exact = flows_from_scores(s.double(), u.double(), lam=0.04, alpha=0.1)
    z = flows_from_scores(s, u, lam=0.04, alpha=0.1)
    assert z.dtype == dtype
    atol = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(z.double(), exact, atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_solved_for_in_float32(dtype):
    """Frictions of a softmax over many keys are less than the least that float16 has digits for."""
    r = (torch.rand(3, 400) / 400 + 1e-3).to(dtype)
    f = torch.randn(3, 400).softmax(-1).to(dtype).requires_grad_()
    z = solve_flows(r, f, lam=1 / 400)
    assert z.dtype == dtype
    exact = solve_flows(r.double(), f.double(), lam=1 / 400)
    assert float((z.double() - exact).norm() / exact.norm()) < 4 * torch.finfo(dtype).eps
    assert torch.autograd.grad(z.float().square().sum(), f)[0].dtype == dtype


@pytest.mark.parametrize("size", [1.0, 2e-3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_end_where_half_precision_does(dtype, size):
    """Twins have steep ones: some 5,000 with the smaller loss, and beyond float16 with the other."""
    end, weight = torch.finfo(dtype).max, torch.tensor([1.0, -1.0, 2.0]) * size
    scores = torch.tensor([10.0, 10.0, -10.0]), torch.tensor([0.0, 0.0, 5.0])
    links = torch.tensor([1e-3, 1e-3, 0.9]), torch.tensor([0.1, 0.1, 0.5])
    for solve, inputs, lam in ((flows_from_scores, scores, 1.0), (solve_flows, links, 1000.0)):
        narrow = [x.to(dtype).requires_grad_() for x in inputs]
        wide = [x.detach().float().requires_grad_() for x in narrow]
        got, true = (
            torch.autograd.grad((solve(*given, lam=lam).float() * weight).sum(), given)
            for given in (narrow, wide)
        )
        assert true[1].abs().max() > 1e3
        for x, y in zip(got, true, strict=True):
            torch.testing.assert_close(x.float(), y.clamp(-end, end), rtol=0.02, atol=1e-2 * size)


def test_transforms_of_half_precision():
    s, u = torch.randn(2, 3, 5).half()
    by_s = grad(lambda s, u: flows_from_scores(s, u, lam=0.1, check=False).square().sum())
    torch.testing.assert_close(vmap(by_s)(s, u), by_s(s, u))

    def tangent(s, u):
        solve = partial(flows_from_scores, u=u, lam=0.1, alpha=0.1, solver="proximal")
        return jvp(solve, (s,), (s,))[1].float()

    torch.testing.assert_close(tangent(s, u), tangent(s.float(), u.float()), atol=1e-3, rtol=1e-3)


def test_keys_may_come_in_any_order():
    s, u = torch.randn(2, 20, 15, dtype=torch.float64) * 2
    order = torch.randperm(15)
    z = flows_from_scores(s, u, lam=0.1, alpha=0.1)
    torch.testing.assert_close(flows_from_scores(s[:, order], u[:, order], lam=0.1, alpha=0.1), z[:, order])


def test_some_flows_are_exactly_zero():
    s, u = torch.randn(2, 50, 60)
    assert (flows_from_scores(s, u, lam=1 / 60, alpha=0.1) == 0).float().mean() > 0.1
