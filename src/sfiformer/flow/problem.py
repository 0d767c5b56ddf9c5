"""The flow problem: one function that takes resistances and frictions, and one that takes scores.

A query draws one unit of flow from n nodes; link j has a resistance r_j and a friction f_j. The flows of least energy,

    min_z  ½ Σ_j r_j z_j²  +  λ Σ_j f_j |z_j|  +  (α/2)(Σ_j z_j − 1)² ,        (α = ∞: the constraint Σ z = 1 itself)

are z_j = (μ − λ f_j)₊ / r_j, with μ the root of Σ_j (μ − λ f_j)₊ / r_j + μ/α = 1: many of them are exactly zero. If
α ≤ λ min f no flow pays, and z = 0. A finite α starves small graphs: without friction n equal links carry
n²α/(1 + n²α) of the unit, at α = 0.1 a tenth of it for n = 1 and nine tenths for n = 10.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sfiformer.flow import checks
from sfiformer.flow.exact import ExactFlows
from sfiformer.flow.precision import wide
from sfiformer.flow.proximal import Proximal

Solver = Literal["exact", "proximal"] | Proximal
Scaling = Literal["absolute", "potential"]


def solve_flows(
    resistance: Tensor,
    friction: Tensor,
    *,
    lam: float | Tensor,
    alpha: float | Tensor = math.inf,
    mask: Tensor | None = None,
    solver: Solver = "exact",
    check: bool | None = None,
) -> Tensor:
    """Flows of least energy, [..., n], for resistances r > 0 and frictions f ≥ 0 of shape [..., n].

    Args:
        resistance: r, positive.
        friction: f, not negative.
        lam: λ ≥ 0, a number or a tensor that broadcasts over the rows [...].
        alpha: α > 0, likewise; ``math.inf`` is the hard constraint.
        mask: bool [..., n], False where there is no link. A row without links has no flow.
        solver: ``"exact"``; or ``"proximal"``, the paper's iteration (a `Proximal` sets its start, count and tolerance).
        check: look at values and raise on bad ones; by default on the CPU only.
    """
    checks.require_rows("resistance", resistance)
    checks.require_rows("friction", friction)
    checks.require_same_shape("friction", friction, "resistance", resistance)
    checks.require_mask(mask, resistance, "resistance")
    look = checks.wanted(check, resistance)
    mask, empty = _links(mask, resistance)
    if look:
        ignored = empty | ~mask
        linked = resistance.masked_fill(ignored, 1.0)
        checks.require_all((linked > 0) & linked.isfinite(), "resistance", resistance, "positive and finite")
        linked = friction.masked_fill(ignored, 1.0)
        checks.require_all((linked >= 0) & linked.isfinite(), "friction", friction, "finite and not negative")
    lam_row, alpha_row = _strengths(lam, alpha, resistance, look)
    if resistance.numel() == 0:
        return torch.zeros_like(resistance) * resistance
    dtype = resistance.dtype  # half precision has no room for frictions, nor for their logarithms
    resistance, friction = (torch.where(mask & ~empty, wide(x), 1.0) for x in (resistance, friction))
    if isinstance(method := _method(solver), Proximal):
        _require_penalty(alpha)
        z = method(resistance, friction, lam_row.to(resistance), alpha_row.to(resistance), mask & ~empty)
    else:
        floor = torch.finfo(friction.dtype).tiny ** 0.5  # a logarithm for zero friction, with its gradient
        u = torch.where(friction < floor, friction + floor, friction).log()
        s = -resistance.log()
        log_sum_s = _log_sum_exp(s, mask)  # log Σ 1/r: conductance of all links in parallel
        z = _exact(s, u, lam_row, log_sum_s, -alpha_row.log() - log_sum_s, mask)
    return torch.where(empty, 0, z).to(dtype)


def flows_from_scores(
    s: Tensor,
    u: Tensor,
    *,
    lam: float | Tensor,
    alpha: float | Tensor = math.inf,
    scaling: Scaling = "absolute",
    mask: Tensor | None = None,
    solver: Solver = "exact",
    check: bool | None = None,
) -> Tensor:
    """Flows of least energy, [..., n], for r = softmax(−s) and f = softmax(u): right for any finite scores [..., n].

    With ``scaling="potential"`` friction is measured against the potential of the dense flows, 1/C with
    C = Σ e^s · Σ e^−s: λ = lam · n / C. Then the flows are softmax(s)_j (η − lam · n · f_j)₊, the constraint is hard and
    ``alpha`` is not used. At uniform scores this is lam/n on the absolute scale.

    The other arguments are those of `solve_flows`.
    """
    checks.require_rows("s", s)
    checks.require_rows("u", u)
    checks.require_same_shape("u", u, "s", s)
    checks.require_mask(mask, s, "s")
    if scaling not in ("absolute", "potential"):
        raise ValueError(f"scaling must be 'absolute' or 'potential', got {scaling!r}")
    look = checks.wanted(check, s)
    mask, empty = _links(mask, s)
    if look:
        ignored = empty | ~mask
        checks.require_all(s.isfinite() | ignored, "s", s, "finite")
        checks.require_all(u.isfinite() | ignored, "u", u, "finite")
    lam_row, alpha_row = _strengths(lam, alpha, s, look)
    if s.numel() == 0:
        return torch.zeros_like(s) * s
    dtype = s.dtype
    s, u = (torch.where(mask & ~empty, wide(x), 0.0) for x in (s, u))
    if isinstance(method := _method(solver), Proximal):
        if scaling == "potential":
            raise ValueError("solver='proximal' has only a soft constraint: use scaling='absolute'")
        _require_penalty(alpha)
        resistance, friction = (x.masked_fill(~mask, -math.inf).softmax(-1) for x in (-s, u))
        resistance = torch.where(mask, resistance, 1.0)
        z = method(resistance, friction, lam_row.to(s), alpha_row.to(s), mask & ~empty)
    else:
        log_sum_u = _log_sum_exp(u, mask)
        if scaling == "absolute":
            log_c = _log_sum_exp(s, mask) + _log_sum_exp(-s, mask)
            z = _exact(s, u, lam_row, log_c - log_sum_u, -alpha_row.log() - log_c, mask)
        else:
            log_scale = mask.sum(-1, keepdim=True).double().log() - log_sum_u
            z = _exact(s, u, lam_row, log_scale, torch.full_like(log_scale, -math.inf), mask)
    return torch.where(empty, 0, z).to(dtype)


def _exact(s: Tensor, u: Tensor, lam: Tensor, log_scale: Tensor, log_eps: Tensor, mask: Tensor) -> Tensor:
    rows = (*s.shape[:-1], 1)
    return ExactFlows.apply(s, u, lam.expand(rows), log_scale.expand(rows), log_eps.expand(rows), mask)[0]


def _links(mask: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The mask, with rows that have no link opened, and which rows those are [..., 1]."""
    if mask is None:
        mask = torch.ones_like(like, dtype=torch.bool)
    empty = ~mask.any(-1, keepdim=True) if mask.shape[-1] else mask.any(-1, keepdim=True)
    return mask | empty, empty


