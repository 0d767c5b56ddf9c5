"""Widths that a GPU's matrix units take: multiples of 8. Others are padded with zero columns, which change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MULTIPLE = 8


def wide(width: int, like: Tensor) -> int:
    """What ``width`` is padded to on the device of ``like``: the next multiple of 8 on a GPU, as it is elsewhere."""
    return -(-width // MULTIPLE) * MULTIPLE if like.is_cuda else width


def widened(x: Tensor, *widths: int) -> Tensor:
    """Zeros behind the last dimensions of x, up to the given widths."""
    missing = [(width - size) for width, size in zip(widths, x.shape[-len(widths) :], strict=True)]
    if not any(missing):
        return x
    return F.pad(x, [amount for more in reversed(missing) for amount in (0, more)])


def by_parts(x: Tensor, layers: Sequence[nn.Linear], parts: int = 1) -> Tensor:
    """What several layers make of x, in equal parts each, as one product: [N, layers, parts, width].

    Behind each part are zero columns where the device likes another width.
    """
    out, inner = layers[0].weight.shape
    width, padded = wide(out // parts, x), wide(inner, x)  # x may be padded already
    weight = torch.cat([layer.weight for layer in layers]) if len(layers) > 1 else layers[0].weight
    bias = torch.cat([layer.bias for layer in layers]) if len(layers) > 1 else layers[0].bias
    weight = widened(weight.view(-1, out // parts, inner), width, padded).flatten(0, 1)
    bias = widened(bias.view(-1, out // parts), width).flatten()
    return F.linear(widened(x, padded), weight, bias).view(len(x), len(layers), parts, width)
