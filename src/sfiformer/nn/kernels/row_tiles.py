"""Tiles of rows of any width d, for kernels that take them channel by channel: which rows are real, dropout, activations.

A program owns COLS channels. Rows go in tiles of 8 · SUB: dropout takes 16 bits of one draw of Philox for each of the eight
parts of a tile, so that a draw serves eight entries. Sums over rows are made in at most PARTS pieces, cut by the number of
real rows alone, and put together in one order: padding and repetition change no bit of them.
"""

import triton
import triton.language as tl
from torch import Tensor

PIECES = 512  # of a sum that `sum_pieces` puts together, at most
ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass the statistical batteries (Salmon et al., 2011)


def drop_numbers(dropout: float) -> tuple[int, float]:
    """The probability of dropout in 2⁻¹⁶, and the factor of what is kept: what `kept` takes."""
    below = round(dropout * 65536)
    return below, 65536 / (65536 - below) if below < 65536 else 0.0


@triton.jit
def real_rows(rows, size, MASKED: tl.constexpr):
    """The number of real rows: ``rows`` on the device, or all."""
    count = size
    if MASKED:
        count = tl.minimum(tl.maximum(tl.load(rows), 0), size).to(tl.int32)
    return count


@triton.jit
def piece_rows(count, PARTS: tl.constexpr, SUB: tl.constexpr):
    """Rows of each piece of a sum over ``count`` rows: whole tiles."""
    return tl.cdiv(count, PARTS * 8 * SUB) * 8 * SUB


@triton.jit
def piece_counts(count, PARTS: tl.constexpr, SUB: tl.constexpr):
    """[PARTS], rows in each piece."""
    each = piece_rows(count, PARTS, SUB)
    return tl.minimum(tl.maximum(count - tl.arange(0, PARTS) * each, 0), each)


@triton.jit
def draw(seed, start, columns, SUB: tl.constexpr):
    """Four random words for each SUB × COLS place of the tile from row ``start`` on."""
    places = start // 8 + tl.arange(0, SUB)  # distinct, as tiles are 8 · SUB rows
    zero = (places[:, None] + columns[None, :]).to(tl.uint32) * 0
    return tl.philox(
        tl.load(seed),
        zero + places[:, None].to(tl.uint32),
        zero + columns[None, :].to(tl.uint32),
        zero,
        zero,
        ROUNDS,
    )


@triton.jit
def kept(words, below, factor, J: tl.constexpr):
    """Dropout's factors for part J of a tile: 0 with probability below / 2¹⁶, or ``factor``."""
    bits = (words[J // 2] >> (16 * (J % 2))) & 0xFFFF
    return tl.where(bits.to(tl.int32) >= below, factor, 0.0)


@triton.jit
def load_part(base, start, end, columns, J: tl.constexpr, SUB: tl.constexpr, WIDTH: tl.constexpr):
    """Part J of the tile from row ``start`` on, [SUB, COLS]; 0 from row ``end`` on."""
    local = J * SUB + tl.arange(0, SUB)
    mask = (start + local < end)[:, None] & (columns < WIDTH)[None, :]
    at = (tl.full((), 0, tl.int64) + start) * WIDTH
    return tl.load(base + at + (local[:, None] * WIDTH + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def load_tile(base, start, end, columns, SUB: tl.constexpr, WIDTH: tl.constexpr):
    """All eight parts of a tile: all on their way at a time, as loads are not once something is written between them."""
    return (
        load_part(base, start, end, columns, 0, SUB, WIDTH),
        load_part(base, start, end, columns, 1, SUB, WIDTH),
        load_part(base, start, end, columns, 2, SUB, WIDTH),
        load_part(base, start, end, columns, 3, SUB, WIDTH),
        load_part(base, start, end, columns, 4, SUB, WIDTH),
        load_part(base, start, end, columns, 5, SUB, WIDTH),
        load_part(base, start, end, columns, 6, SUB, WIDTH),
        load_part(base, start, end, columns, 7, SUB, WIDTH),
    )


@triton.jit
def merged(counts, mean, square):
    """Mean and Σ (x − mean)² of all, from those of parts [K, COLS] of ``counts`` [K] rows."""
    weight = counts.to(tl.float32)[:, None]
    total = tl.sum(weight * mean, 0) / tl.maximum(tl.sum(weight, 0), 1.0)
    spread = mean - total[None, :]
    return total, tl.sum(square + weight * spread * spread, 0)


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)  # else a GPU makes 0 of NaN
    if ACTIVATION == "gelu":
        z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """The activation's derivative."""
    out = z * 0 + 1
    if ACTIVATION == "relu":
        out = tl.where(z > 0, 1.0, 0.0)
    if ACTIVATION == "gelu":
        normal = tl.exp(-0.5 * z * z) * 0.3989422804014327
        out = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * normal
    return out


@triton.jit(do_not_specialize=["pieces"])
def pieces_kernel(sums, total, pieces, width, PIECES: tl.constexpr, COLS: tl.constexpr):
    """[pieces, width] → [width], some columns."""
    piece, columns = tl.arange(0, PIECES), tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (piece < pieces)[:, None] & (columns < width)[None, :]
    values = tl.load(sums + piece[:, None] * width + columns[None, :], mask=inside, other=0.0)
    tl.store(total + columns, tl.sum(values, 0), mask=columns < width)


def sum_pieces(sums: Tensor) -> Tensor:
    """[at most PIECES, width] → [width], in an order that depends on nothing else."""
    pieces, width = sums.shape
    total = sums.new_empty(width)
    pieces_kernel[(triton.cdiv(width, 16),)](sums, total, pieces, width, PIECES, 16, num_warps=8)
    return total
