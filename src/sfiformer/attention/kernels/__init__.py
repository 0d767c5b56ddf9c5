"""Fused Triton kernels.

`launch`: the exact attention for graphs of up to 1,024 nodes, an operator with `packed_attention`'s meaning, which
`sfi_attention` does not choose yet. `rows`: sums along edges.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def usable(x: Tensor) -> bool:
    """Whether kernels that work in float32 serve this tensor: on a GPU, with Triton, in a dtype no wider."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
