"""Half precision is computed with in float32: the way there, and the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in float32 at least; its gradient, as it comes back, is `narrowed`."""
    return _Wide.apply(x) if torch.finfo(x.dtype).bits < 32 else x


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype``, within its range: an infinity would make sums of products NaN. What is NaN stays so."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


class _Wide(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.to(torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return narrowed(grad, ctx.dtype)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.to(torch.float32)
