"""The least-energy flows of many rows at once: the exact solver, without gradients.

Every scaling of the flow problem has one form (a row is a query, j runs over its keys):

    z_j = p_j (η − κ f_j)₊ ,    Σ_j z_j + ε η = 1 ,    p = softmax(s) ,  f_j = exp(u_j) ,

softmax gated by friction. Newton's method from A = all keys, η ← (1 + κ Σ_A p_j f_j) / (Σ_A p_j + ε), only ever shrinks
the active set A = {j : κ f_j < η} and ends when A repeats. That is exact while η p_max is moderate. Where the scores range
widely, η − κ f_j cancels, and the flows are measured from a *pivot* instead: the active key k of largest friction. With
t = η − κ f_k > 0,

    z_j = p_j t + p_j κ (f_k − f_j) ,      t = (1 − ε κ f_k − Σ_A p_j κ (f_k − f_j)) / (Σ_A p_j + ε) ,

and both terms of z_j are non-negative and at most 1: nothing cancels, whatever the scores. A pivot with t ≤ 0 carries no
flow: A is too large. If t lifts η above the next friction, A is too small. By these two signs the pivots that Newton's
method finds are checked; the few rows that fail are solved again, in float64 and logarithms.

Masks are kept as numbers, 0 and 1: on a CPU, boolean tensors are slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_GENTLE = 32.0  # η p_max up to here costs at most this many rounding errors without a pivot
_RANGE = 1e26  # of κ f_max p_max, for products with it to stay finite
_PLAIN = 40.0  # log κ f_k p_max up to here does without logarithms
GENTLE = -1  # in place of a pivot, in rows that need none


class Rows(NamedTuple):
    """The scores of many rows and their exponentials. Masked keys have s = −inf and u = +inf."""

    s: Tensor  # [..., n]
    u: Tensor  # [..., n]
    exp_s: Tensor  # [..., n] exp(s − s_max): p in units of p_max
    exp_u: Tensor  # [..., n] exp(u − u_max), inf where masked
    s_max: Tensor  # [..., 1]
    u_max: Tensor  # [..., 1] the largest finite u
    total_s: Tensor  # [..., 1] Σ exp_s
    masked: bool = False

    @classmethod
    def of(cls, s: Tensor, u: Tensor, masked: bool = False) -> Rows:
        s_max = s.amax(-1, keepdim=True)
        u_max = (u.masked_fill(u.isposinf(), -math.inf) if masked else u).amax(-1, keepdim=True)
        exp_s = (s - s_max).exp_()
        return cls(s, u, exp_s, (u - u_max).exp_(), s_max, u_max, exp_s.sum(-1, keepdim=True), masked)

    @property
    def lse_s(self) -> Tensor:
        """float64 [..., 1], log Σ exp(s)."""
        return log_total(self.total_s, self.s_max)

    def take(self, index: Tensor) -> Rows:
        """Some of the rows, in float64: [m, n]."""
        picked = [pick_rows(field, self.s.shape[:-1], index) for field in self[:-1]]
        return Rows._make([*picked, self.masked])


class Scales(NamedTuple):
    """κ and ε of many rows in the units of `Rows`; beyond `_RANGE` a scale is not to be relied upon."""

    friction: Tensor  # [..., 1] κ f_j p_max / exp_u_j
    leak: Tensor  # [..., 1] ε / p_max

    @classmethod
    def of_logs(cls, rows: Rows, logs: Logs) -> Scales:
        log_reference = rows.s_max.double() - rows.lse_s
        log_friction = logs.kappa + rows.u_max.double() + log_reference
        return cls(*(x.exp().to(rows.s.dtype) for x in (log_friction, logs.eps - log_reference)))


class Logs(NamedTuple):
    """κ, as a factor of exp(u), and ε of many rows: float64 [..., 1]."""

    kappa: Tensor
    eps: Tensor

    def take(self, rows: torch.Size, index: Tensor) -> Logs:
        """Of some of the rows, [m, 1]."""
        return Logs(*(pick_rows(x, rows, index) for x in self))


class Flows(NamedTuple):
    """The flows of many rows and what their gradient needs, in units of a reference weight of the row."""

    z: Tensor  # [..., n]
    weight: Tensor  # [..., n] p_j on A
    gated: Tensor  # [..., n] κ f_j p_j on A (not in those units): what friction takes from each flow
    total: Tensor  # [..., 1] Σ_A p_j + ε
    leak: Tensor  # [..., 1] ε
    spill: Tensor  # [..., 1] ε η (not in those units): 1 − Σ z


class Pivoted(NamedTuple):
    """Flows measured from pivots, and the signs by which to judge them."""

    flows: Flows
    active: Tensor  # [..., n] 0 or 1
    level: Tensor  # [..., 1] t: A is too large where it is not positive
    log_scale: Tensor  # [..., 1] float64, log κ f_k, in the units of t


def log_total(total: Tensor, shift: Tensor) -> Tensor:
    """log Σ exp(x) from Σ exp(x − shift), [..., 1]; a number a row, so float64 costs nothing."""
    return total.double().log() + shift


def pick_rows(x: Tensor, rows: torch.Size, index: Tensor) -> Tensor:
    """Rows ``index`` of [..., w], in float64: [m, w]."""
    return x.expand(*rows, x.shape[-1]).reshape(-1, x.shape[-1]).index_select(0, index).double()


def solve(rows: Rows, scales: Scales, logs: Callable[[], Logs]) -> tuple[Tensor, Tensor, Tensor]:
    """Flows z [..., n], η p_max [..., 1] and pivots [..., 1] (all `GENTLE` where none is needed) of all rows.

    The scales once more, as logarithms, are asked for where pivots are needed.
    """
    friction = frictions(rows, scales)
    eta = _newton(rows, friction, scales.leak)
    if bool(((eta <= _GENTLE) & (scales.friction < _RANGE)).all()):
        z = torch.sub(eta, friction, out=friction).relu_().mul_(rows.exp_s)
        return z, eta, torch.full_like(eta, GENTLE, dtype=torch.int64)

    log_kappa, log_eps = logs()
    active = torch.lt(friction, eta, out=friction)
    pivot = _last(rows.u, active)
    found = measure(rows, pivot, log_kappa, log_eps)
    u_pivot = rows.u.gather(-1, pivot)
    grown = torch.lt(rows.u, u_pivot + _rise(found), out=active).sum(-1, keepdim=True) != found.active.sum(
        -1, keepdim=True
    )
    dry = (found.level <= 0) & (
        u_pivot == rows.u.amin(-1, keepdim=True)
    )  # even the least friction is too much
    right = is_plain(found) & (dry | ((found.level > 0) & ~grown))
    z = found.flows.z
    if not bool(right.all()):
        hard = (~right).view(-1).nonzero().squeeze(-1)
        hard_logs = Logs(log_kappa, log_eps).take(z.shape[:-1], hard)
        hard_pivot, hard_z = _solve_hard(rows.take(hard), *hard_logs)
        pivot.view(-1, 1)[hard] = hard_pivot
        z.view(-1, z.shape[-1])[hard] = hard_z.to(z.dtype)
    return z, eta, pivot


def support(rows: Rows, solution: tuple[Tensor, Tensor, Tensor], scales: Scales) -> Tensor:
    """The active sets of a solution, bool [..., n]: a flow outside is a structural zero, one inside may underflow."""
    z, eta, pivot = solution
    if bool((pivot == GENTLE).all()):
        return frictions(rows, scales) < eta
    return (rows.u <= rows.u.gather(-1, pivot)) & (z.amax(-1, keepdim=True) > 0)


def frictions(rows: Rows, scales: Scales) -> Tensor:
    """κ f_j p_max, [..., n]."""
    friction = rows.exp_u * scales.friction.clamp(max=_RANGE)
    if rows.masked:
        friction.masked_fill_(rows.u.isposinf(), torch.finfo(friction.dtype).max)
    return friction


def measure(
    rows: Rows, pivot: Tensor, log_kappa: Tensor, log_eps: Tensor, logarithms: bool = False
) -> Pivoted:
    """The flows whose active set is {u ≤ u[pivot]}; with ``logarithms`` right for scores of any range (rows in float64)."""
    s, u = rows.s, rows.u
    u_pivot = u.gather(-1, pivot)
    active = torch.le(u, u_pivot, out=torch.empty_like(u))
    above = (u - u_pivot).clamp_(max=0)  # log f_j / f_k on A
    if logarithms:
        reference = s.masked_fill(active == 0, -math.inf).amax(-1, keepdim=True)
        exponent = (s - reference).clamp_(max=0)
        weight = exponent.exp().mul_(active)
    else:
        reference = rows.s_max
        weight = rows.exp_s * active
    log_reference = reference.double() - rows.lse_s
    log_scale = log_kappa + u_pivot.double() + log_reference
    depth = above.expm1().neg_()  # 1 − f_j / f_k
    if logarithms:
        lifted = depth.log_().add_(exponent).add_(log_scale).exp_().mul_(active)  # p_j κ (f_k − f_j)
        gated = above.add_(exponent).add_(log_scale).clamp_(max=700).exp_().mul_(active)
    else:
        scaled = weight * log_scale.exp().to(s.dtype)
        lifted = depth.mul_(scaled)
        gated = scaled.sub_(lifted)
    leak = (log_eps - log_reference).exp().to(s.dtype)
    total = weight.sum(-1, keepdim=True).add_(leak)
    leak_friction = (log_eps + log_kappa + u_pivot.double()).exp()  # ε κ f_k
    level = ((1 - leak_friction).to(s.dtype) - lifted.sum(-1, keepdim=True)) / total
    flowing = (level > 0).to(s.dtype)  # else not even the pivot pays: no flow, no gradient
    z = lifted.addcmul_(weight, level).mul_(flowing)
    leak = torch.where(level > 0, leak, 1)  # without flow it is all that there is, however little that be
    total = torch.where(level > 0, total, leak)
    spill = 1 - z.sum(-1, keepdim=True)
    flows = Flows(z, weight.mul_(flowing), gated.mul_(flowing), total, leak, spill)
    return Pivoted(flows, active, level, log_scale)


def is_plain(found: Pivoted) -> Tensor:
    """[..., 1] bool: the rows where plain exponentials lost nothing."""
    return (found.log_scale < _PLAIN) & (found.flows.total > math.exp(-_PLAIN))


def _newton(rows: Rows, friction: Tensor, leak: Tensor) -> Tensor:
    """η p_max [..., 1] by Newton's method from all keys downwards.

    Most rows end early: once fewer than half of those at hand move, the others are left behind.
    """
    weight, friction, leak = (x.reshape(-1, x.shape[-1]) for x in (rows.exp_s, friction, leak))  # [m, n or 1]
    product = weight * friction
    taken, total = product.sum(-1, keepdim=True), rows.total_s.view(-1, 1) + leak
    eta = all_eta = (taken + 1).div_(total)
    left = None  # which rows are at hand, all to begin with
    active, some = torch.empty_like(product), torch.empty_like(product)
    while True:
        torch.lt(friction, eta, out=active)
        # A key that leaves takes p κ f ≥ p η along: this sum shows it wherever Σ p does, and where p is lost in rounding.
        less = torch.mul(product, active, out=some).sum(-1, keepdim=True)
        moved = (less < taken).view(-1).nonzero().squeeze(-1)
        if not len(moved):
            return all_eta.view(rows.total_s.shape)
        if 2 * len(moved) < len(less):
            left = moved if left is None else left.index_select(0, moved)
            weight, friction, leak, product, eta, less, active = (
                x.index_select(0, moved) for x in (weight, friction, leak, product, eta, less, active)
            )
            some = torch.empty_like(product)
        taken, total = less, torch.mul(weight, active, out=some).sum(-1, keepdim=True).add_(leak)
        eta = torch.fmin((taken + 1).div_(total), eta)  # A only shrinks, whatever underflows
        if left is None:
            all_eta = eta
        else:
            all_eta.index_copy_(0, left, eta)


def _last(u: Tensor, active: Tensor) -> Tensor:
    """The active key of largest u, [..., 1]; the key of least u where none is active."""
    u_pivot, pivot = u.masked_fill(active == 0, -math.inf).max(-1, keepdim=True)
    none = u_pivot.isneginf()
    return torch.where(none, u.argmin(-1, keepdim=True), pivot) if bool(none.any()) else pivot


def _rise(found: Pivoted) -> Tensor:
    """How far above (or below) the pivot's u the threshold of the active set lies: log(η / κ f_k), [..., 1]."""
    share = found.level.double() * (-found.log_scale).exp()
    return share.clamp(min=-1).log1p().nan_to_num(nan=0.0, posinf=math.inf).to(found.level.dtype)


