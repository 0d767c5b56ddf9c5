"""Widths that a GPU's matrix units take: multiples of 8. Others are padded with zero columns, which change nothing."""

from __future__ import annotations

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


def by_parts(layer: nn.Linear, x: Tensor, parts: int) -> Tensor:
    """layer(x) in equal parts, [N, parts, width], with zero columns behind each where the device likes another width."""
    out, inner = layer.weight.shape
    width, padded = wide(out // parts, x), wide(inner, x)
    weight = widened(layer.weight.view(parts, out // parts, inner), width, padded).flatten(0, 1)
    bias = widened(layer.bias.view(parts, out // parts), width).flatten()
    return F.linear(widened(x, padded), weight, bias).view(len(x), parts, width)


class Linear(nn.Linear):
    """A linear layer that computes at widths that the device likes."""

    def forward(self, x: Tensor) -> Tensor:
        return by_parts(self, x, 1)[:, 0, : self.out_features]
