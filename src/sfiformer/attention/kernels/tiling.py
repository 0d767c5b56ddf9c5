"""Which tiles the kernels of attention work in, by the sizes of graphs and heads and by their type.

Chosen by trials on an H200; `benchmarks/attention.py` measures the whole, kernel by kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Bucket(NamedTuple):
    """Graphs of up to ``keys`` nodes, in tiles of ``rows`` queries."""

    keys: int
    rows: int
    warps: int


def buckets(q: Tensor) -> tuple[Bucket, ...]:
    """Those for heads like q's, by the size of graphs. Warps that share rows wait for one another at every sum over them, so a
    small tile has few."""
    wide, half = _is_wide(q), q.element_size() == 2
    middle = Bucket(128, 64, 8) if wide and half else Bucket(128, 16, 2)
    long = Bucket(512, 16, 8 if wide or not half else 4)
    return Bucket(64, 64, 4), middle, Bucket(256, 16, 4), long, Bucket(1024, 16, 16)


def steep(bucket: Bucket) -> Bucket:
    """The same for rows that are not gentle. They are few as a rule, and a tile with one of them is made as a whole."""
    return Bucket(bucket.keys, 16, min(bucket.keys // 32, 16))


def _is_wide(q: Tensor) -> bool:
    return q.shape[2] >= 128


def in_use(q: Tensor, largest: int) -> Iterator[tuple[Bucket, int]]:
    """The buckets for graphs of up to ``largest`` nodes, the slowest first, each with the size that it starts above."""
    among = buckets(q)
    below = (0, *(bucket.keys for bucket in among))
    for bucket, more_than in reversed(list(zip(among, below, strict=False))):
        if len(q) and more_than < largest:
            yield bucket, more_than


def on_chip_options(
    bucket: Bucket, below: int, q: Tensor, v: Tensor, potential: bool, dropout_p: float
) -> dict[str, Any]:
    """Compile-time settings of the kernels with rows on chip."""
    half, wide = q.element_size() == 2, _is_wide(q)
    # Columns of a head at a time; and how many such pieces are on their way, where there is room for them.
    columns, stages = (64 if wide else 32), 2
    if not half:
        roomy = bucket.keys in (256, 512) or (wide and bucket.keys < 256)
        columns, stages = (32 if roomy else 16), 1
    return {
        "ROWS": bucket.rows,
        "KEYS": bucket.keys,
        "MORE_THAN": below,
        "WIDTH": columns,
        "UNIT": unit(q),
        "VALUE_UNIT": unit(v),
        "POTENTIAL": potential,
        "DROPOUT": dropout_p > 0,
        "PRECISION": _precision(q, long=bucket.keys > 512),
        "num_warps": bucket.warps,
        "num_stages": stages,
        # The backward should find the forward's scores again: no product may melt into a later subtraction.
        "enable_fp_fusion": False,
    }


def registers(q: Tensor, warps: int, scores: int | None = None) -> dict[str, int]:
    """The most that a thread may have, where the compiler is to be told.

    In half precision that is half of all for gentle rows on chip of up to 32 ``scores`` a thread: twice as many programs run at
    a time. In float32 it is told that it may have all: where they do not suffice it would sometimes make do with an eighth.
    """
    if not q.is_cuda:
        return {}
    if q.element_size() == 2:
        return {"maxnreg": 128} if scores is not None and scores <= 32 * 32 * warps else {}
    return {"maxnreg": min(255, 2048 // warps)}


def unit(x: Tensor) -> int:
    """Columns by which the rows of a head are aligned (see `tiles.RUNTIME`)."""
    return math.gcd(x.shape[2], 8)


def log_gentle(q: Tensor) -> float:
    """Up to which log η p_max rows on chip need no pivot: they err by some 3e-8 η, less than half precision rounds flows."""
    return {torch.float16: math.log(1024), torch.bfloat16: math.log(16384)}.get(q.dtype, STRICT)


def _precision(q: Tensor, *, long: bool = False) -> str:
    """Of products. Where TF32 is not allowed, three TF32 products make one of float32's accuracy.

    In long rows on chip those three spill the registers; there, plain multiplications are faster.
    """
    if q.element_size() == 2:
        return "ieee"
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "ieee" if long else "tf32x3"


STRICT = 3.5  # log κ f_k up to which the backward needs no pivot, of streamed rows and in float32
# The error of a streamed row's flows, at worst: well below the rounding of its output.
DOUBT = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}


class Stream(NamedTuple):
    """Tiles of ``rows`` nodes that stay while blocks of ``keys`` stream past."""

    rows: int
    keys: int
    warps: int
    stages: int


def stream_options(tile: Stream, q: Tensor, v: Tensor, potential: bool, dropout_p: float) -> dict[str, Any]:
    """Compile-time settings of the streaming kernels: a tile holds whole heads, padded on chip."""
    return {
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "WIDTH": _padded(q.shape[2]),
        "VALUE_WIDTH": _padded(v.shape[2]),
        "UNIT": unit(q),
        "VALUE_UNIT": unit(v),
        "POTENTIAL": potential,
        "DROPOUT": dropout_p > 0,
        "PRECISION": _precision(q),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **registers(q, tile.warps),
    }


def _padded(width: int) -> int:
    """A power of two, or the sum of two where that is less: see `tiles.load_head`."""

    def power(columns: int) -> int:
        return max(16, 1 << (columns - 1).bit_length())

    whole = power(width)
    return min(whole, whole // 2 + power(width - whole // 2)) if width > 16 else whole


def stream_tiles(q: Tensor, v: Tensor, streamed: bool) -> tuple[Stream, Stream, Stream, Stream]:
    """Tiles of the forward, of the backward's queries and of its keys, and of rows measured from a pivot.

    The keys' are for graphs of all sizes: ``streamed`` says whether there are large ones.
    """
    width, half = _padded(max(q.shape[2], v.shape[2])), q.element_size() == 2
    steep = Stream(32, 32, 4, 1)
    if half and width <= 64:
        keys = Stream(64, 32, 4, 2) if streamed else Stream(16, 32, 1, 2)
        keys = Stream(64, 64, 4, 1) if width <= 32 else keys
        return Stream(128, 64, 8, 3), Stream(128, 64, 8, 3), keys, steep
    if half and width <= 128:
        return Stream(64, 32, 4, 2), Stream(64, 32, 4, 2), Stream(64, 32, 4, 1), steep
    if half:
        return Stream(32, 32, 4, 2), Stream(32, 32, 4, 2), Stream(32, 64, 8, 2), steep
    if width <= 64:
        return Stream(32, 32, 4, 1), Stream(32, 32, 4, 1), Stream(16, 32, 2, 1), steep
    steep = steep._replace(rows=16, warps=8)
    if width <= 128:
        return Stream(16, 64, 4, 1), Stream(16, 64, 4, 1), Stream(16, 32, 4, 1), steep
    return Stream(16, 32, 8, 1), Stream(16, 64, 8, 1), Stream(16, 32, 8, 1), steep


def query_tile(q: Tensor, v: Tensor) -> Stream:
    """Tiles of the backward's queries in graphs whose rows the forward had on chip."""
    width = _padded(max(q.shape[2], v.shape[2]))
    if q.element_size() == 2:
        if width <= 64:
            return Stream(64, 32, 4, 2) if width <= 32 else Stream(32, 16, 2, 2)
        return Stream(64 if width <= 128 else 32, 32, 4, 2)
    if width <= 64:
        return Stream(16, 32, 2, 1) if width <= 32 else Stream(16, 16, 1, 1)
    return Stream(32 if width <= 128 else 16, 64, 8, 1)


def chunk(q: Tensor, v: Tensor) -> int:
    """Columns of a head that the backward's queries take at a time: all, but of wide heads in float32."""
    return 64 if q.element_size() > 2 and max(q.shape[2], v.shape[2]) > 128 else 256
