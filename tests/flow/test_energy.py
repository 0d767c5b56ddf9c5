"""The energy framework: each instance against an oracle, and a user's own energy."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import optimize
from torch.autograd import gradcheck, gradgradcheck

import oracles
from sfiformer.flow import (
    Capacitated,
    Energy,
    Quadratic,
    QuadraticL1,
    Tsallis,
    flows_from_scores,
    solve_energy,
    solve_flows,
)


def _scores(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _minimise(energy, n: int, upper: float | None = None) -> np.ndarray:
    """SciPy's answer to min energy(z), Σ z = 1, 0 ≤ z ≤ upper."""
    found = optimize.minimize(
        energy,
        np.full(n, 1 / n),
        bounds=[(0, upper)] * n,
        constraints={"type": "eq", "fun": lambda z: z.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return found.x


def test_quadratic_is_softmax():
    s = _scores(3, 4, 9)
    torch.testing.assert_close(Quadratic((-s).softmax(-1)).solve(), s.softmax(-1))


def test_quadratic_with_a_penalty():
    s, u = _scores(2, 5, 9)
    z = Quadratic((-s).softmax(-1)).solve(alpha=0.1)
    torch.testing.assert_close(z, flows_from_scores(s, u, lam=0.0, alpha=0.1))


@pytest.mark.parametrize("alpha", [0.1, math.inf])
def test_friction_gives_the_flows_of_the_exact_solver(alpha):
    s, u = _scores(2, 5, 9)
    r, f = (-s).softmax(-1), u.softmax(-1)
    z = QuadraticL1(r, f, 0.1).solve(alpha)
    torch.testing.assert_close(z, solve_flows(r, f, lam=0.1, alpha=alpha))
    np.testing.assert_allclose(z[0], oracles.brute_force(r[0].numpy(), f[0].numpy(), 0.1, alpha), atol=1e-9)


def test_strength_of_each_row_as_in_solve_flows():
    r, f, lam = _scores(6, 6).exp(), _scores(6, 6, seed=1).exp(), torch.linspace(0, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(QuadraticL1(r, f, lam).solve(), solve_flows(r, f, lam=lam))
    for bad, match in (((r, f, lam[:, None]), "lam"), ((r, -f, 0.1), "friction"), ((r, f, -0.1), "lam")):
        with pytest.raises(ValueError, match=match):
            QuadraticL1(*bad).solve()


def test_penalty_of_each_row_as_in_solve_flows():
    r, alpha = _scores(2, 3).exp(), torch.tensor([0.1, 10.0], dtype=torch.float64)
    for given in (alpha, alpha[:1], alpha[0]):
        expected = solve_flows(r, torch.zeros_like(r), lam=0.0, alpha=given)
        torch.testing.assert_close(Quadratic(r).solve(given), expected)
    for bad in (alpha[:, None], alpha.expand(3, 2), torch.ones(3)):
        with pytest.raises(ValueError, match=r"alpha must be a number or broadcast over the rows \[2\]"):
            Quadratic(r).solve(bad)


def test_where_no_flow_pays():
    r, f = torch.full((4,), 0.25, dtype=torch.float64), torch.full((4,), 0.25, dtype=torch.float64)
    assert not QuadraticL1(r, f, 1.0).solve(alpha=0.1).any()


def test_capacity():
    r = (-_scores(8) * 2).softmax(-1)
    z = Capacitated(r, 0.3).solve()
    assert float(z.sum()) == pytest.approx(1)
    assert float(z.max()) <= 0.3 + 1e-12
    assert int((z > 0.3 - 1e-12).sum()) > 0
    expected = _minimise(lambda z: 10 * (r.numpy() * z * z).sum(), 8, upper=0.3)
    np.testing.assert_allclose(z, expected, atol=1e-5)


def test_capacity_of_each_link_and_row():
    r = (-_scores(3, 6)).softmax(-1)
    capacity = torch.rand(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.2
    z = Capacitated(r, capacity).solve()
    torch.testing.assert_close(z.sum(-1), torch.ones(3, dtype=torch.float64))
    assert bool((z <= capacity + 1e-12).all())
    potential = r * z
    free = z < capacity - 1e-12
    for i in range(3):  # one potential wherever capacity does not bind, and none above it
        torch.testing.assert_close(
            potential[i][free[i]], potential[i][free[i]].max().expand(int(free[i].sum()))
        )
        assert potential[i].max() <= potential[i][free[i]].max() + 1e-12


def test_ample_capacity_is_softmax():
    s = _scores(4, 6)
    torch.testing.assert_close(Capacitated((-s).softmax(-1), 1.0).solve(), s.softmax(-1))


def test_capacity_that_cannot_carry_the_unit():
    r = torch.full((2, 4), 0.25, dtype=torch.float64)
    with pytest.raises(ValueError, match="capacit"):
        Capacitated(r, 0.2).solve()
    z = Capacitated(r, 0.2).solve(alpha=100.0)
    torch.testing.assert_close(z, torch.full_like(r, 0.2))


@pytest.mark.parametrize("order", [1.3, 1.5, 2.0, 3.0])
def test_tsallis(order):
    s = _scores(7)
    z = Tsallis(s, order).solve()

    def energy(z):
        z = np.maximum(z, 0)
        return ((z**order - z) / (order * (order - 1))).sum() - (s.numpy() * z).sum()

    assert float(z.sum()) == pytest.approx(1)
    np.testing.assert_allclose(z, _minimise(energy, 7), atol=2e-5)


def test_tsallis_of_order_two_is_sparsemax():
    s = _scores(20, 9) * 2
    ordered, _ = s.sort(-1, descending=True)
    total = ordered.cumsum(-1) - 1
    count = (ordered * torch.arange(1, 10) > total).sum(-1, keepdim=True)
    threshold = total.gather(-1, count - 1) / count
    torch.testing.assert_close(Tsallis(s, 2.0).solve(), (s - threshold).relu())


@dataclass
class Entropic(Energy):
    """Σ z_j log z_j − s_j z_j, a user's own: softmax by another way."""

    scores: torch.Tensor

    def flow(self, mu):
        return (mu + self.scores - 1).exp()


@dataclass
class Quartic(Energy):
    """¼ Σ r_j z_j⁴."""

    resistance: torch.Tensor

    def flow(self, mu):
        return mu.sign() * (mu.abs() / self.resistance) ** (1 / 3)


def test_own_energy():
    s = _scores(4, 7).requires_grad_()
    torch.testing.assert_close(Entropic(s).solve(), s.softmax(-1))
    r = s.detach().exp().requires_grad_()
    z = solve_energy(Quartic(r))
    expected = r ** (-1 / 3) / (r ** (-1 / 3)).sum(-1, keepdim=True)
    torch.testing.assert_close(z, expected)
    weight = _scores(4, 7, seed=3)
    for got, true, leaf in ((z, expected, r), (Entropic(s).solve(), s.softmax(-1), s)):
        gradients = (torch.autograd.grad((x * weight).sum(), leaf)[0] for x in (got, true))
        torch.testing.assert_close(*gradients)


def test_gradients():
    s, u = (_scores(3, 5, seed=seed).requires_grad_() for seed in (4, 5))
    positive = (_scores(3, 5, seed=6).exp() + 0.1).requires_grad_()
    lam, alpha = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.1, 0.7))
    per_row = torch.tensor([0.3, 0.7, 2.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda r: Quadratic(r).solve(), (positive,))
    assert gradcheck(lambda r, u, lam: QuadraticL1(r, u.softmax(-1), lam).solve(), (positive, u, lam))
    assert gradcheck(
        lambda r, u, alpha: QuadraticL1(r, u.softmax(-1), 0.1).solve(alpha), (positive, u, alpha)
    )
    assert gradcheck(lambda r, alpha: Quadratic(r).solve(alpha), (positive, per_row))
    assert gradcheck(lambda r: Capacitated(r, 0.4).solve(), (positive,))
    capacity = torch.full((3, 5), 0.3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda r, c: Capacitated(r, c).solve(), (positive, capacity))
    for order in (1.5, 2.0):
        assert gradcheck(lambda s, order=order: Tsallis(s, order).solve(), (s,))
    assert gradcheck(lambda s, alpha: Entropic(s).solve(alpha), (s, alpha))


def test_second_derivatives():
    s, u = (x.requires_grad_() for x in _scores(2, 2, 5).unbind(0))
    alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    gradgradcheck(lambda s: Quadratic((-s).softmax(-1)).solve(), s)
    gradgradcheck(lambda s, u, a: QuadraticL1(s.exp(), u.exp(), 0.05).solve(a), (s, u, alpha))
    gradgradcheck(lambda s: Capacitated((-s).softmax(-1), 0.4).solve(), s)
    gradgradcheck(lambda s: Tsallis(s).solve(), s)


def test_inference_mode():
    s = _scores(3, 7)
    energies = [
        Quadratic(s.exp()),
        QuadraticL1(s.exp(), s.exp(), 0.05),
        Capacitated(s.exp(), 0.4),
        Tsallis(s),
    ]
    for energy in energies:
        expected = energy.solve()
        with torch.inference_mode():
            torch.testing.assert_close(energy.solve(), expected)


def test_nan_is_an_error():
    s = _scores(3, 7)
    s[1, 2] = math.nan
    for energy in (Quadratic(s.exp()), Tsallis(s)):
        with pytest.raises(ValueError, match=r"flow\(mu\) is NaN"):
            energy.solve()


@pytest.mark.parametrize("sizes", [(2, 3, 7), (50, 199)])
def test_capacities_that_lack_no_more_than_rounding_are_full(sizes):
    for n in sizes:
        for capacity in (_scores(n).float().softmax(-1), torch.ones(n) / n, 1 / n):
            r = torch.tensor([[1e3], [1.0], [0.5], [1e-3], [1e-30]]).expand(-1, n).clone().requires_grad_()
            z = Capacitated(r, capacity).solve()
            torch.testing.assert_close(z, torch.as_tensor(capacity).expand(5, n), atol=1e-6, rtol=1e-5)
            assert torch.autograd.grad(z.square().sum(), r)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_that_of_the_narrowest_parameter(dtype):
    capacity = (torch.ones(7) / 7).to(dtype)
    assert 1 - capacity.double().sum() > 0.2 * torch.finfo(dtype).eps
    for r in (torch.ones(2, 7), torch.ones(2, 7, dtype=dtype)):
        torch.testing.assert_close(Capacitated(r, capacity).solve(), capacity.expand(2, 7).to(r.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_capacities_that_lack_more_than_rounding(dtype):
    lack = torch.finfo(dtype).eps * (2 if torch.finfo(dtype).bits < 32 else 16)
    with pytest.raises(ValueError, match="capacit"):
        Capacitated(torch.ones(3, 10, dtype=dtype), (1 - lack) / 10).solve()


class Hidden(Energy):
    """An energy whose parameters are no attributes of its own."""

    def __init__(self, resistance):
        self.parts = {"resistance": resistance}

    def flow(self, mu):
        return mu / self.parts["resistance"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_that_of_the_parameters(dtype):
    s = _scores(4, 6).to(dtype)
    for energy in (Quadratic((-s).softmax(-1)), Tsallis(s), Capacitated((-s).softmax(-1), 0.5), Entropic(s)):
        z = energy.solve()
        assert z.dtype == dtype
        torch.testing.assert_close(z.sum(-1), torch.ones(4, dtype=dtype), atol=1e-5, rtol=0)
    wide, narrow = (-s).softmax(-1).double(), s.softmax(-1).float()
    assert Hidden((-s).softmax(-1)).solve().dtype == dtype
    assert QuadraticL1(wide, narrow).solve().dtype == QuadraticL1(narrow, wide).solve().dtype == torch.float64


class Watched(Energy):
    """Of some parameters, wherever they are kept; it keeps the dtypes of potentials, too."""

    def __init__(self, parameters):
        self.parameters, self.potentials = parameters, []

    def flow(self, mu):
        self.potentials.append(mu.dtype)
        return mu / self.parameters()


class Kept(torch.nn.Module):
    def __init__(self, resistance):
        super().__init__()
        self.resistance = torch.nn.Parameter(resistance)

    def forward(self):
        return self.resistance


def test_potentials_are_in_float64():
    s = _scores(4, 6)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        r = (-s).softmax(-1).to(dtype)
        # Of what cannot be seen from outside nothing is known but the flows that it gives.
        for parameters, expected in ((Kept(r), dtype), (lambda r=r: r, torch.float64)):
            energy = Watched(parameters)
            assert energy.solve().dtype == expected
            assert set(energy.potentials) == {torch.float64}


def test_a_strength_for_all_rows_does_not_widen_them():
    r, lam = _scores(3, 4).softmax(-1).float(), torch.tensor(0.1, dtype=torch.float64)
    assert QuadraticL1(r, r, lam).solve().dtype == torch.float32


def test_one_link():
    for energy in (
        Quadratic(torch.ones(1)),
        QuadraticL1(torch.ones(1), torch.ones(1)),
        Tsallis(torch.ones(1)),
    ):
        assert float(energy.solve()) == pytest.approx(1)


def test_bad_alpha_and_no_link():
    with pytest.raises(ValueError, match="alpha"):
        Quadratic(torch.ones(3)).solve(alpha=0.0)
    with pytest.raises(ValueError, match="n = 0"):
        Quadratic(torch.ones(3, 0)).solve()


@pytest.mark.parametrize("lam", [1e3, 1e7])
def test_large_frictions_have_their_flows_in_float32(lam):
    s, u = _scores(4, 9).float(), _scores(4, 9, seed=1).float()
    r, f = (-s).softmax(-1), u.softmax(-1)
    z = QuadraticL1(r, f, lam).solve()
    torch.testing.assert_close(z, solve_flows(r, f, lam=lam), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "energy", [Tsallis(_scores(4, 9).float(), 8.0), Tsallis(_scores(4, 9).float() + 1e4, 1.5)]
)
def test_steep_energies_carry_one_unit_in_float32(energy):
    torch.testing.assert_close(energy.solve().sum(-1), torch.ones(4), atol=1e-4, rtol=0)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_resistances_are_positive(bad):
    r = torch.tensor([[1.0, bad, 2.0]])
    for make in (Quadratic, lambda r: QuadraticL1(r, r), lambda r: Capacitated(r, 1.0)):
        with pytest.raises(ValueError, match=r"resistance must be positive.*index \[0, 1\]"):
            make(r)


@pytest.mark.parametrize("bad", [-0.1, math.nan, "x", torch.tensor(-0.1), torch.tensor([0.5, -0.1, 1.0])])
def test_capacities_are_not_negative(bad):
    with pytest.raises(ValueError, match="capacity must be a number or a tensor, not negative, got"):
        Capacitated(torch.ones(2, 3), bad)


@pytest.mark.parametrize("order", [1.0, 0.5])
def test_the_order_of_tsallis_is_greater_than_one(order):
    with pytest.raises(ValueError, match="order must be greater than 1"):
        Tsallis(torch.zeros(3), order)
