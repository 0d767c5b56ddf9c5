"""Widths that a GPU's matrix units take, and that a CPU likes: multiples of 8. Others are padded with zero columns, which
change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfiformer.attention.kernels import usable
from sfiformer.attention.products import product
from sfiformer.branches import ahead
from sfiformer.operators import operator

MULTIPLE = 8
MOST = 5  # layers that one kernel joins
MANY = 256  # rows for which a CPU pads a weight


def wide(width: int, like: Tensor) -> int:
    """What ``width`` is padded to on the device of ``like``: the next multiple of 8 on a GPU, as it is elsewhere."""
    return _rounded(width) if like.is_cuda else width


def wide_head(width: int, like: Tensor) -> int:
    """The same for a head. Many of odd width are padded on a CPU, too: products into long rows that end anywhere are slow."""
    return _rounded(width) if _is_odd(width, like) else wide(width, like)


def _rounded(width: int) -> int:
    return -(-width // MULTIPLE) * MULTIPLE


def _is_odd(width: int, like: Tensor) -> bool:
    """Whether a CPU has many rows of odd width.

    The compiler, which is to make one program for any number of nodes, does not ask how many there are.
    """
    odd = width % 2 == 1 and like.device.type == "cpu" and not torch.compiler.is_compiling()
    return odd and like.size(0) >= MANY


def widened(x: Tensor, *widths: int) -> Tensor:
    """Zeros behind the last dimensions of x, up to the given widths."""
    missing = [(width - size) for width, size in zip(widths, x.shape[-len(widths) :], strict=True)]
    if not any(missing):
        return x
    return F.pad(x, [amount for more in reversed(missing) for amount in (0, more)])


def resized(x: Tensor, width: int) -> Tensor:
    """The first columns of x [N, columns], or all with zeros behind them."""
    if x.size(1) == width:
        return x
    if usable(x):
        return _resized(x, width, x.dtype, min(x.size(1), width), False)
    return x[:, :width] if width < x.size(1) else widened(x, width)


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is its weight and bias and no more: no other class (adapted, quantised, parametrised) and no hooks."""
    return type(layer) is nn.Linear and layer.bias is not None and not has_hooks(layer)


def has_hooks(module: nn.Module) -> bool:
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)


def by_parts(x: Tensor, layers: Sequence[nn.Module], parts: int = 1, *, width: int | None = None) -> Tensor:
    """What several layers make of x, in equal parts each, as one product: [N, layers, parts, width].

    Behind each part are zero columns up to ``width``, or to one that the device likes. On a GPU, and on a CPU where x has many
    rows of odd length, the bias is the weight of a column of ones: its gradient, a sum over all rows, is then part of the
    product that the weight's is. Layers that are not plain are called, one by one.
    """
    plain = [layer for layer in layers if is_plain(layer)]
    if len(plain) < len(layers):
        each = [layer(x[:, : getattr(layer, "in_features", x.size(1))]) for layer in layers]
        made = torch.stack(each, dim=1).unflatten(2, (parts, -1))
        return widened(made, wide(made.size(3), x) if width is None else width)
    if usable(x) and len(plain) <= MOST:
        return of_ready(_resized(x, *taken(x, plain), True), plain, parts, width=width)
    made = F.linear(*_evened(x, *joined(plain, x, parts, width=width)))
    return made.unflatten(1, (len(plain), parts, -1))


def taken(x: Tensor, layers: Sequence[nn.Linear]) -> tuple[int, torch.dtype, int]:
    """What `of_ready` takes in place of x: the width of its rows, their type, and how many columns come before the ones."""
    inner = layers[0].weight.size(1)
    return wide(inner + 1, x), _of_products(x, layers), inner


