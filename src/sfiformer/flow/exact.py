"""The exact flows with their closed-form gradient."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from sfiformer.flow.rows import Logs, Rows, Scales, solve, support
from sfiformer.operators import refuse_tangents


class ExactFlows(torch.autograd.Function):
    """z_j = p_j (η − κ f_j)₊ with Σ_j z_j + ε η = 1, where p = softmax(s), κ f_j = λ exp(log_scale + u_j), ε = exp(log_eps).

    With A the active set, W = Σ_A p_j + ε, ḡ = Σ_A g_j p_j / W and T = Σ_j (g_j − ḡ) z_j, where g = ∂L/∂z:

        ∂L/∂s_j = (g_j − ḡ) z_j − p_j T                  ∂L/∂u_j = −κ f_j p_j (g_j − ḡ) on A
        ∂L/∂log κ = Σ_j ∂L/∂u_j = T − ḡ (1 − Σ z)        ∂L/∂log ε = −ḡ (1 − Σ z)

    The differences g_j − ḡ are taken from the heaviest active key, since κ f_j p_j may multiply them by any power of e;
    what exceeds the type saturates. The backward is itself differentiable, with z, an output, as one of its inputs.
    Scores are [..., n]; lam, log_scale and log_eps are float64 [..., 1]. The outputs are z and which keys are active.
    """

    @staticmethod
    def forward(
        s: Tensor, u: Tensor, lam: Tensor, log_scale: Tensor, log_eps: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        work = torch.promote_types(s.dtype, torch.float32)
        masked_s = s.to(work).masked_fill(~mask, -math.inf)
        masked_u = u.to(work).masked_fill(~mask, math.inf)
        rows, logs = Rows.of(masked_s, masked_u, masked=True), Logs(lam.log() + log_scale, log_eps)
        scales = Scales.of_logs(rows, logs)
        solution = solve(rows, scales, lambda: logs)
        return solution[0].to(s.dtype), support(rows, solution, scales)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> NoReturn:
        refuse_tangents("solver='exact'")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Any, tuple[int, int]]:
        batched = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        return ExactFlows.apply(*batched), (0, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        s, u, lam, log_scale, log_eps, mask, z, active = ctx.saved_tensors
        dtype = s.dtype
        g, s, u, z = grads[0].double(), s.double(), u.double(), z.double()
        s = s.masked_fill(~mask, -math.inf)
        log_sum_s = s.logsumexp(-1, keepdim=True)

        on_active = s.masked_fill(~active, -math.inf)
        shares = torch.cat([on_active, log_eps + log_sum_s], -1).softmax(-1)  # p_j / W, and the leak's ε / W
        share, leak_share = shares[..., :-1], shares[..., -1:]
        g_top = g.gather(-1, share.argmax(-1, keepdim=True))
        ahead = g - g_top
        offset = (share * ahead).sum(-1, keepdim=True) - leak_share * g_top  # ḡ − g_top
        centred, mean = ahead - offset, g_top + offset
        pull = (centred * z).sum(-1, keepdim=True)  # T
        spill = 1 - z.sum(-1, keepdim=True)

        grad_s = centred * z - (s - log_sum_s).exp() * pull
        log_friction = (log_scale + u + on_active - log_sum_s).clamp(max=700)
        grad_friction = -log_friction.exp() * centred  # ∂L/∂log(f_j) / λ
        grad_log_kappa = pull - mean * spill
        grad_lam = torch.where(
            lam > 0, grad_log_kappa / lam.masked_fill(lam == 0, 1), grad_friction.sum(-1, keepdim=True)
        )
        return (
            saturate(grad_s, dtype),
            saturate(lam * grad_friction, dtype),
            grad_lam,
            grad_log_kappa,
            -mean * spill,
            None,
        )


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, kept so far inside its range that sums over keys stay finite."""
    limit = torch.finfo(dtype).max ** 0.75
    return x.clamp(-limit, limit).to(dtype)
