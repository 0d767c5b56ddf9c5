"""Fused Triton kernels of the exact attention: operators with the meaning of `packed_attention`.

`sfi_attention` and `dfi_attention` choose them on CUDA where `attend` serves.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

MAX_WIDTH = 256  # of a head
MAX_NODES = 1024  # of a graph whose rows stay on chip


def serve(*tensors: Tensor) -> bool:
    """Whether the kernels take tensors [nodes, heads, width] of this device, dtype and width."""
    first = tensors[0]
    return (
        first.is_cuda
        and first.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(x.shape[-1] <= MAX_WIDTH for x in tensors)
        and find_spec("triton") is not None
    )


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
    """`sfi_attention` on tensors of one dtype that the kernels `serve`; None where a graph is too large for them.

    Without q_friction and k_friction there is none of it: softmax attention where alpha is infinite. Where ``max_nodes`` is
    None, the largest size is asked of the device, which waits for it.
    """
    from sfiformer.attention.kernels.launch import fused_attention

    largest = int(ptr.diff().max()) if max_nodes is None and len(ptr) > 1 else max_nodes or 0
    if largest > MAX_NODES:
        return None
    tensors = [x if x is None else x.contiguous() for x in (q, k, v, q_friction, k_friction)]
    # Drawn on the device: nothing waits, and a captured step draws anew each time.
    seed = torch.randint(1 << 62, (), device=q.device) if dropout_p else ptr.new_zeros(())
    options = (alpha, potential, scale, dropout_p, largest)
    return fused_attention(*tensors, ptr, lam.float(), seed, *options)[0]