def of_ready(
    rows: Tensor, layers: Sequence[nn.Linear], parts: int = 1, *, width: int | None = None
) -> Tensor:
    """`by_parts` of plain layers, five at most, with kernels: of rows that have the columns of ones and zeros already."""
    width = wide(layers[0].weight.size(0) // parts, rows) if width is None else width
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    sizes = (parts, width, 1, rows.size(1), rows.dtype, True)
    weight, _ = ahead(rows, lambda: _joined(weights, biases, *sizes), *weights, *biases)
    return product(rows, weight).unflatten(1, (len(layers), parts, -1))


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    """What one layer makes of x [N, …], of which it takes the first columns: [N, width], zero columns behind it likewise."""
    return by_parts(x, [layer]).flatten(1)


def _evened(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias for a product on a CPU, which is slow with many rows of odd length.

    Behind such rows come a one, of which the bias is then the weight, and zeros.
    """
    x = widened(x, weight.size(1))
    if not _is_odd(x.size(1), x):
        return x, weight, bias
    one = F.pad(x.new_ones(1, 1), (0, -(x.size(1) + 1) % MULTIPLE))
    bias = F.pad(bias.unsqueeze(1), (0, one.size(1) - 1))
    return torch.cat([x, one.expand(x.size(0), -1)], dim=1), torch.cat([weight, bias], dim=1), None


def joined(
    layers: Sequence[nn.Linear],
    x: Tensor,
    parts: int = 1,
    in_parts: int = 1,
    *,
    width: int | None = None,
    in_width: int | None = None,
    bias_elsewhere: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of layers of one shape, one below the other, with every part as wide as the device of x likes.

    Outputs come in equal ``parts``, inputs in ``in_parts``, unless ``width`` and ``in_width`` say how wide each is to be. On a
    GPU this is one kernel, forward and backward, which also casts them to the type that a product with x has. A bias that is
    used elsewhere, as the parameter it is, is a constant here: its gradient comes about there, and on that stream alone
    (`ahead`).
    """
    out, inner = layers[0].weight.shape
    wide_out = wide(out // parts, x) if width is None else width
    wide_in = wide(inner // in_parts, x) if in_width is None else in_width
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias.detach() if bias_elsewhere else layer.bias for layer in layers]
    dtype = _of_products(x, layers)
    if len(layers) == 1 and (parts * wide_out, in_parts * wide_in, dtype) == (out, inner, weights[0].dtype):
        return weights[0], biases[0]
    if usable(x) and len(layers) <= MOST:
        sizes = (parts, wide_out, in_parts, wide_in, dtype, False)
        trained = weights if bias_elsewhere else [*weights, *biases]
        return ahead(x, lambda: _joined(weights, biases, *sizes), *trained)
    weight = torch.cat(weights) if len(layers) > 1 else weights[0]
    bias = torch.cat(biases) if len(layers) > 1 else biases[0]
    weight = weight.view(-1, out // parts, in_parts, inner // in_parts)
    weight = widened(weight, wide_out, in_parts, wide_in).flatten(2).flatten(0, 1)
    return weight, widened(bias.view(-1, out // parts), wide_out).flatten()


def _of_products(x: Tensor, layers: Sequence[nn.Linear]) -> torch.dtype:
    """The type that a product of x with the weights is made in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else layers[0].weight.dtype


@operator("sfiformer::resized")
def _resized(x: Tensor, width: int, dtype: torch.dtype, kept: int, one: bool) -> Tensor:
    """The first ``kept`` columns of x, a column of ones if asked for, and zeros: [N, width] in another type, in one pass."""
    from sfiformer.attention.kernels import joined as kernels

    return kernels.resize(x, width, dtype, kept, one)


@_resized.register_fake
def _(x: Tensor, width: int, dtype: torch.dtype, kept: int, one: bool) -> Tensor:
    return x.new_empty((x.size(0), width), dtype=dtype)


def _setup_resized(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, _, kept, _ = inputs
    ctx.options = (x.size(1), x.dtype, kept, False)


def _resized_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _resized(grad, *ctx.options), *[None] * 4


_resized.register_autograd(_resized_backward, setup_context=_setup_resized)


@operator("sfiformer::joined")
def _joined(
    weights: list[Tensor],
    biases: list[Tensor],
    parts: int,
    wide_out: int,
    in_parts: int,
    wide_in: int,
    dtype: torch.dtype,
    column: bool,
) -> tuple[Tensor, Tensor]:
    """The joint weight and bias; or the bias as the column behind those of the weight, and nothing."""
    from sfiformer.attention.kernels import joined as kernels

    return kernels.join(weights, biases, parts, wide_out, in_parts, wide_in, dtype, column)


@operator("sfiformer::parted")
def _parted(
    weight: Tensor,
    bias: Tensor | None,
    weights: list[Tensor],
    parts: int,
    wide_out: int,
    in_parts: int,
    wide_in: int,
) -> list[Tensor]:
    """Gradients of ``weights``, then of their biases, from those of the joint ones."""
    from sfiformer.attention.kernels import joined as kernels

    bias = None if bias is None else bias.contiguous()
    of_weights, of_biases = kernels.part(
        weight.contiguous(), bias, weights, parts, wide_out, in_parts, wide_in
    )
    return of_weights + of_biases


@_joined.register_fake
def _(weights: list[Tensor], biases: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    parts, wide_out, in_parts, wide_in, dtype, column = options
    rows = len(weights) * parts * wide_out
    weight = weights[0].new_empty((rows, in_parts * wide_in), dtype=dtype)
    return weight, weight.new_empty(0 if column else rows)


@_parted.register_fake
def _(weight: Tensor, bias: Tensor | None, weights: list[Tensor], *sizes: int) -> list[Tensor]:
    return [torch.empty_like(x) for x in weights] + [x.new_empty(x.size(0)) for x in weights]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    weights, _, *ctx.sizes, _, ctx.column = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*weights)


def _backward(ctx: Any, of_weight: Tensor, of_bias: Tensor | None) -> tuple[Any, ...]:
    weights = list(ctx.saved_tensors)
    count, known = len(weights), ctx.column or of_bias is not None
    # A bias that nobody used has no gradient, and what the kernel then says of it is not looked at.
    bias = None if ctx.column else of_weight[:, 0] if of_bias is None else of_bias
    grads = _parted(of_weight, bias, weights, *ctx.sizes)
    return grads[:count], grads[count:] if known else [None] * count, *[None] * 6


_joined.register_autograd(_backward, setup_context=_setup_context)
