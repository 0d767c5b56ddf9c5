"""Sums of rows along edges: a sparse matrix times a dense one, or a sum over segments; and rows taken by their numbers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 512  # rows of a sum, one program each, that do not fill a GPU


@triton.jit
def row_sum_kernel(
    x, out, ptr, order, column, weight, loop, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EDGES: tl.constexpr
):  # fmt: skip
    """One row of the result and COLUMNS of its columns, EDGES terms at a time."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(ptr + row), tl.load(ptr + row + 1)
    total = tl.zeros([EDGES, COLUMNS], tl.float32)
    for first in range(start, end, EDGES):
        edge = first + tl.arange(0, EDGES)
        is_edge = edge < end
        if order is not None:
            edge = tl.load(order + edge, mask=is_edge, other=0)
        at = edge
        if column is not None:
            at = tl.load(column + edge, mask=is_edge, other=0)
        inside = is_edge[:, None] & (columns < WIDTH)[None, :]
        term = tl.load(x + at[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            term *= tl.load(weight + edge, mask=is_edge, other=0.0).to(tl.float32)[:, None]
        total += term
    result = tl.sum(total, 0)
    place = row * WIDTH + columns
    if loop is not None:
        own = tl.load(x + place, mask=columns < WIDTH, other=0.0).to(tl.float32)
        result += tl.load(loop + row).to(tl.float32) * own
    tl.store(out + place, result.to(out.dtype.element_ty), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["rows"])
def take_rows_kernel(
    x, out, index, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """ROWS rows of the result."""
    row, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = tl.load(index + row, mask=row < rows, other=0)
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    y = tl.load(x + at[:, None] * WIDTH + columns[None, :], mask=inside)
    tl.store(out + row[:, None] * WIDTH + columns[None, :], y, mask=inside)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], [M, width] → [K, width], whole rows at a time."""
    width = x.size(1)
    out = x.new_empty((len(index), width))
    columns = triton.next_power_of_2(max(1, width))
    tile = max(1, 2048 // columns)
    if out.numel():
        take_rows_kernel[(triton.cdiv(len(index), tile),)](
            x.contiguous(), out, index.contiguous(), len(index), width, columns, tile
        )
    return out


def row_sum(
    x: Tensor,
    ptr: Tensor,
    order: Tensor | None = None,
    column: Tensor | None = None,
    weight: Tensor | None = None,
    loop: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`sfiformer.attention.edges.row_sum` by kernel."""
    x = x.contiguous()
    rows, width = len(ptr) - 1, x.size(1)
    out = x.new_empty((rows, width), dtype=dtype or torch.float32)
    if out.numel() == 0:
        return out
    terms = len(x) if column is None else len(column)
    if rows > FEW and terms <= 64 * rows:
        columns = min(triton.next_power_of_2(width), 1024)
        edges, warps = tile_edges(terms, rows, columns), tile_warps(columns)
    else:
        # Few rows, or long ones, are cut into narrow columns: more programs, and more terms at a time in each. Of few rows the
        # mean says little: the graphs of a padded batch are some long ones and many of hardly a node.
        columns = min(triton.next_power_of_2(width), 16)
        edges = max(1, min(triton.next_power_of_2(-(-2 * terms // rows)), 512))
        warps = max(1, edges * columns // 512)
    row_sum_kernel[(rows, triton.cdiv(width, columns))](
        x, out, ptr, order, column, weight, loop, width, columns, edges, num_warps=warps
    )
    return out


def tile_edges(terms: int, rows: int, columns: int) -> int:
    """Terms at a time: about as many as a row has, or as make a tile of 256 numbers, eight for each thread of a warp."""
    return max(1, min(triton.next_power_of_2(-(-terms // rows)), 256 // columns))


def tile_warps(columns: int) -> int:
    """Warps for so many columns, 256 each: no two of them share a column, so that none waits for a sum with another."""
    return max(1, min(8, columns // 256))