def _solve_hard(rows: Rows, log_kappa: Tensor, log_eps: Tensor) -> tuple[Tensor, Tensor]:
    """Pivots and flows of rows of any range, [m, n] float64: Newton downwards in logarithms from an upper bound of η.

    No key carries more than the whole flow, so η ≤ κ f_j + 1/p_j for every j; below the least of these bounds every
    term of the sums is at most 1. A only shrinks, and a row ends when its pivot carries flow.
    """
    u_min = rows.u.amin(-1, keepdim=True)
    bound = torch.logaddexp(log_kappa + rows.u, rows.lse_s - rows.s).amin(-1, keepdim=True) - log_kappa
    limit = bound + _ulp(bound, rows.u_max)
    pivot = _last(rows.u, rows.u < limit)
    while True:
        found = measure(rows, pivot, log_kappa, log_eps, logarithms=True)
        u_pivot = rows.u.gather(-1, pivot)
        shrink = (found.level <= 0) & (u_pivot > u_min)
        if not bool(shrink.any()):
            return pivot, found.flows.z
        limit = torch.minimum(u_pivot + _rise(found) + _ulp(u_pivot, rows.u_max), u_pivot)
        pivot = torch.where(shrink, _last(rows.u, rows.u < limit), pivot)


def _ulp(*values: Tensor) -> Tensor:
    """A few rounding errors of a sum of these values: thresholds are rounded up, since A may only be too large."""
    size = 1 + torch.stack([v.abs() for v in values]).amax(0).nan_to_num(posinf=0.0)
    return 8 * torch.finfo(size.dtype).eps * size
