"""Widths that a GPU's matrix units take: multiples of 8. Others are padded with zero columns, which change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MULTIPLE = 8


def wide(width: int, like: Tensor) -> int:
    """What ``width`` is padded to on the device of ``like``: the next multiple of 8 on a GPU, as it is elsewhere."""
    return -(-width // MULTIPLE) * MULTIPLE if like.is_cuda else width


def widened(x: Tensor, *widths: int, product: bool = False) -> Tensor:
    """Zeros behind the last dimensions of x, up to the given widths; padded for a ``product``, it is cast as by autocast."""
    shape = (*x.shape[: -len(widths)], *widths)
    if shape == x.shape:
        return x
    kind, dtype = x.device.type, x.dtype
    if product and dtype != torch.float64 and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return _Widened.apply(x, shape, dtype)


class _Widened(torch.autograd.Function):
    # Padding and a cast as one copy, there and back.

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        out = x.new_zeros(shape, dtype=dtype)
        _corner(out, x.shape).copy_(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _corner(grad, ctx.shape).to(ctx.dtype), None, None


def _corner(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x[tuple(slice(size) for size in shape)]


def by_parts(x: Tensor, layers: Sequence[nn.Linear], parts: int = 1) -> Tensor:
    """What several layers make of x, in equal parts each, as one product: [N, layers, parts, width].

    Behind each part are zero columns where the device likes another width.
    """
    out, inner = layers[0].weight.shape
    width, padded = wide(out // parts, x), wide(inner, x)  # x may be padded already
    weight = torch.cat([layer.weight for layer in layers]) if len(layers) > 1 else layers[0].weight
    bias = torch.cat([layer.bias for layer in layers]) if len(layers) > 1 else layers[0].bias
    weight = widened(weight.view(-1, out // parts, inner), width, padded, product=True).flatten(0, 1)
    bias = widened(bias.view(-1, out // parts), width, product=True).flatten()
    return F.linear(widened(x, padded, product=True), weight, bias).view(len(x), len(layers), parts, width)
