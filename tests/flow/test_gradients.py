"""First and second derivatives of the exact flows."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import oracles
from sfiformer.flow import flows_from_scores, solve_flows


def _leaves(*shapes, low: float | None = None, seed: int = 0) -> list[torch.Tensor]:
    """Normal numbers, or uniform ones above ``low``."""
    generator = torch.Generator().manual_seed(seed)
    make = torch.randn if low is None else torch.rand
    return [
        (make(shape, generator=generator, dtype=torch.float64) + (low or 0)).requires_grad_()
        for shape in shapes
    ]


def _mask(shape: tuple[int, ...]) -> torch.Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(9)) < 0.7
    mask[..., 0] = True
    mask[0] = False
    return mask


def _check(function, leaves) -> None:
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("alpha", [0.1, math.inf])
def test_scores(alpha, masked):
    s, u = _leaves((4, 6), (4, 6))
    (lam,) = _leaves((4,), low=0.1)
    mask = _mask((4, 6)) if masked else None
    _check(lambda s, u, lam: flows_from_scores(s, u, lam=lam, alpha=alpha, mask=mask), [s, u, lam])


@pytest.mark.parametrize("masked", [False, True])
def test_scores_by_potential(masked):
    s, u = _leaves((4, 6), (4, 6), seed=1)
    (lam,) = _leaves((4,), low=0.2)
    mask = _mask((4, 6)) if masked else None
    _check(lambda s, u, lam: flows_from_scores(s, u, lam=lam, scaling="potential", mask=mask), [s, u, lam])


@pytest.mark.parametrize("masked", [False, True])
def test_tensor_alpha(masked):
    s, u = _leaves((4, 6), (4, 6), seed=2)
    lam, alpha = _leaves((4,), (4,), low=0.2)
    mask = _mask((4, 6)) if masked else None
    _check(
        lambda s, u, lam, alpha: flows_from_scores(s, u, lam=lam, alpha=alpha, mask=mask), [s, u, lam, alpha]
    )


def test_one_strength_for_all_rows():
    s, u = _leaves((2, 3, 5), (2, 3, 5), seed=3)
    lam, alpha = _leaves((), (), low=0.2)
    _check(lambda s, u, lam, alpha: flows_from_scores(s, u, lam=lam, alpha=alpha), [s, u, lam, alpha])


@pytest.mark.parametrize("masked", [False, True])
def test_resistances(masked):
    r, f = _leaves((4, 6), (4, 6), low=0.1, seed=4)
    lam, alpha = _leaves((4,), (4,), low=0.2, seed=5)
    mask = _mask((4, 6)) if masked else None
    _check(lambda r, f, lam: solve_flows(r, f, lam=lam, mask=mask), [r, f, lam])
    _check(lambda r, f, lam, alpha: solve_flows(r, f, lam=lam, alpha=alpha, mask=mask), [r, f, lam, alpha])


@pytest.mark.parametrize("arguments", [{"alpha": 0.1}, {"alpha": math.inf}, {"scaling": "potential"}])
def test_lam_has_a_gradient_at_zero(arguments):
    """∂z/∂λ from the right, where every link carries flow."""
    s, u = _leaves((5, 7), (5, 7), seed=6)
    weight = torch.randn(5, 7, dtype=torch.float64)
    lam = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    flows = flows_from_scores(s, u, lam=lam, **arguments)
    by_s, by_u, by_lam = torch.autograd.grad((flows * weight).sum(), (s, u, lam))
    step = 1e-7
    slope = (flows_from_scores(s, u, lam=step, **arguments) - flows) / step
    torch.testing.assert_close(by_lam, (slope * weight).sum(-1).detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_u, torch.zeros_like(u), atol=1e-15, rtol=0)
    dense = flows_from_scores(s, u, lam=0.0, **arguments)
    torch.testing.assert_close(by_s, torch.autograd.grad((dense * weight).sum(), s)[0])


def test_dense_gradient_is_that_of_softmax():
    s, u = _leaves((5, 7), (5, 7), seed=7)
    weight = torch.randn(5, 7, dtype=torch.float64)
    expected = torch.autograd.grad((s.softmax(-1) * weight).sum(), s)[0]
    for lam, friction in ((0.0, u), (3.0, torch.zeros_like(u))):
        z = flows_from_scores(s, friction, lam=lam, alpha=math.inf)
        torch.testing.assert_close(torch.autograd.grad((z * weight).sum(), s)[0], expected)


def test_zero_friction_has_a_gradient():
    """∂z/∂f at f = 0, where the logarithm of friction ends."""
    r, f = torch.rand(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    f[1] = 0
    f.requires_grad_()
    weight = torch.randn(6, dtype=torch.float64)
    for alpha in (0.5, math.inf):
        z = solve_flows(r, f, lam=0.3, alpha=alpha)
        (by_f,) = torch.autograd.grad((z * weight).sum(), f)
        step = torch.zeros_like(f)
        step[1] = 1e-6
        slope = ((solve_flows(r, f + step, lam=0.3, alpha=alpha) - z) / 1e-6 * weight).sum()
        assert float(by_f[1]) == pytest.approx(float(slope), abs=1e-4)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("arguments", [{"alpha": 0.1}, {"alpha": math.inf}, {"scaling": "potential"}])
def test_gradients_against_decimal_arithmetic(arguments, dtype, spread):
    """Relative to the largest derivative of the row, which s.d. 10 carries beyond 10²⁰."""
    generator = torch.Generator().manual_seed(8)
    s, u, weight = torch.randn(3, 25, 14, generator=generator).to(dtype)
    s, u = (s * spread).requires_grad_(), (u * spread).requires_grad_()
    potential = "scaling" in arguments
    lam = torch.full((25,), 0.7 if potential else 0.7 / 14, dtype=torch.float64, requires_grad=True)
    z = flows_from_scores(s, u, lam=lam, **arguments)
    by_s, by_u, by_lam = torch.autograd.grad((z * weight).sum(), (s, u, lam))
    bound = 1e-4 if dtype == torch.float32 else 1e-11
    for i in range(25):
        row = oracles.PreciseRow(s[i].tolist(), u[i].tolist())
        true = row.gradients(lam[i].item(), arguments.get("alpha", math.inf), weight[i].tolist(), potential)
        for got, expected in zip((by_s[i], by_u[i], by_lam[i]), true, strict=True):
            expected = torch.tensor(expected, dtype=torch.float64)
            scale = expected.abs().max().clamp(min=1)
            assert (got.double() - expected).abs().max() <= bound * scale, i
