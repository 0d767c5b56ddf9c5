"""Numbers that look random and are functions of where they stand: the same however many there are, and on every device."""

import torch
from torch import Tensor

MASK = (1 << 32) - 1  # of 32 bits


def mixed(bits: Tensor) -> Tensor:
    """A permutation of the numbers of 32 bits in which neighbours land far apart; int64, that a place was added to."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * factor) & MASK
    return bits ^ (bits >> 16)


def uniform(bits: Tensor) -> Tensor:
    """Between 0 and 1, float64."""
    return (bits.double() + 0.5) * 2.0**-32


def seeded(seed: int | Tensor) -> Tensor:
    """The bits that a seed of up to 63 bits begins with, []."""
    seed = torch.as_tensor(seed)
    return mixed(mixed(seed & MASK) + (seed >> 32))
