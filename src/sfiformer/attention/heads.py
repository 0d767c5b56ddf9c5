"""Queries, keys and values out of one product: each a tensor of its own, those of scores divided by their root mean square."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.attention.kernels import usable
from sfiformer.operators import operator


def split_heads(packed: Tensor, normed: int, eps: float) -> list[Tensor]:
    """Parts [nodes, heads, width] of ``packed`` [nodes, parts, heads, width]; the first ``normed`` of them as

        x / √(mean(x²) + eps) ,   the mean over the head.

    On a GPU this is one kernel forward and one backward, which reads and writes everything once.
    """
    if usable(packed):
        return _split_heads(packed, normed, eps)[:-1]
    if not normed:  # the gradients are put together once, not twice
        return list(packed.unbind(1))
    scores, rest = packed.split([normed, packed.shape[1] - normed], dim=1)
    # Autocast would write it all in float32 and back; the operator works in float32 on the way.
    with torch.autocast(packed.device.type, enabled=False):
        scores = F.rms_norm(scores, scores.shape[-1:], eps=eps)
    return [*scores.unbind(1), *rest.unbind(1)]


@operator("sfiformer::split_heads")
def _split_heads(packed: Tensor, normed: int, eps: float) -> list[Tensor]:
    """The parts, and 1/√(mean(x²) + eps), [nodes, normed, heads] float32."""
    from sfiformer.attention.kernels import heads

    return heads.split(packed.contiguous(), normed, eps)


@operator("sfiformer::join_heads")
def _join_heads(grads: list[Tensor], packed: Tensor, scales: Tensor) -> Tensor:
    """The gradient of ``packed`` from those of its parts."""
    from sfiformer.attention.kernels import heads

    return heads.join([grad.contiguous() for grad in grads], packed.contiguous(), scales)


@_split_heads.register_fake
def _(packed: Tensor, normed: int, eps: float) -> list[Tensor]:
    nodes, parts, *head = packed.shape
    outs = [packed.new_empty((nodes, *head)) for _ in range(parts)]
    return [*outs, packed.new_empty((nodes, normed, head[0]), dtype=torch.float32)]


@_join_heads.register_fake
def _(grads: list[Tensor], packed: Tensor, scales: Tensor) -> Tensor:
    return packed.new_empty(packed.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[-1])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor, None, None]:
    packed, scales = ctx.saved_tensors
    zeros = packed.new_zeros(()).expand(packed[:, 0].shape)
    return _join_heads([zeros if grad is None else grad for grad in grads[:-1]], packed, scales), None, None


_split_heads.register_autograd(_backward, setup_context=_setup_context)
