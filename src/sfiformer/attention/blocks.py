"""One block of scores: its flow problems, and the gradients of their flows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sfiformer.flow.exact import saturate
from sfiformer.flow.rows import GENTLE, Flows, Logs, Rows, Scales, is_plain, log_total, measure, pick_rows

_LARGE = 5e34  # of κ p f / λ where λ = 0: its sum over keys stays finite


class Block(NamedTuple):
    """Scores [b, rows, n] and the scalings of their flow problems, [b, rows, 1].

    Absolute: κ = λC and ε = 1/(αC), with C = (Σ e^s)(Σ e^−s). Relative to the potential: κ = λ*n and ε = 0.
    """

    rows: Rows
    spread: Tensor  # [b, rows, n] r, or p where friction is relative, not normalised: how C, or p itself, moves with s
    total_spread: Tensor  # [b, rows, 1]
    shift: Tensor  # [b, rows, 1] of s in `spread`
    total_u: Tensor  # [b, rows, 1] Σ exp_u
    lam: Tensor  # [b, 1, 1]
    alpha: float
    potential: bool

    @classmethod
    def of(cls, s: Tensor, u: Tensor, lam: Tensor, alpha: float, potential: bool, check: bool) -> Block:
        rows = Rows.of(s, u)
        total_u, shift = rows.exp_u.sum(-1, keepdim=True), rows.s_max
        if potential:
            spread, total_spread = rows.exp_s, rows.total_s
        else:
            spread = rows.exp_s.reciprocal()
            total_spread = spread.sum(-1, keepdim=True)
            if not bool(total_spread.isfinite().all()):  # exp_s underflows
                shift = s.amin(-1, keepdim=True)
                spread = (shift - s).exp_()
                total_spread = spread.sum(-1, keepdim=True)
        if check:
            _require_finite(total_spread, total_u)
        return cls(rows, spread, total_spread, shift, total_u, lam, alpha, potential)

    @property
    def scales(self) -> Scales:
        """κ and ε without logarithms: in units of p_max = 1 / Σ exp_s the C of the absolute scaling is Σ e^(s_max − s)."""
        if self.potential:
            c, leak = self.rows.s.shape[-1] / self.rows.total_s, torch.zeros_like(self.total_u)
        else:
            c = self.total_spread
            if self.shift is not self.rows.s_max:
                c = c * (self.rows.s_max - self.shift).exp_()
            leak = (c * self.alpha).reciprocal_()
        return Scales(c / self.total_u * self.lam, leak)

    def logs(self) -> Logs:
        """The same as logarithms, of which none overflows."""
        return Logs(self.lam.double().log() + self.log_per_lam, self.log_eps)

    @property
    def log_per_lam(self) -> Tensor:
        """log κ/λ, less the normaliser of u."""
        log_c = math.log(self.rows.s.shape[-1]) if self.potential else self._log_c
        return log_c - log_total(self.total_u, self.rows.u_max)

    @property
    def log_eps(self) -> Tensor:
        if self.potential:
            return torch.full_like(self.total_u, -math.inf, dtype=torch.float64)
        return -math.log(self.alpha) - self._log_c

    @property
    def _log_c(self) -> Tensor:
        return self.rows.lse_s + log_total(self.total_spread, -self.shift)

    def take(self, index: Tensor) -> Block:
        """Some of the rows, in float64: [m, n]."""
        picked = [pick_rows(field, self.rows.s.shape[:-1], index) for field in self[1:6]]
        return Block._make([self.rows.take(index), *picked, self.alpha, self.potential])


class Gradients(NamedTuple):
    """Of a loss with respect to the scores [..., n], to log κ, and to λ at λ = 0, [..., 1]."""

    s: Tensor
    u: Tensor
    log_kappa: Tensor
    lam_at_zero: Tensor


def flows_and_gradients(block: Block, eta: Tensor, pivot: Tensor, g: Tensor) -> tuple[Tensor, Gradients]:
    """The solved flows z again, from what `solve` said of them, and the gradients that g = ∂L/∂z leads to."""
    if bool((pivot == GENTLE).all()):
        return _gentle(block, eta, g)
    found = measure(block.rows, pivot, *block.logs())
    z, gradients = found.flows.z, _gradients(block, found.flows, g, _at_heaviest(g, found.flows))
    plain = is_plain(found)
    if not bool(plain.all()):  # some rows range too widely: again, in float64 and logarithms
        index = (~plain).view(-1).nonzero().squeeze(-1)
        hard, shape = block.take(index), plain.shape[:-1]
        hard_pivot, hard_g = pick_rows(pivot, shape, index).long(), pick_rows(g, shape, index)
        flows = measure(hard.rows, hard_pivot, *hard.logs(), logarithms=True).flows
        again = _gradients(hard, flows, hard_g, _at_heaviest(hard_g, flows))
        for all_rows, those in zip((z, *gradients), (flows.z, *again), strict=True):
            all_rows.view(-1, all_rows.shape[-1])[index] = saturate(those, g.dtype)
    return z, gradients


def _gentle(block: Block, eta: Tensor, g: Tensor) -> tuple[Tensor, Gradients]:
    """Of rows that need no pivot, from η p_max, in as few passes over [b, rows, n] as we know."""
    friction, leak = block.scales
    above = (block.rows.exp_u * -friction).add_(eta).relu_()  # η − κ f_j, 0 outside A
    weight = torch.gt(above, 0, out=torch.empty_like(above)).mul_(block.rows.exp_s)  # p_j on A
    centred = weight * g
    mean = centred.sum(-1, keepdim=True) / (weight.sum(-1, keepdim=True) + leak)  # ḡ
    centred.addcmul_(weight, mean, value=-1)  # p_j (g_j − ḡ) on A
    z = weight.mul_(above)
    grad_s = above.mul_(centred)
    pull = grad_s.sum(-1, keepdim=True)  # T
    grad_s.addcmul_(block.spread, pull / block.total_spread, value=-1)
    grad_log_kappa = pull - mean * leak * eta
    lam_at_zero = torch.zeros_like(pull)
    if bool((block.lam == 0).any()):  # every key is active then
        per_lam = block._replace(lam=torch.ones_like(block.lam)).scales.friction
        lam_at_zero = (centred * block.rows.exp_u).sum(-1, keepdim=True).mul_(-per_lam.clamp(max=_LARGE))
    grad_u = centred.mul_(-friction).sub_(grad_log_kappa / block.total_u).mul_(block.rows.exp_u)
    return z, Gradients(grad_s, grad_u, grad_log_kappa, lam_at_zero)


def _gradients(block: Block, flows: Flows, g: Tensor, g_top: Tensor) -> Gradients:
    """The closed form of `sfiformer.flow.exact`, with differences of g taken from ``g_top``."""
    z, weight, gated, total, leak, spill = flows
    ahead = g - g_top
    offset = ((weight * ahead).sum(-1, keepdim=True) - leak * g_top) / total  # ḡ − g_top
    centred, mean = ahead.sub_(offset), g_top + offset
    grad_s = centred * z
    pull = grad_s.sum(-1, keepdim=True)  # T
    grad_log_kappa = pull - mean * spill
    grad_s.addcmul_(block.spread, pull / block.total_spread, value=-1)
    lam_at_zero = torch.zeros_like(pull)
    if bool((block.lam == 0).any()):
        log_p = block.rows.s - block.rows.lse_s
        per_lam = log_p.add_(block.log_per_lam).add_(block.rows.u).clamp_(max=math.log(_LARGE)).exp_()
        lam_at_zero = -(per_lam * centred).sum(-1, keepdim=True)
    grad_u = centred.mul_(gated).addcmul_(block.rows.exp_u, grad_log_kappa / block.total_u).neg_()
    return Gradients(grad_s, grad_u, grad_log_kappa, lam_at_zero.to(z.dtype))


def _at_heaviest(g: Tensor, flows: Flows) -> Tensor:
    return g.gather(-1, flows.weight.argmax(-1, keepdim=True))


def _require_finite(total_s: Tensor, total_u: Tensor) -> None:
    for name, argument, row in (
        ("s = q·k", "q and k", total_s),
        ("u = q̃·k̃", "q_friction and k_friction", total_u),
    ):
        if not bool(row.isfinite().all()):
            raise ValueError(
                f"the scores {name} must be finite, but {argument} hold NaN, inf or numbers too large to multiply"
            )
