"""Graphs of one size side by side: how packed graphs become dense blocks without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Numbers in one block of scores (heads × queries × keys); about ten such blocks are alive at a time.
CHUNK_SIZE = 1 << 19


@dataclass(frozen=True)
class Chunk:
    """Some graphs of equal size, and which of their rows (queries) to treat."""

    graphs: list[int]  # their places in the batch, b of them
    starts: list[int]  # the first node of each
    size: int  # nodes of each, n
    rows: slice  # queries 0 ≤ rows < n; all of them unless there is one large graph
    first: int  # nodes in the chunks before, each counted once

    def block(self, ordered: Tensor, heads: int) -> Tensor:
        """The nodes of the chunk's graphs, [b · heads, n, width], as a view of what `Order.gather` returns."""
        first, count = self.first * heads, len(self.graphs) * heads
        return ordered[first : first + count * self.size].view(count, self.size, ordered.shape[-1])


class Order(NamedTuple):
    """Where the heads of the nodes stand when graphs go by size: by chunk, then by graph, head and node.

    So every chunk is one block of memory, and all of them are gathered at once.
    """

    places: Tensor  # [N · heads] of the rows of [N, heads, width]
    back: Tensor  # [N · heads] its inverse

    @classmethod
    def of(cls, all_chunks: list[Chunk], heads: int, device: torch.device) -> Order:
        parts, reached = [torch.empty(0, dtype=torch.int64)], 0
        for chunk in all_chunks:
            if chunk.first < reached:  # more rows of a graph that is there already
                continue
            reached += len(chunk.graphs) * chunk.size
            nodes = torch.tensor(chunk.starts)[:, None, None] + torch.arange(chunk.size)  # [b, 1, n]
            parts.append((nodes * heads + torch.arange(heads)[:, None]).flatten())
        places = torch.cat(parts)
        back = torch.empty_like(places)
        back[places] = torch.arange(len(places))
        return cls(places.to(device), back.to(device))

    def gather(self, packed: Tensor) -> Tensor:
        """[N, heads, width] → [N · heads, width], a copy."""
        return packed.reshape(-1, packed.shape[-1]).index_select(0, self.places)

    def scatter(self, ordered: Tensor, shape: Sequence[int]) -> Tensor:
        """Its inverse, to [N, heads, width]."""
        return ordered.index_select(0, self.back).view(shape)


def chunks(ptr: Tensor, heads: int, chunk_size: int | None = None) -> Iterator[Chunk]:
    """All graphs, by size, in chunks of at most ``chunk_size`` scores; a graph that is larger comes in blocks of rows."""
    chunk_size = CHUNK_SIZE if chunk_size is None else chunk_size
    offsets = ptr.tolist()
    by_size: dict[int, list[int]] = {}
    for graph, (start, end) in enumerate(pairwise(offsets)):
        if end > start:
            by_size.setdefault(end - start, []).append(graph)
    before = 0
    for size, graphs in by_size.items():
        together = max(1, chunk_size // (heads * size * size))
        height = min(size, max(1, chunk_size // (heads * size)))
        for first in range(0, len(graphs), together):
            some = graphs[first : first + together]
            for row in range(0, size, height):
                rows = slice(row, min(row + height, size))
                yield Chunk(some, [offsets[g] for g in some], size, rows, before)
            before += len(some) * size
