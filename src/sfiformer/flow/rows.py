"""The least-energy flows of many rows at once: the exact solver, without gradients.

Every scaling of the flow problem has one form (a row is a query, j runs over its keys):

    z_j = p_j (η − κ f_j)₊ ,    Σ_j z_j + ε η = 1 ,    p = softmax(s) ,  f_j = exp(u_j) ,

softmax gated by friction. The frictions order the keys: the active set is A = {j : u_j ≤ u_k}, where k, the *pivot*, is
the active key of largest friction. Seen from the pivot nothing cancels. With t = η − κ f_k > 0,

    z_j = p_j t + p_j κ (f_k − f_j) ,      t = (1 − ε κ f_k − Σ_A p_j κ (f_k − f_j)) / (Σ_A p_j + ε) ,

and both terms of z_j are non-negative and at most 1, so the flows are right to rounding however widely the scores
range. A pivot with t ≤ 0 carries no flow: A is too large. If t lifts η above the next friction, A is too small.

The solver guesses the pivot by Newton's method on plain exponentials, which is cheap, checks it by those two signs,
and solves the few rows that fail again in float64 and logarithms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Plain exponentials serve while log(κ f_k p_max) stays below this and the active keys hold more than exp(-this) of the
# largest weight: rounding then costs at most about 40 ulp.
_PLAIN_RANGE = 40.0


class Rows(NamedTuple):
    """The scores of many rows and their exponentials. Masked keys have s = −inf and u = +inf."""

    s: Tensor  # [..., n]
    u: Tensor  # [..., n]
    exp_s: Tensor  # [..., n] exp(s − s_max)
    exp_u: Tensor  # [..., n] exp(u − u_max), inf where masked
    s_max: Tensor  # [..., 1]
    u_max: Tensor  # [..., 1] the largest finite u
    u_min: Tensor  # [..., 1]
    lse_s: Tensor  # [..., 1] float64, log Σ exp(s)

    @classmethod
    def of(cls, s: Tensor, u: Tensor, masked: bool = False) -> Rows:
        s_max, u_min = s.amax(-1, keepdim=True), u.amin(-1, keepdim=True)
        u_max = (u.masked_fill(u.isposinf(), -math.inf) if masked else u).amax(-1, keepdim=True)
        exp_s = (s - s_max).exp_()
        return cls(s, u, exp_s, (u - u_max).exp_(), s_max, u_max, u_min, log_sum(exp_s, s_max))


class Flows(NamedTuple):
    """The flows of many rows, and what the gradient needs: A, the weights on it, and the share of the leak."""

    z: Tensor  # [..., n]
    active: Tensor  # [..., n] bool, the structural support
    weight: Tensor  # [..., n] p_j on A, in units of the row's reference weight
    total: Tensor  # [..., 1] Σ_A weight + leak
    leak: Tensor  # [..., 1] ε in the same units
    level: Tensor  # [..., 1] t in the inverse units: a pivot is right from above where it is positive
    log_scale: Tensor  # [..., 1] float64, log of κ f_k in the inverse units


def log_sum(exponentials: Tensor, shift: Tensor) -> Tensor:
    """log Σ exp(x) from exp(x − shift), [..., 1]; a number a row, so float64 costs nothing."""
    return exponentials.sum(-1, keepdim=True).double().log() + shift.double()


def evaluate(rows: Rows, pivot: Tensor, log_kappa: Tensor, log_eps: Tensor, stable: bool) -> Flows:
    """The flows whose active set is {u ≤ u[pivot]}: right if it is the active set, and telling where it is not.

    ``stable`` measures the weights from the largest active one and multiplies in logarithms (rows in float64).
    """
    s, u = rows.s, rows.u
    u_pivot = u.gather(-1, pivot)
    above = u - u_pivot
    active = above <= 0
    depth = above.clamp_(max=0).expm1_().neg_()  # 1 − f_j / f_k on A, 0 elsewhere
    if stable:
        reference = s.masked_fill(~active, -math.inf).amax(-1, keepdim=True)
        exponent = (s - reference).clamp_(max=0)  # the others, inactive, may be larger
        weight = exponent.exp() * active
    else:
        reference = rows.s_max
        weight = rows.exp_s * active
    log_reference = reference.double() - rows.lse_s
    log_scale = log_kappa + u_pivot.double() + log_reference
    lifted = (
        (depth.log_().add_(exponent).add_(log_scale)).exp_().mul_(active)
        if stable
        else depth.mul_(weight).mul_(log_scale.exp().to(s.dtype))
    )  # p_j κ (f_k − f_j)
    leak = (log_eps - log_reference).exp().to(s.dtype)
    total = weight.sum(-1, keepdim=True).add_(leak)
    leak_friction = (log_eps + log_kappa + u_pivot.double()).exp()  # ε κ f_k
    level = ((1 - leak_friction).to(s.dtype) - lifted.sum(-1, keepdim=True)) / total
    z = torch.addcmul(lifted, weight, level).clamp_(min=0)
    return Flows(z, active, weight, total, leak, level, log_scale)


def solve(rows: Rows, log_kappa: Tensor, log_eps: Tensor) -> tuple[Tensor, Flows]:
    """Pivots [..., 1] and flows of all rows. ``log_kappa`` multiplies exp(u); both scalings are float64 [..., 1]."""
    pivot = _guess(rows, log_kappa, log_eps)
    flows = evaluate(rows, pivot, log_kappa, log_eps, stable=False)
    rise = _rise(flows)
    grown = (rows.u < rows.u.gather(-1, pivot) + rise) != flows.active
    dry = (flows.level <= 0) & (rows.u.gather(-1, pivot) == rows.u_min)  # not even the least friction pays
    wrong = ((flows.level <= 0) & ~dry) | ((flows.level > 0) & grown.any(-1, keepdim=True)) | ~is_plain(flows)
    if not wrong.any():
        return pivot, _stop_dry(flows)
    n = rows.s.shape[-1]
    index = wrong.reshape(-1).nonzero().squeeze(-1)

    def pick(x: Tensor) -> Tensor:
        return x.expand(*wrong.shape[:-1], x.shape[-1]).reshape(-1, x.shape[-1])[index].double()

    hard = Rows(*(pick(field) for field in rows))
    hard_pivot, hard_flows = _solve_hard(hard, pick(log_kappa), pick(log_eps))
    pivot.view(-1, 1)[index] = hard_pivot
    flows.z.view(-1, n)[index] = hard_flows.z.to(flows.z.dtype)
    flows.active.view(-1, n)[index] = hard_flows.active
    return pivot, flows


def is_plain(flows: Flows) -> Tensor:
    """[..., 1] bool: the rows where plain exponentials lost nothing."""
    return (flows.log_scale < _PLAIN_RANGE) & (flows.total > math.exp(-_PLAIN_RANGE))


def _guess(rows: Rows, log_kappa: Tensor, log_eps: Tensor) -> Tensor:
    """Pivots by Newton's method from A = all keys, on τ = η / (κ f_max): τ ← (1/κ f_max p_max + Σ_A pf) / (Σ_A p + ε)."""
    dtype = rows.s.dtype
    log_reference = rows.s_max.double() - rows.lse_s
    drive = (-(log_kappa + rows.u_max.double() + log_reference)).exp().to(dtype)
    leak = (log_eps - log_reference).exp().to(dtype)
    product = rows.exp_s * rows.exp_u
    threshold, total = torch.full_like(rows.s_max, math.inf), torch.empty(0)
    while True:
        active = rows.exp_u < threshold
        shrunk = torch.where(active, rows.exp_s, 0).sum(-1, keepdim=True).add_(leak)
        if shrunk.equal(total):
            break
        total = shrunk
        newton = torch.where(active, product, 0).sum(-1, keepdim=True).add_(drive).div_(total)
        threshold = torch.fmin(newton, threshold)  # A only shrinks, whatever underflows
    return _last_active(rows.u, active)


