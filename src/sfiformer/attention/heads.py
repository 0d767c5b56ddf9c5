"""Queries, keys and values out of one product: each a tensor of its own, those of scores divided by their root mean square."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.attention import cpu
from sfiformer.attention.kernels import usable
from sfiformer.operators import operator, transformed


def split_heads(packed: Tensor, normed: int, eps: float) -> list[Tensor]:
    """Parts [nodes, heads, width] of ``packed`` [nodes, parts, heads, width]; the first ``normed`` of them as

        x / √(mean(x²) + eps) ,   the mean over the head.

    On a GPU this is one kernel forward and one backward, which reads and writes everything once; on a CPU it takes a few
    passes more, and fewer than autograd would.
    """
    if usable(packed) or (normed and _by_hand(packed)):
        return _split_heads(packed, normed, eps)[:-1]
    if not normed:  # the gradients are put together once, not twice
        return list(packed.unbind(1))
    scores, rest = packed.split([normed, packed.shape[1] - normed], dim=1)
    # Autocast would write it all in float32 and back; the operator works in float32 on the way.
    with torch.autocast(packed.device.type, enabled=False):
        scores = F.rms_norm(scores, scores.shape[-1:], eps=eps)
    return [*scores.unbind(1), *rest.unbind(1)]


def _by_hand(packed: Tensor) -> bool:
    """Whether the operator serves a CPU: in single and double precision, where nothing wants to look into it."""
    plain = packed.device.type == "cpu" and packed.dtype in (torch.float32, torch.float64)
    return plain and not transformed() and not torch.compiler.is_compiling()


@operator("sfiformer::split_heads")
def _split_heads(packed: Tensor, normed: int, eps: float) -> list[Tensor]:
    """The parts, and 1/√(mean(x²) + eps), [nodes, normed, heads], in float32 at least."""
    if not usable(packed):
        parts = packed.unbind(1)
        others = [part.clone() for part in parts[normed:]]
        if normed and cpu.serves(packed.dtype, packed.device):
            normal, scales = cpu.normalise(packed, normed, eps)
            return [*normal, *others, scales]
        width = packed.shape[-1]
        scales = (
            (torch.linalg.vector_norm(packed[:, :normed], dim=-1) * width**-0.5).square_().add_(eps).rsqrt_()
        )
        normal = [part * scale.unsqueeze(-1) for part, scale in zip(parts, scales.unbind(1), strict=False)]
        return [*normal, *others, scales]
    from sfiformer.attention.kernels import heads

    return heads.split(packed.contiguous(), normed, eps)


@operator("sfiformer::join_heads")
def _join_heads(grads: list[Tensor], packed: Tensor, scales: Tensor) -> Tensor:
    """The gradient of ``packed`` from those of its parts."""
    if not usable(packed):
        out, normed = torch.empty_like(packed, memory_format=torch.contiguous_format), scales.shape[1]
        if normed and cpu.serves(packed.dtype, packed.device):
            cpu.normalise_gradients(grads[:normed], packed, scales, out)
        else:
            for number, grad in enumerate(grads[:normed]):
                x, scale = packed[:, number], scales[:, number].unsqueeze(-1)
                along = (grad * x).mean(-1, keepdim=True)
                torch.mul(grad, scale, out=out[:, number]).addcmul_(x, along * scale**3, value=-1)
        for number, grad in enumerate(grads[normed:], normed):
            out[:, number] = grad
        return out
    from sfiformer.attention.kernels import heads

    return heads.join([grad.contiguous() for grad in grads], packed.contiguous(), scales)


@_split_heads.register_fake
def _(packed: Tensor, normed: int, eps: float) -> list[Tensor]:
    nodes, parts, *head = packed.shape
    outs = [packed.new_empty((nodes, *head)) for _ in range(parts)]
    scales = torch.promote_types(packed.dtype, torch.float32)
    return [*outs, packed.new_empty((nodes, normed, head[0]), dtype=scales)]


@_join_heads.register_fake
def _(grads: list[Tensor], packed: Tensor, scales: Tensor) -> Tensor:
    return packed.new_empty(packed.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[-1])
    ctx.eps = inputs[2]


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor, None, None]:
    packed, scales = ctx.saved_tensors
    zeros = packed.new_zeros(()).expand(packed[:, 0].shape)
    known = [zeros if grad is None else grad for grad in grads[:-1]]
    again = torch.is_grad_enabled() and not usable(packed)  # it is to be differentiated
    if again or any(map(torch._C._functorch.is_legacy_batchedtensor, known)):  # many gradients at once
        return _joined(known, packed, scales.shape[1], ctx.eps), None, None
    return _join_heads(known, packed, scales), None, None


def _joined(grads: list[Tensor], packed: Tensor, normed: int, eps: float) -> Tensor:
    """`_join_heads` as autograd can follow it: (g − x̂ mean(g x̂)) / √(mean(x²) + eps) of what is normalised."""
    x, g = packed[:, :normed], torch.stack(grads, dim=1)
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    g, rest = g.split([normed, len(grads) - normed], dim=1)
    return torch.cat([scale * (g - x * scale**2 * (g * x).mean(-1, keepdim=True)), rest], dim=1)


_split_heads.register_autograd(_backward, setup_context=_setup_context)
