"""Kernels that join the weights of several linear layers, padded and cast, and take the gradient apart again; and the like
for what they are applied to.

Rows of layer l, and of a part of it, lie in the joint matrix where `place` says; what lies between is padding, 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def place(index, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Where rows (or columns) of parts of SIZE lie when each is padded to PADDED."""
    return index // SIZE * PADDED + index % SIZE


@triton.jit
def join_layer(
    weight, bias, joint, joint_bias, LAYER: tl.constexpr, PARTS: tl.constexpr, OUT: tl.constexpr, WIDE_OUT: tl.constexpr,
    IN_PARTS: tl.constexpr, IN: tl.constexpr, WIDE_IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of rows of the joint matrix, all of one layer."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    row, column = place(rows, WIDE_OUT, OUT), place(columns, WIDE_IN, IN)  # in the layer's own
    there, kept = rows < PARTS * WIDE_OUT, columns < IN_PARTS * WIDE_IN
    real, filled = there & (rows % WIDE_OUT < OUT), kept & (columns % WIDE_IN < IN)
    x = tl.load(
        weight + row[:, None] * (IN_PARTS * IN) + column[None, :],
        mask=real[:, None] & filled[None, :],
        other=0.0,
    )
    if joint_bias is None:  # the weight of a column of ones
        x = tl.where((columns == IN)[None, :], tl.load(bias + row, mask=real, other=0.0)[:, None], x)
    at = LAYER * PARTS * WIDE_OUT + rows
    inside = there[:, None] & kept[None, :]
    tl.store(
        joint + at[:, None] * (IN_PARTS * WIDE_IN) + columns[None, :],
        x.to(joint.dtype.element_ty),
        mask=inside,
    )
    if joint_bias is not None:
        shift = tl.load(bias + row, mask=real, other=0.0)
        tl.store(joint_bias + at, shift.to(joint_bias.dtype.element_ty), mask=there)


@triton.jit
def part_layer(
    weight, bias, joint, joint_bias, LAYER: tl.constexpr, PARTS: tl.constexpr, OUT: tl.constexpr, WIDE_OUT: tl.constexpr,
    IN_PARTS: tl.constexpr, IN: tl.constexpr, WIDE_IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one layer's own, out of the joint matrix."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row = rows < PARTS * OUT
    inside = is_row[:, None] & (columns < IN_PARTS * IN)[None, :]
    at = LAYER * PARTS * WIDE_OUT + place(rows, OUT, WIDE_OUT)
    x = tl.load(
        joint + at[:, None] * (IN_PARTS * WIDE_IN) + place(columns, IN, WIDE_IN)[None, :],
        mask=inside,
        other=0.0,
    )
    tl.store(
        weight + rows[:, None] * (IN_PARTS * IN) + columns[None, :],
        x.to(weight.dtype.element_ty),
        mask=inside,
    )
    if joint_bias is None:
        shift = tl.load(joint + at * (IN_PARTS * WIDE_IN) + IN, mask=is_row, other=0.0)
    else:
        shift = tl.load(joint_bias + at, mask=is_row, other=0.0)
    tl.store(bias + rows, shift.to(bias.dtype.element_ty), mask=is_row)


@triton.jit
def one_layer(
    weight, bias, joint, joint_bias, LAYER: tl.constexpr, PARTS: tl.constexpr, OUT: tl.constexpr, WIDE_OUT: tl.constexpr,
    IN_PARTS: tl.constexpr, IN: tl.constexpr, WIDE_IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    JOIN: tl.constexpr,
):  # fmt: skip
    if JOIN:
        join_layer(
            weight, bias, joint, joint_bias, LAYER, PARTS, OUT, WIDE_OUT, IN_PARTS, IN, WIDE_IN, ROWS, COLUMNS
        )
    else:
        part_layer(
            weight, bias, joint, joint_bias, LAYER, PARTS, OUT, WIDE_OUT, IN_PARTS, IN, WIDE_IN, ROWS, COLUMNS
        )


@triton.jit
def layers_kernel(
    w0, w1, w2, w3, w4, b0, b1, b2, b3, b4, joint, joint_bias,
    PARTS: tl.constexpr, OUT: tl.constexpr, WIDE_OUT: tl.constexpr, IN_PARTS: tl.constexpr, IN: tl.constexpr,
    WIDE_IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """Layers into the joint matrix, or out of it."""
    layer = tl.program_id(1)
    if layer == 0:
        one_layer(
            w0, b0, joint, joint_bias, 0, PARTS, OUT, WIDE_OUT, IN_PARTS, IN, WIDE_IN, ROWS, COLUMNS, JOIN
        )
    elif layer == 1:
        one_layer(
            w1, b1, joint, joint_bias, 1, PARTS, OUT, WIDE_OUT, IN_PARTS, IN, WIDE_IN, ROWS, COLUMNS, JOIN
        )
    elif layer == 2:
        one_layer(
            w2, b2, joint, joint_bias, 2, PARTS, OUT, WIDE_OUT, IN_PARTS, IN, WIDE_IN, ROWS, COLUMNS, JOIN
        )
    elif layer == 3:
        one_layer(
            w3, b3, joint, joint_bias, 3, PARTS, OUT, WIDE_OUT, IN_PARTS, IN, WIDE_IN, ROWS, COLUMNS, JOIN
        )
    else:
        one_layer(
            w4, b4, joint, joint_bias, 4, PARTS, OUT, WIDE_OUT, IN_PARTS, IN, WIDE_IN, ROWS, COLUMNS, JOIN
        )


@triton.jit(do_not_specialize=["rows"])
def resize_kernel(
    x, out, rows, WIDTH: tl.constexpr, OUT: tl.constexpr, KEPT: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first KEPT columns of rows of WIDTH as rows of OUT, with a one (if asked for) and zeros behind them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_row = (row < rows)[:, None]
    y = tl.load(
        x + row[:, None] * WIDTH + columns[None, :], mask=is_row & (columns < KEPT)[None, :], other=0.0
    )
    y = y.to(out.dtype.element_ty)
    if ONE:
        y = tl.where((columns == KEPT)[None, :], 1.0, y).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * OUT + columns[None, :], y, mask=is_row & (columns < OUT)[None, :])


def resize(x: Tensor, width: int, dtype: torch.dtype, kept: int, one: bool) -> Tensor:
    """As `sfiformer.attention.widths.resized`."""
    rows, own = x.shape
    out = x.new_empty((rows, width), dtype=dtype)
    columns = triton.next_power_of_2(max(width, own))
    tile = max(1, 2048 // columns)
    if rows:
        resize_kernel[(triton.cdiv(rows, tile),)](
            x.contiguous(), out, rows, own, width, kept, one, tile, columns
        )
    return out


def join(
    weights: list[Tensor],
    biases: list[Tensor],
    parts: int,
    wide_out: int,
    in_parts: int,
    wide_in: int,
    dtype: torch.dtype,
    column: bool,
) -> tuple[Tensor, Tensor]:
    """As `sfiformer.attention.widths.joined`, for up to five layers of one shape."""
    rows = len(weights) * parts * wide_out
    joint = weights[0].new_empty((rows, in_parts * wide_in), dtype=dtype)
    bias = joint.new_empty(0 if column else rows)
    options = _sizes(weights[0], parts, wide_out, in_parts, wide_in)
    grid = (triton.cdiv(parts * wide_out, options["ROWS"]), len(weights))
    layers_kernel[grid](
        *_five(weights), *_five(biases), joint, None if column else bias, **options, JOIN=True
    )
    return joint, bias


def part(
    joint: Tensor,
    bias: Tensor | None,
    weights: list[Tensor],
    parts: int,
    wide_out: int,
    in_parts: int,
    wide_in: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of weights like these, and of their biases, from those of the joint ones (or, without bias, a column)."""
    of_weights = [torch.empty_like(weight) for weight in weights]
    of_biases = [weight.new_empty(weight.size(0)) for weight in weights]
    options = _sizes(weights[0], parts, wide_out, in_parts, wide_in)
    grid = (triton.cdiv(weights[0].size(0), options["ROWS"]), len(weights))
    layers_kernel[grid](*_five(of_weights), *_five(of_biases), joint, bias, **options, JOIN=False)
    return of_weights, of_biases


def _five(tensors: list[Tensor]) -> list[Tensor]:
    """A kernel must be given something for what it will not touch."""
    return [*tensors, *tensors[:1] * 4][:5]


def _sizes(weight: Tensor, parts: int, wide_out: int, in_parts: int, wide_in: int) -> dict[str, int]:
    columns = triton.next_power_of_2(in_parts * wide_in)
    return {
        "PARTS": parts,
        "OUT": weight.size(0) // parts,
        "WIDE_OUT": wide_out,
        "IN_PARTS": in_parts,
        "IN": weight.size(1) // in_parts,
        "WIDE_IN": wide_in,
        "ROWS": max(1, 2048 // columns),
        "COLUMNS": columns,
    }