def _last_active(u: Tensor, active: Tensor) -> Tensor:
    """The active key of largest u, [..., 1]; the key of least u where none is active."""
    u_pivot, pivot = torch.where(active, u, -math.inf).max(-1, keepdim=True)
    none = u_pivot.isneginf()
    return torch.where(none, u.argmin(-1, keepdim=True), pivot) if none.any() else pivot


def _rise(flows: Flows) -> Tensor:
    """How far above (or below) the pivot's u the threshold of the active set lies: log(η / κ f_k), [..., 1]."""
    share = flows.level.double() * (-flows.log_scale).exp()
    return share.clamp(min=-1).log1p().nan_to_num(nan=0.0, posinf=math.inf).to(flows.level.dtype)


def _stop_dry(flows: Flows) -> Flows:
    """No flow in rows whose drive stays below the least friction."""
    dry = flows.level <= 0
    if dry.any():
        flows.z.mul_(~dry)
        flows.active.logical_and_(~dry)
        flows.weight.mul_(~dry)
    return flows


def _solve_hard(rows: Rows, log_kappa: Tensor, log_eps: Tensor) -> tuple[Tensor, Flows]:
    """Rows of any range, [m, n] float64: Newton downwards in logarithms from an upper bound of η.

    No key carries more than the whole flow, so η ≤ κ f_j + 1/p_j for every j; below the least of these bounds every
    term of the sums is at most 1. A only shrinks, and a row ends when its pivot carries flow.
    """
    bound = torch.logaddexp(log_kappa + rows.u, rows.lse_s - rows.s).amin(-1, keepdim=True) - log_kappa
    limit = bound + _ulp(bound, rows.u_max)
    pivot = _last_active(rows.u, rows.u < limit)
    while True:
        flows = evaluate(rows, pivot, log_kappa, log_eps, stable=True)
        u_pivot = rows.u.gather(-1, pivot)
        shrink = (flows.level <= 0) & (u_pivot > rows.u_min)
        if not shrink.any():
            return pivot, _stop_dry(flows)
        limit = torch.minimum(u_pivot + _rise(flows) + _ulp(u_pivot, rows.u_max), u_pivot)
        pivot = torch.where(shrink, _last_active(rows.u, rows.u < limit), pivot)


def _ulp(*values: Tensor) -> Tensor:
    """A few rounding errors of a sum of these values: thresholds are rounded up, since A may only be too large."""
    size = 1 + torch.stack([v.abs() for v in values]).amax(0).nan_to_num(posinf=0.0)
    return 8 * torch.finfo(size.dtype).eps * size
