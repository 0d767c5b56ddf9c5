"""One block of scores: its flow problems, and the gradients of their flows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sfiformer.flow.exact import saturate
from sfiformer.flow.rows import GENTLE, Flows, Rows, gentle, is_plain, log_total, measure, pick_rows


class Block(NamedTuple):
    """Scores [b, rows, n] and the scalings of their flow problems, float64 [b, rows, 1].

    Absolute: κ = λC and ε = 1/(αC), with log C = lse(s) + lse(−s). Relative to the potential: κ = λ*n and ε = 0.
    """

    rows: Rows
    spread: Tensor  # [b, rows, n] r, or p where friction is relative, not normalised: how C, or p itself, moves with s
    total_spread: Tensor  # [b, rows, 1]
    total_u: Tensor  # [b, rows, 1] Σ exp_u
    log_lam: Tensor
    log_per_lam: Tensor  # log κ/λ, less the normaliser of u
    log_eps: Tensor

    @classmethod
    def of(cls, s: Tensor, u: Tensor, log_lam: Tensor, alpha: float, potential: bool, check: bool) -> Block:
        rows = Rows.of(s, u)
        total_u = rows.exp_u.sum(-1, keepdim=True)
        log_sum_u = log_total(total_u, rows.u_max)
        if potential:
            log_c, log_eps = rows.lse_s, torch.full_like(rows.lse_s, -math.inf)
            spread, total_spread = rows.exp_s, rows.total_s
            log_per_lam = math.log(s.shape[-1]) - log_sum_u
        else:
            spread, shift = rows.exp_s.reciprocal(), rows.s_max
            total_spread = spread.sum(-1, keepdim=True)
            if not bool(total_spread.isfinite().all()):  # exp_s underflows
                shift = s.amin(-1, keepdim=True)
                spread = (shift - s).exp_()
                total_spread = spread.sum(-1, keepdim=True)
            log_c = rows.lse_s + log_total(total_spread, -shift)
            log_per_lam, log_eps = log_c - log_sum_u, -math.log(alpha) - log_c
        if check:
            _require_finite(log_c, log_sum_u)
        return cls(rows, spread, total_spread, total_u, log_lam.expand_as(log_eps), log_per_lam, log_eps)

    @property
    def log_kappa(self) -> Tensor:
        return self.log_lam + self.log_per_lam

    def take(self, index: Tensor) -> Block:
        """Some of the rows, in float64: [m, n]."""
        return Block(self.rows.take(index), *(pick_rows(x, self.rows.s.shape[:-1], index) for x in self[1:]))


class Gradients(NamedTuple):
    """Of a loss with respect to the scores [..., n], to log κ, and to λ at λ = 0, [..., 1]."""

    s: Tensor
    u: Tensor
    log_kappa: Tensor
    lam_at_zero: Tensor


def flows_and_gradients(block: Block, eta: Tensor, pivot: Tensor, g: Tensor) -> tuple[Tensor, Gradients]:
    """The solved flows z again, from what `solve` said of them, and the gradients that g = ∂L/∂z leads to."""
    if bool((pivot == GENTLE).all()):
        flows = gentle(block.rows, eta, block.log_kappa, block.log_eps)
        return flows.z, _gradients(block, flows, g, g.new_zeros(()))
    found = measure(block.rows, pivot, block.log_kappa, block.log_eps)
    z, gradients = found.flows.z, _gradients(block, found.flows, g, _at_heaviest(g, found.flows))
    plain = is_plain(found)
    if not bool(plain.all()):  # some rows range too widely: again, in float64 and logarithms
        index = (~plain).view(-1).nonzero().squeeze(-1)
        hard, shape = block.take(index), plain.shape[:-1]
        hard_pivot, hard_g = pick_rows(pivot, shape, index).long(), pick_rows(g, shape, index)
        flows = measure(hard.rows, hard_pivot, hard.log_kappa, hard.log_eps, logarithms=True).flows
        again = _gradients(hard, flows, hard_g, _at_heaviest(hard_g, flows))
        for all_rows, those in zip((z, *gradients), (flows.z, *again), strict=True):
            all_rows.view(-1, all_rows.shape[-1])[index] = saturate(those, g.dtype)
    return z, gradients


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
    if bool(block.log_lam.isneginf().any()):
        log_p = block.rows.s - block.rows.lse_s
        per_lam = log_p.add_(block.log_per_lam).add_(block.rows.u).clamp_(max=80).exp_()
        lam_at_zero = -(per_lam * centred).sum(-1, keepdim=True)
    grad_u = centred.mul_(gated).addcmul_(block.rows.exp_u, grad_log_kappa / block.total_u).neg_()
    return Gradients(grad_s, grad_u, grad_log_kappa, lam_at_zero.to(z.dtype))


def _at_heaviest(g: Tensor, flows: Flows) -> Tensor:
    return g.gather(-1, flows.weight.argmax(-1, keepdim=True))


def _require_finite(log_c: Tensor, log_sum_u: Tensor) -> None:
    for name, argument, row in (
        ("s = q·k", "q and k", log_c),
        ("u = q̃·k̃", "q_friction and k_friction", log_sum_u),
    ):
        if not bool(row.isfinite().all()):
            raise ValueError(
                f"the scores {name} must be finite, but {argument} hold NaN, inf or numbers too large to multiply"
            )
