"""Device functions on tiles: products over the width of the heads, and dropout.

Nodes are numbered within their graph, in 32 bits: 64-bit addresses would fill the registers. No width need be a power of two:
heads are cut into chunks of WIDTH columns, masked at the end (`products`, `combine`), or whole, of WIDTH columns with their
padding, in one or two parts (`load_head` and what follows it). (Widths that are no multiple of 8 are padded by
`sfiformer.attention.fused`, for the alignment of their rows.)
"""

import triton
import triton.language as tl

# Arguments of the kernels that change from batch to batch, and widths: head widths come in units of UNIT columns, a power of
# two up to 8, by which rows are known to be aligned, and load in the widest pieces. (Were the width itself known, the loops
# over its chunks would vanish where there is but one, and the registers overflow.)
RUNTIME = ["graphs", "stat_stride", "units", "value_units", "more_than"]


@triton.jit
def locate(ptr, graphs, tile, ROWS: tl.constexpr):
    """First node and size of the graph that a tile belongs to, and the tile's first row in it (beyond the size: no tile).

    Graph g owns the tiles from ptr[g] // ROWS + g on: enough for it, whatever the sizes, so that nobody need count them. All of
    ptr is compared at once: a search would wait for one load after the other.
    """
    graph, start, end = -1, tl.zeros([], ptr.dtype.element_ty), tl.full([], 1 << 62, ptr.dtype.element_ty)
    for first in range(0, graphs + 1, 256):
        index = first + tl.arange(0, 256)
        begins = tl.load(ptr + index, mask=index <= graphs, other=1 << 62)
        owned = begins // ROWS + index <= tile
        graph += tl.sum(owned.to(tl.int32), 0)
        start = tl.maximum(start, tl.max(tl.where(owned, begins, 0), 0))
        end = tl.minimum(end, tl.min(tl.where(owned, 1 << 62, begins), 0))
    return start, (end - start).to(tl.int32), graph, ((tile - start // ROWS - graph) * ROWS).to(tl.int32)


@triton.jit
def load_chunk(base, nodes, n, stride, first, width, WIDTH: tl.constexpr):
    """Columns first … first + WIDTH of the given nodes of a graph of n, zeros outside: [nodes, WIDTH]."""
    columns = first + tl.arange(0, WIDTH)
    inside = (nodes < n)[:, None] & (columns < width)[None, :]
    return tl.load(base + (nodes[:, None] * stride + columns[None, :]), mask=inside, other=0.0)


@triton.jit
def saturated(x, kind: tl.constexpr):
    """``x`` in that type, within its range: an infinity would make sums of products NaN. What is NaN stays so."""
    if kind == tl.float16:
        x = tl.maximum(x, -65504.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(kind)


@triton.jit
def load_head(base, nodes, n, stride, width, WIDTH: tl.constexpr):
    """Whole heads of the given nodes, [nodes, WIDTH], in parts.

    A tile is a power of two wide, so a WIDTH that is the sum of two such comes in two parts: 68 columns are 64 and 16, not 128.
    """
    FIRST: tl.constexpr = WIDTH & (WIDTH - 1)  # the larger of two powers
    if FIRST:
        return (
            load_chunk(base, nodes, n, stride, 0, width, FIRST),
            load_chunk(base, nodes, n, stride, FIRST, width, WIDTH - FIRST),
        )
    else:
        return (load_chunk(base, nodes, n, stride, 0, width, WIDTH),)


@triton.jit
def no_head(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Zeros in the parts of `load_head`."""
    FIRST: tl.constexpr = WIDTH & (WIDTH - 1)
    if FIRST:
        return tl.zeros([ROWS, FIRST], tl.float32), tl.zeros([ROWS, WIDTH - FIRST], tl.float32)
    else:
        return (tl.zeros([ROWS, WIDTH], tl.float32),)


@triton.jit
def head_products(x, y, PRECISION: tl.constexpr):
    """x_i · y_j of heads in parts: [rows of x, rows of y] float32."""
    total = tl.dot(x[0], tl.trans(y[0]), input_precision=PRECISION)
    if len(x) > 1:
        total = tl.dot(x[1], tl.trans(y[1]), total, input_precision=PRECISION)
    return total


@triton.jit
def add_to_head(total, matrix, y, PRECISION: tl.constexpr):
    """total_i + Σ_j matrix_ij y_j of heads in parts.

    The wide part comes last: the compiler divides all products of a loop among the warps as it does the last one.
    """
    matrix = saturated(matrix, y[0].dtype)
    if len(y) > 1:
        rest = tl.dot(matrix, y[1], total[1], input_precision=PRECISION)
        return tl.dot(matrix, y[0], total[0], input_precision=PRECISION), rest
    else:
        return (tl.dot(matrix, y[0], total[0], input_precision=PRECISION),)


@triton.jit
def row_products(x, y):
    """x_i · y_i of heads in parts, and the sum of its terms' sizes: [rows] float32."""
    terms = x[0].to(tl.float32) * y[0].to(tl.float32)
    total, size = tl.sum(terms, 1), tl.sum(tl.abs(terms), 1)
    if len(x) > 1:
        terms = x[1].to(tl.float32) * y[1].to(tl.float32)
        total, size = total + tl.sum(terms, 1), size + tl.sum(tl.abs(terms), 1)
    return total, size


@triton.jit
def places(rows, is_row, stride, width, PART: tl.constexpr, WIDTH: tl.constexpr):
    """Where the columns of one part of a head of ``width`` are, and which are inside."""
    FIRST: tl.constexpr = WIDTH & (WIDTH - 1)
    columns = tl.arange(0, FIRST if FIRST else WIDTH) if PART == 0 else FIRST + tl.arange(0, WIDTH - FIRST)
    return rows[:, None] * stride + columns[None, :], is_row[:, None] & (columns < width)[None, :]


@triton.jit
def store_head(out, rows, x, factor, is_row, stride, width, WIDTH: tl.constexpr):
    """Write factor · x, heads in parts."""
    for part in tl.static_range(len(x)):
        place, inside = places(rows, is_row, stride, width, part, WIDTH)
        tl.store(out + place, saturated(x[part] * factor, out.dtype.element_ty), mask=inside)


@triton.jit
def products(
    left, right, rows, columns, n, stride, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x_i · y_j for nodes i of ``left`` and j of ``right``: [rows, columns] float32."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, WIDTH):
        x = load_chunk(left, rows, n, stride, first, width, WIDTH)
        y = load_chunk(right, columns, n, stride, first, width, WIDTH)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION)
    return total


@triton.jit
def block_of_products(
    x, left, right, rows, keys, n, stride, width,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`products` of a tile, whose rows x of whole heads are at hand, with a block: CHUNK columns at a time, or all at once.

    In float32, whose products are made of three, wide heads would fill the registers.
    """
    if CHUNK < WIDTH:
        total = products(left, right, rows, keys, n, stride, width, ROWS, KEYS, CHUNK, PRECISION)
    else:
        total = head_products(x, load_head(right, keys, n, stride, width, WIDTH), PRECISION)
    return total


@triton.jit
def combine(
    matrix, base, nodes, out, rows, n, stride, width, factor, WIDTH: tl.constexpr, PRECISION: tl.constexpr
):
    """out_i = factor · Σ_j matrix_ij x_j, a chunk of columns at a time."""
    matrix = saturated(matrix, base.dtype.element_ty)
    for first in range(0, width, WIDTH):
        x = load_chunk(base, nodes, n, stride, first, width, WIDTH)
        block = tl.dot(matrix, x, input_precision=PRECISION) * factor
        columns = first + tl.arange(0, WIDTH)
        inside = (rows < n)[:, None] & (columns < width)[None, :]
        tl.store(
            out + (rows[:, None] * stride + columns[None, :]),
            saturated(block, out.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def mix(x):
    """32 bits of which each depends on all of x: two rounds of multiply and shift."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(seed, rows, columns, dropout_p):
    """Dropout's factors where rows and columns, given in shapes that broadcast, meet: 0, or 1/(1 − p).

    Counter-based: the same wherever it is asked. Row and column are hashed under the seed's two halves, made odd, and
    multiplied; the upper bits decide. A generator of the Philox kind would cost several times as much as the flows themselves.
    """
    row = mix(rows.to(tl.uint32) ^ (seed & 0xFFFFFFFF).to(tl.uint32)) | 1
    column = mix(columns.to(tl.uint32) ^ (seed >> 32).to(tl.uint32) ^ 0x9E3779B9) | 1
    limit = (tl.full((), 4294967296.0, tl.float32) * dropout_p).to(tl.uint32)
    return tl.where(row * column >= limit, 1 / (1 - dropout_p), 0.0)
