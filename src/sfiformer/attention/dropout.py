"""Dropout. On a CPU PyTorch draws one number of 53 bits for every entry; 16 bits do, several times as fast."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LARGE = 1 << 13  # entries; below, making a generator takes longer than PyTorch's dropout


def kept(like: Tensor, p: float, seed: int) -> Tensor:
    """Dropout's mask, 0 and 1 in the shape and type of ``like``: the same for the same seed.

    On a CPU p is met to 1/65536.
    """
    if like.device.type != "cpu":
        generator = torch.Generator(like.device).manual_seed(seed % (1 << 62))
        return torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype).ge_(p)
    keep = kept_entries(like.numel(), p, seed).view(np.uint8)
    return torch.from_numpy(keep).view(like.shape).to(like.dtype)


def drawn_seed(p: float) -> Tensor:
    """What the mask of a call is made of, drawn on the CPU whatever the default device is; 0 where nothing is dropped."""
    return torch.randint(1 << 62, (), device="cpu") if p else torch.zeros((), dtype=torch.int64, device="cpu")


def kept_entries(count: int, p: float, seed: int) -> np.ndarray:
    """The mask of a CPU, bool [count]."""
    bits = np.random.SFC64(seed % (1 << 62)).random_raw(-(-count // 4)).view(np.int16)[:count]
    return bits >= round(p * 2**16) - 2**15


def dropped(x: Tensor, p: float, training: bool) -> Tensor:
    """As PyTorch's dropout, but that large tensors on a CPU take other random numbers; PyTorch's generator seeds them."""
    ours = x.device.type == "cpu" and x.numel() >= _LARGE and not torch.compiler.is_compiling()
    if not ours or not training or not 0 < p < 1:
        return F.dropout(x, p, training)
    return x * kept(x, p, int(drawn_seed(p))).div_(1 - p)


class Dropout(nn.Dropout):
    """`dropped` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.p, self.training)
