"""Fused Triton kernels, chosen on CUDA: the exact attention (`launch`), the rest of its layer, sums along edges (`rows`),
the paper's iteration (`iteration`)."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from sfiformer.operators import transformed

# (AMD's knows no bound on registers.)
HAS_TRITON = find_spec("triton") is not None and torch.version.hip is None
MAX_WIDTH = 256  # of a head
MAX_DIM = 1024  # of a row of the layer's output that stays on chip
MAX_KEYS = 4096  # of a row of the paper's iteration, which stays on chip
MAX_NODES = 1024  # of a graph whose rows stay on chip (the end of a bucket); larger ones are streamed
SHARED_MEMORY = 165_888  # bytes that the largest tiles of attention take


def usable(x: Tensor) -> bool:
    """Whether kernels that work in float32 serve this tensor: on a GPU of NVIDIA's, with Triton, in a dtype no wider.

    Under transforms they do not: of plain PyTorch there are fewer operators that transforms must be told how to follow.
    """
    fits = x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and HAS_TRITON
    return fits and not transformed()


@cache
def has_room(device: torch.device) -> bool:
    """Whether attention's tiles fit a GPU: an A100, H100 or later of their kind. On smaller ones attention is plain PyTorch."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY) >= SHARED_MEMORY
