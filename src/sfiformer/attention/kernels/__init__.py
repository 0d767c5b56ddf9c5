"""Fused Triton kernels, chosen on CUDA: the exact attention (`attend`) and sums along edges (`rows`)."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
MAX_WIDTH = 256  # of a head
MAX_DIM = 1024  # of a row of the layer's output that stays on chip
MAX_NODES = 1024  # of a graph whose rows stay on chip (the end of a bucket); larger ones are streamed


def usable(x: Tensor) -> bool:
    """Whether kernels that work in float32 serve this tensor: on a GPU, with Triton, in a dtype no wider."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and HAS_TRITON


def attend(
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
    largest = int(ptr.diff().max()) if max_nodes is None and len(ptr) > 1 else max_nodes or 0
    if q_friction is None and largest > MAX_NODES:
        return None
    from sfiformer.attention.kernels.launch import fused_attention

    tensors = [x if x is None else x.contiguous() for x in (q, k, v, q_friction, k_friction)]
    # Drawn on the device: nothing waits, and a captured step draws anew each time.
    seed = torch.randint(1 << 62, (), device=q.device) if dropout_p else ptr.new_zeros(())
    options = (alpha, potential, scale, dropout_p, largest)
    return fused_attention(*tensors, ptr, lam.float().contiguous(), seed, *options)[0]
