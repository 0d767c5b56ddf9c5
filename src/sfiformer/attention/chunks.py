"""Graphs of one size side by side: how packed graphs become dense blocks without padding."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Numbers in one block of scores (heads × queries × keys); about ten such blocks are alive at a time, in each thread.
CHUNK_SIZE = 1 << 19


@dataclass(frozen=True)
class Chunk:
    """Some graphs of equal size, and which of their rows (queries) to treat."""

    graphs: list[int]  # their places in the batch, b of them
    starts: list[int]  # the first node of each
    size: int  # nodes of each, n
    rows: slice  # queries 0 ≤ rows < n; all of them unless there is one large graph
    first: int  # nodes in the chunks before, each counted once


class Order(NamedTuple):
    """Where the heads of the nodes of some chunks stand when graphs go by size: by chunk, then by graph, head and node.

    So every chunk is one block of memory, and all of them are gathered at once.
    """

    places: Tensor  # [M · heads] of the rows of [N, heads, width]
    first: int  # nodes in the chunks before
    heads: int

    @classmethod
    def of(cls, some: Sequence[Chunk], heads: int, device: torch.device) -> Order:
        """Of chunks that follow one another."""
        first = some[0].first if some else 0
        parts, reached = [torch.empty(0, dtype=torch.int64, device="cpu")], first
        for chunk in some:
            if chunk.first < reached:  # more rows of a graph that is there already
                continue
            reached += len(chunk.graphs) * chunk.size
            starts, within, head = (
                torch.tensor(x, device="cpu") for x in (chunk.starts, range(chunk.size), range(heads))
            )
            nodes = starts[:, None, None] + within  # [b, 1, n]
            parts.append((nodes * heads + head[:, None]).flatten())
        return cls(torch.cat(parts).to(device), first, heads)

    def gather(self, packed: Tensor) -> Tensor:
        """[N, heads, width] → [M · heads, width], a copy."""
        nodes, heads, width = packed.shape
        places, apart = self.places, _apart(packed)
        if apart > heads:  # as it lies, or else all of it would be copied
            packed = packed.as_strided((nodes * apart - apart + heads, width), (width, 1))
            places = places + places // heads * (apart - heads)
        return packed.reshape(-1, width).index_select(0, places)

    def put(self, packed: Tensor, ordered: Tensor) -> None:
        """Write [M · heads, width] to its places in [N, heads, width]."""
        packed.view(-1, packed.shape[-1]).index_copy_(0, self.places, ordered.to(packed.dtype))

    def block(self, chunk: Chunk, ordered: Tensor) -> Tensor:
        """The nodes of the chunk's graphs, [b · heads, n, width], as a view of what `gather` returns."""
        start, count = (chunk.first - self.first) * self.heads, len(chunk.graphs) * self.heads
        return ordered[start : start + count * chunk.size].view(count, chunk.size, ordered.shape[-1])


def chunks(
    ptr: Tensor,
    heads: int,
    chunk_size: int | None = None,
    most_nodes: int | None = None,
    without: Container[int] = (),
) -> Iterator[Chunk]:
    """All graphs, by size, in chunks of at most ``chunk_size`` scores; a graph that is larger comes in blocks of rows.

    Several graphs in one chunk have no more than ``most_nodes``. None has one of ``without``.
    """
    chunk_size = CHUNK_SIZE if chunk_size is None else chunk_size
    offsets = ptr.tolist()
    by_size: dict[int, list[int]] = {}
    for graph, (start, end) in enumerate(pairwise(offsets)):
        if end > start and graph not in without:
            by_size.setdefault(end - start, []).append(graph)
    before = 0
    for size, graphs in by_size.items():
        together = chunk_size // (heads * size * size)
        together = max(1, together if most_nodes is None else min(together, most_nodes // size))
        height = min(size, max(1, chunk_size // (heads * size)))
        for first in range(0, len(graphs), together):
            some = graphs[first : first + together]
            for row in range(0, size, height):
                rows = slice(row, min(row + height, size))
                yield Chunk(some, [offsets[g] for g in some], size, rows, before)
            before += len(some) * size


def laid_out(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors [N, heads, width] as `Order.gather` takes them time and again without a copy of the whole."""
    return tuple(x if _apart(x) or _is_rows(x) else x.contiguous() for x in tensors)


def _apart(packed: Tensor) -> int:
    """How many rows one node lies from the next, where the tensor is one of several parts side by side; else 0."""
    nodes, heads, width = packed.shape
    apart = packed.stride(0) // max(width, 1)
    return apart if nodes and apart > heads and packed.stride() == (apart * width, width, 1) else 0


def _is_rows(packed: Tensor) -> bool:
    """Whether [N, heads, width] is [N · heads, width] as it lies."""
    of_nodes, of_heads, _ = packed.stride()
    return of_nodes == packed.shape[1] * of_heads or 1 in packed.shape[:2]


def fresh(shape: Sequence[int], dtype: torch.dtype, ptr: Tensor, like: Tensor) -> Tensor:
    """A tensor for what is found of all nodes; those that are of no graph, if there are any, have zeros."""
    make = like.new_empty if int(ptr[0]) == 0 and int(ptr[-1]) == len(like) else like.new_zeros
    return make(tuple(shape), dtype=dtype)
