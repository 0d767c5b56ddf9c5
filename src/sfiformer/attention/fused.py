"""Attention by the fused kernels, where they serve the tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from sfiformer.attention.kernels import MAX_NODES, MAX_WIDTH, has_room, usable
from sfiformer.attention.widths import resized, wide
from sfiformer.branches import ahead


def fused_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor | None,
    k_friction: Tensor | None,
    ptr: Tensor,
    lam: Tensor,
    *,
    alpha: float,
    potential: bool,
    scale: float,
    dropout_p: float,
    max_nodes: int | None,
) -> Tensor | None:
    """`sfi_attention` on tensors [nodes, heads, width] of one dtype; None where they are not what the kernels serve.

    Without q_friction and k_friction there is none of it: softmax attention where alpha is infinite. Such graphs are not
    streamed: PyTorch has kernels for large ones. Where ``max_nodes`` is None, the largest size is asked of the device, which
    waits for it.
    """
    if not usable(q) or max(q.shape[-1], v.shape[-1]) > MAX_WIDTH:
        return None
    if not (torch.compiler.is_compiling() or has_room(q.device)):  # the compiler cannot follow the question
        return None
    largest = int(ptr.diff().max()) if max_nodes is None and len(ptr) > 1 else max_nodes or 0
    if q_friction is None and largest > MAX_NODES:
        return None
    from sfiformer.attention.kernels.launch import fused_attention

    # Heads whose width is no multiple of 8 are copied into such as are, with zeros behind: their rows would else be loaded in
    # small pieces, as they are aligned.
    tensors = [
        x if x is None else _of_width(x, wide(x.shape[2], x)) for x in (q, k, v, q_friction, k_friction)
    ]
    # Drawn on the device: nothing waits, and a captured step draws anew each time.
    seed = ahead(q, lambda: torch.randint(1 << 62, (), device=q.device)) if dropout_p else ptr.new_zeros(())
    options = (alpha, potential, scale, dropout_p, largest)
    out = fused_attention(*tensors, ptr, lam.float().contiguous(), seed, *options)[0]
    return _of_width(out, v.shape[2])


def _of_width(x: Tensor, width: int) -> Tensor:
    """Heads cut off at a width, or with zeros up to it: [nodes, heads, …] → [nodes, heads, width]."""
    return resized(x.contiguous().flatten(0, 1), width).view(*x.shape[:2], width)