def _strengths(lam: float | Tensor, alpha: float | Tensor, like: Tensor, look: bool) -> tuple[Tensor, Tensor]:
    checks.require_lam(lam, look)
    checks.require_alpha(alpha, look)
    rows = like.shape[:-1]
    return checks.row_scalar("lam", lam, rows, like).double(), checks.row_scalar(
        "alpha", alpha, rows, like
    ).double()


def _method(solver: Solver) -> Proximal | None:
    """The iteration, or None for the exact solver."""
    if isinstance(solver, Proximal):
        return solver
    if solver not in ("exact", "proximal"):
        raise ValueError(f"solver must be 'exact', 'proximal' or a Proximal(…), got {solver!r}")
    return Proximal() if solver == "proximal" else None


def _require_penalty(alpha: float | Tensor) -> None:
    if bool(alpha.isinf().any()) if isinstance(alpha, Tensor) else math.isinf(alpha):
        raise ValueError("solver='proximal' is a penalty method: give it a finite alpha (the paper's is 0.1)")


def _log_sum_exp(x: Tensor, mask: Tensor) -> Tensor:
    """log Σ exp(x) over the links, [..., 1]; a number a row, so float64 costs nothing and keeps its digits."""
    x = x.masked_fill(~mask, -math.inf)
    shift = x.detach().amax(-1, keepdim=True)
    return (x - shift).exp().sum(-1, keepdim=True).double().log() + shift.double()
