"""Attention from any separable convex energy.

The paper sees attention as the flows of least energy, min_z Σ_j φ_j(z_j) with Σ_j z_j = 1. All that a solver needs of an
energy is its *inverse marginal cost*: the flow z_j(μ) at which φ_j′(z_j) = μ, non-decreasing in the potential μ. Then μ is
the root of

    G(μ) = Σ_j z_j(μ) + μ/α − 1 ,

and by the implicit function theorem the root moves with any parameter θ as ∂μ/∂θ = −(∂G/∂θ) / (∂G/∂μ). One
root-finder serves every energy; the gradient is exact however many steps it took.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from sfiformer.flow import checks
from sfiformer.operators import transformed


class Energy(ABC):
    """A separable convex energy Σ_j φ_j(z_j) over n links, for any number of rows."""

    @abstractmethod
    def flow(self, mu: Tensor) -> Tensor:
        """Inverse marginal cost: [..., 1] potentials → [..., n] flows, non-decreasing in μ, differentiable in parameters.

        The potentials are in float64, whatever the parameters are: where frictions are large, a small change of μ is
        a large one of flows.
        """

    def solve(self, alpha: float | Tensor = math.inf) -> Tensor:
        """The flows of least energy, [..., n]: with Σ z = 1, or for a finite ``alpha`` with (α/2)(Σ z − 1)² added."""
        return solve_energy(self, alpha)


@dataclass
class Quadratic(Energy):
    """½ Σ r_j z_j²: z_j ∝ 1/r_j. With r = softmax(−s) this is standard attention, softmax(s)."""

    resistance: Tensor

    def __post_init__(self) -> None:
        _require_resistance(self.resistance)

    def flow(self, mu: Tensor) -> Tensor:
        return mu / self.resistance


@dataclass
class QuadraticL1(Energy):
    """½ Σ r_j z_j² + λ Σ f_j |z_j|: SFi-attention, by the general method. `solve_flows` is faster and exact to the last bit."""

    resistance: Tensor
    friction: Tensor
    lam: float | Tensor = 1.0  # or one value for each row, as in `solve_flows`

    def __post_init__(self) -> None:
        _require_resistance(self.resistance)
        checks.require_same_shape("friction", self.friction, "resistance", self.resistance)
        look = checks.wanted(None, self.friction) and not transformed()
        checks.require_lam(self.lam, look)
        if look:
            checks.require_all(~(self.friction < 0), "friction", self.friction, "not negative")

    def flow(self, mu: Tensor) -> Tensor:
        lam = self.lam
        if isinstance(lam, Tensor):
            lam = checks.row_scalar("lam", lam, self.friction.shape[:-1], self.friction)
        return (mu - lam * self.friction).relu() / self.resistance


@dataclass
class Capacitated(Energy):
    """½ Σ r_j z_j² with 0 ≤ z_j ≤ c_j: no single key may take more than its capacity, so attention stays spread."""

    resistance: Tensor
    capacity: float | Tensor

    def __post_init__(self) -> None:
        _require_resistance(self.resistance)
        capacity, expected = self.capacity, "a number or a tensor, not negative"
        if isinstance(capacity, Tensor):
            if checks.wanted(None, capacity) and not transformed():
                checks.require_all(~(capacity < 0), "capacity", capacity, expected)
        elif not (isinstance(capacity, Real) and capacity >= 0):
            raise ValueError(f"capacity must be {expected}, got {capacity!r}")

    def flow(self, mu: Tensor) -> Tensor:
        free = (mu / self.resistance).relu()
        return torch.minimum(free, torch.as_tensor(self.capacity, dtype=free.dtype, device=free.device))


@dataclass
class Tsallis(Energy):
    """Σ_j (z_j^a − z_j) / (a(a − 1)) − s_j z_j for a > 1: z_j = ((a − 1)(μ + s_j) )₊^{1/(a−1)}, the family of entmax.

    a = 2 is sparsemax and a = 1.5 is 1.5-entmax of the scores s.
    """

    scores: Tensor
    order: float = 1.5

    def __post_init__(self) -> None:
        if not self.order > 1:
            raise ValueError(f"order must be greater than 1 (softmax is Quadratic), got {self.order}")

    def flow(self, mu: Tensor) -> Tensor:
        base = ((self.order - 1) * (mu + self.scores)).relu()
        return base if self.order == 2 else base ** (1 / (self.order - 1))


def solve_energy(energy: Energy, alpha: float | Tensor = math.inf) -> Tensor:
    """The flows [..., n] of least energy, with gradients, first and second, for all parameters of the energy and a tensor
    ``alpha``, which may have a value for each row; in the widest dtype of the energy's tensors.
    """
    checks.require_alpha(alpha, check=not isinstance(alpha, Tensor) or alpha.device.type == "cpu")
    tensors = list(_tensors(energy))
    device = tensors[0].device if tensors else None
    with torch.no_grad():
        like = energy.flow(torch.zeros(1, dtype=torch.float64, device=device))
    dtype = _widest(tensors) if tensors else like.dtype
    alpha = checks.row_scalar("alpha", alpha, like.shape[:-1], like)
    with torch.no_grad():
        mu = _root(energy, alpha, like, _rounding([x.dtype for x in tensors] or [dtype]))
    if torch.is_inference_mode_enabled():
        return energy.flow(mu).to(dtype)
    with torch.enable_grad():
        probe = mu.detach().requires_grad_()
        slope = torch.autograd.grad(_excess(energy, probe, alpha).sum(), probe)[0]
    # A Newton step at the root: its value stays, its derivative is that of the implicit function; after one more step of that
    # slope the second derivative is, too.
    for _ in range(2):
        excess = _excess(energy, mu, alpha)
        mu = mu - torch.where(slope > 0, excess / slope.clamp(min=torch.finfo(slope.dtype).tiny), 0)
    return energy.flow(mu).to(dtype)


def _excess(energy: Energy, mu: Tensor, alpha: Tensor) -> Tensor:
    """G(μ), [..., 1]."""
    return energy.flow(mu).sum(-1, keepdim=True) + mu / alpha - 1


def _root(energy: Energy, alpha: Tensor, like: Tensor, rounding: float) -> Tensor:
    """μ with G(μ) = 0 for each row of flows like these: a bracket by doubling, then halving until no number lies within.

    Flows that reach 1 but for the rounding of parameters (capacities, say) are the solution where they end.
    """
    if like.shape[-1] == 0:
        raise ValueError("energy.flow(mu) must return [..., n] flows with n > 0, got n = 0")
    low = torch.full_like(like[..., :1], -1.0)
    high = -low
    for sign, end in ((-1, low), (1, high)):
        for _ in range(_exponents(like.dtype)):
            short = sign * _excess(energy, end, alpha) < 0
            if not bool(short.any()):
                break
            end[short] *= 2
        else:
            lack = -_excess(energy, end, alpha)
            if sign > 0 and bool((lack <= rounding).all()):
                break
            raise ValueError(
                "no potential makes the flows sum to one: check that the energy's flow(mu) is finite, grows with mu "
                "and can reach 1 (capacities that sum to less than one need a finite alpha)"
            )
    full = _excess(energy, high, alpha).clamp(max=0)  # below 0 where rounding lacks
    while True:
        middle = low + (high - low) / 2
        if not bool(((middle > low) & (middle < high)).any()):
            if bool(_excess(energy, high, alpha).isnan().any()):
                raise ValueError("the energy's flow(mu) is NaN: check its parameters")
            return high
        over = _excess(energy, middle, alpha) >= full
        high = torch.where(over, middle, high)
        low = torch.where(over, low, middle)


def _require_resistance(resistance: Tensor) -> None:
    checks.require_rows("resistance", resistance)
    if checks.wanted(None, resistance) and not transformed():
        checks.require_all(~(resistance <= 0), "resistance", resistance, "positive")


def _exponents(dtype: torch.dtype) -> int:
    """How often 1 can be doubled."""
    return math.frexp(torch.finfo(dtype).max)[1] - 1


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of an energy: its attributes, and those of its parts."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Energy | nn.Module):
        yield from _tensors(vars(value))
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _rounding(dtypes: list[torch.dtype]) -> float:
    """What parameters that sum to 1 may lack of it. In half precision each is rounded alone, and all lack half a unit at most;
    a softmax in float32 has errors of its own, of a few units.
    """
    narrowest = max((torch.finfo(dtype) for dtype in dtypes), key=lambda kind: kind.eps)
    return narrowest.eps * (1 if narrowest.bits < 32 else 8)


def _widest(tensors: list[Tensor]) -> torch.dtype:
    """Those without dimension, such as one strength for all rows, have no say, as in PyTorch."""
    voices = [x for x in tensors if x.dim()] or tensors
    return reduce(torch.promote_types, (x.dtype for x in voices))
