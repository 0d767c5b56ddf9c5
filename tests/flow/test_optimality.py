"""The conditions of optimality, in float64, over generated inputs.

With μ the potential that the flows themselves show (the largest r_j z_j + λ f_j where flow runs):

    r_j z_j + λ f_j = μ where z_j > 0 ,     λ f_j ≥ μ where z_j = 0 ,     Σ z + μ/α = 1 .

The first two are potentials and are measured relative to μ; the third is flow, of one unit, and is measured as it is.
"""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfiformer.flow import flows_from_scores, solve_flows

BOUND = 1e-12


def _numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, allow_subnormal=False)


def _pairs(low: float, high: float) -> st.SearchStrategy[list[tuple[float, float]]]:
    return st.lists(st.tuples(_numbers(low, high), _numbers(low, high)), min_size=1, max_size=14)


def _columns(pairs: list[tuple[float, float]]) -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.float64).T.contiguous()


ALPHAS = st.one_of(st.just(math.inf), _numbers(1e-3, 1e3))
STRENGTHS = st.one_of(st.just(0.0), _numbers(1e-6, 20.0))


def _residual(z: torch.Tensor, r: torch.Tensor, f: torch.Tensor, lam: float, alpha: float) -> float:
    threshold = lam * f
    on = z > 0
    if not bool(on.any()):  # α ≤ λ min f
        return max(0.0, 1 - float(threshold.min()) / alpha)
    potential = (r * z + threshold)[on]
    mu = potential.max()
    uneven = (mu - potential.min()) / mu
    withheld = (mu - threshold[~on]).relu().amax() / mu if bool((~on).any()) else torch.tensor(0.0)
    balance = (z.sum() + mu / alpha - 1).abs()
    return max(float(uneven), float(withheld), float(balance))


@settings(max_examples=200)
@given(_pairs(-8, 8), STRENGTHS, ALPHAS)
def test_from_scores(pairs, strength, alpha):
    s, u = _columns(pairs)
    lam = strength / len(s)
    z = flows_from_scores(s, u, lam=lam, alpha=alpha)
    assert bool((z >= 0).all())
    assert _residual(z, (-s).softmax(-1), u.softmax(-1), lam, alpha) <= BOUND


@settings(max_examples=200)
@given(_pairs(1e-4, 10), STRENGTHS, ALPHAS)
def test_from_resistances(pairs, lam, alpha):
    r, f = _columns(pairs)
    z = solve_flows(r, f, lam=lam, alpha=alpha)
    assert bool((z >= 0).all())
    assert _residual(z, r, f, lam, alpha) <= BOUND


@settings(max_examples=100)
@given(_pairs(-8, 8), STRENGTHS)
def test_by_potential(pairs, lam):
    s, u = _columns(pairs)
    z = flows_from_scores(s, u, lam=lam, scaling="potential")
    absolute = lam * len(s) / float(s.exp().sum() * (-s).exp().sum())
    assert _residual(z, (-s).softmax(-1), u.softmax(-1), absolute, math.inf) <= BOUND


@settings(max_examples=100)
@given(_pairs(0, 5), STRENGTHS, ALPHAS)
def test_no_friction_on_some_links(pairs, lam, alpha):
    r, f = _columns(pairs)
    r, f = r + 0.1, f.round()
    z = solve_flows(r, f, lam=lam, alpha=alpha)
    assert _residual(z, r, f, lam, alpha) <= BOUND
