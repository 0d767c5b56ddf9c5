"""Which tiles the kernels of attention work in, by the sizes of graphs and heads and by their type. Measured on an H200."""

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


BUCKETS = (
    Bucket(64, 64, 4),
    Bucket(128, 32, 4),
    Bucket(256, 32, 8),
    Bucket(512, 16, 8),
    Bucket(1024, 16, 16),
)


def buckets_in_use(graphs: int, nodes: int, largest: int) -> Iterator[tuple[Bucket, int, int]]:
    """Those for graphs of up to ``largest`` nodes, the slowest first, each with the size that it starts above and the number
    of its tiles (see `tiles.locate`)."""
    below = (0, *(bucket.keys for bucket in BUCKETS))
    for bucket, more_than in reversed(list(zip(BUCKETS, below, strict=False))):
        if nodes and more_than < largest:
            yield bucket, more_than, nodes // bucket.rows + graphs


def on_chip_options(
    bucket: Bucket, below: int, q: Tensor, dense: bool, potential: bool, dropout_p: float
) -> dict[str, Any]:
    """Compile-time settings of the kernels with rows on chip."""
    half = q.element_size() == 2
    return {
        "ROWS": bucket.rows,
        "KEYS": bucket.keys,
        "MORE_THAN": below,
        "WIDTH": _chunk(q.shape[2]) if half else 16,
        "POTENTIAL": potential,
        "DENSE": dense,
        "DROPOUT": dropout_p > 0,
        "PRECISION": _precision(q, long=bucket.keys > 128),
        "LOG_GENTLE": log_gentle(q),
        "num_warps": bucket.warps,
        "num_stages": 2 if half else 1,
        # The backward must find the forward's scores again, to the bit: no product may melt into a later subtraction.
        "enable_fp_fusion": False,
    }


def _chunk(width: int) -> int:
    """Columns of a head at a time: many where heads are wide, and few where more would be padding."""
    if width >= 128:
        return 64
    return 32 if width % 32 == 0 else 16


def log_gentle(q: Tensor) -> float:
    """Up to which log η p_max rows on chip need no pivot. What is lost grows with η, and half precision loses more itself."""
    return math.log(1024) if q.element_size() == 2 else STRICT


def _precision(q: Tensor, *, long: bool = False) -> str:
    """Of products. Where TF32 is not allowed, three TF32 products make one of float32's accuracy.

    In long rows on chip those three spill the registers; there, plain multiplications are faster.
    """
    if q.element_size() == 2:
        return "ieee"
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "ieee" if long else "tf32x3"


STRICT = 3.5  # log κ f_k of streamed rows up to which the backward needs no pivot
# The error of a streamed row's flows, at worst: well below the rounding of its output.
DOUBT = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}


class Stream(NamedTuple):
    """Tiles of ``rows`` nodes that stay while blocks of ``keys`` stream past."""

    rows: int
    keys: int
    warps: int
    stages: int


def stream_options(tile: Stream, q: Tensor, v: Tensor, potential: bool, dropout_p: float) -> dict[str, Any]:
    """Compile-time settings of the streaming kernels: a tile holds whole heads, padded to a power of two on chip."""
    return {
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "WIDTH": _padded(q.shape[2]),
        "VALUE_WIDTH": _padded(v.shape[2]),
        "POTENTIAL": potential,
        "DROPOUT": dropout_p > 0,
        "PRECISION": _precision(q),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def stream_tiles(q: Tensor, v: Tensor, streamed: bool) -> tuple[Stream, Stream, Stream, Stream]:
    """Tiles of the forward, of the backward's queries and of its keys, and of rows measured from a pivot.

    The keys' are for graphs of all sizes: ``streamed`` says whether there are large ones.
    """
    width, half = _padded(max(q.shape[2], v.shape[2])), q.element_size() == 2
    steep = Stream(32, 32, 4, 1)
    if half and width <= 64:
        keys = Stream(64, 32, 4, 2) if streamed else Stream(32, 32, 4, 1)
        keys = Stream(64, 64, 4, 1) if width <= 32 else keys
        return Stream(128, 64, 8, 3), Stream(128, 64, 8, 3), keys, steep
    if half and width <= 128:
        return Stream(64, 32, 8, 2), Stream(64, 32, 8, 2), Stream(32, 64, 4, 1), steep
    if half:
        return Stream(64, 32, 8, 2), Stream(32, 64, 8, 2), Stream(32, 64, 8, 2), steep
    if width <= 64:
        return Stream(64, 32, 8, 2), Stream(64, 32, 8, 1), Stream(64, 32, 8, 1), steep
    return Stream(32, 32, 8, 1), Stream(32, 32, 8, 1), Stream(32, 32, 8, 1), steep._replace(rows=16, warps=8)
