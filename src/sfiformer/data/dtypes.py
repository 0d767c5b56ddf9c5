"""Small dtypes to keep, plain dtypes to compute with."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def narrow(tensor: Tensor) -> Tensor:
    """The smallest dtype that holds every value exactly (float64 counts as float32).

    Integers become uint8, int16, int32 or int64; floats become float16 where that loses nothing (one-hot
    features, 0/1 targets), float32 elsewhere; bool stays. `widen` is the way back.
    """
    if tensor.dtype == torch.bool or tensor.numel() == 0:
        return tensor
    if tensor.is_floating_point():
        if tensor.dtype != torch.float16:
            tensor = tensor.to(torch.float32)
            half = tensor.to(torch.float16)
            tensor = half if torch.equal(half.to(torch.float32).nan_to_num(), tensor.nan_to_num()) else tensor
        return tensor
    if tensor.dtype not in INTEGERS:
        tensor = tensor.to(torch.int64)  # PyTorch has few operations on the others
    low, high = (int(bound) for bound in torch.aminmax(tensor))
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return tensor.to(dtype)
    raise AssertionError("int64 holds every integer tensor")


def widen(tensor: Tensor) -> Tensor:
    """What a model is given: integers as int64 (for embeddings), floats as float32, bool as it is (masks)."""
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
