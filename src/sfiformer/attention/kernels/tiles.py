"""Device functions on tiles: products over the width of the heads, and dropout.

Widths are cut into chunks of WIDTH columns, masked at the end: no width need be a power of two, and none is padded in memory.
"""

import triton
import triton.language as tl


@triton.jit
def load_chunk(base, nodes, is_node, stride, first, width, WIDTH: tl.constexpr):
    """Columns first … first + WIDTH of the given nodes, zeros outside: [nodes, WIDTH]."""
    columns = first + tl.arange(0, WIDTH)
    inside = is_node[:, None] & (columns < width)[None, :]
    return tl.load(base + nodes[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_chunk(base, nodes, is_node, stride, first, width, block, WIDTH: tl.constexpr):
    columns = first + tl.arange(0, WIDTH)
    inside = is_node[:, None] & (columns < width)[None, :]
    tl.store(base + nodes[:, None] * stride + columns[None, :], block, mask=inside)


@triton.jit
def products(
    left, right, rows, is_row, columns, is_column, stride, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x_i · y_j for nodes i of ``left`` and j of ``right``: [rows, columns] float32."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, WIDTH):
        x = load_chunk(left, rows, is_row, stride, first, width, WIDTH)
        y = load_chunk(right, columns, is_column, stride, first, width, WIDTH)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION)
    return total


@triton.jit
def combine(
    matrix, base, nodes, is_node, out, rows, is_row, stride, width, factor,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_i = factor · Σ_j matrix_ij x_j, a chunk of columns at a time."""
    matrix = matrix.to(base.dtype.element_ty)
    for first in range(0, width, WIDTH):
        x = load_chunk(base, nodes, is_node, stride, first, width, WIDTH)
        block = tl.dot(matrix, x, input_precision=PRECISION) * factor
        store_chunk(out, rows, is_row, stride, first, width, block.to(out.dtype.element_ty), WIDTH)


@triton.jit
def kept(seed, rows, columns, heads, head, dropout_p):
    """Dropout's factors for rows × columns of one head: 0, or 1/(1 − p). Counter-based: the same wherever it is asked."""
    zero = tl.zeros([1, 1], tl.int32)
    row = (rows * heads + head).to(tl.int32)[:, None]
    column = columns.to(tl.int32)[None, :]
    bits, _, _, _ = tl.philox(seed, row + zero * column, column + zero * row, zero + row * 0 + column * 0, zero + row * 0 + column * 0)
    return tl.where(tl.random.uint_to_uniform_float(bits) >= dropout_p, 1 / (1 - dropout_p), 0.0)
