"""Graphs of one size side by side: how packed graphs become dense blocks without padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# Numbers in one block of scores (heads × queries × keys); about ten such blocks are alive at a time.
CHUNK_SIZE = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Some graphs of equal size, and which of their rows (queries) to treat."""

    graphs: list[int]  # their places in the batch, b of them
    starts: list[int]  # the first node of each
    size: int  # nodes of each, n
    rows: slice  # queries 0 ≤ rows < n; all of them unless there is one large graph

    def nodes(self, device: torch.device) -> Tensor | slice:
        """The packed places of all their nodes, [b · n]."""
        if len(self.starts) == 1:
            return slice(self.starts[0], self.starts[0] + self.size)
        starts = torch.tensor(self.starts, device=device)
        return (starts[:, None] + torch.arange(self.size, device=device)).reshape(-1)

    def gather(self, packed: Tensor, nodes: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """[N, heads, width] → [b · heads, n, width]."""
        picked = packed[nodes] if isinstance(nodes, slice) else packed.index_select(0, nodes)
        picked = picked.view(len(self.graphs), self.size, *packed.shape[1:]).transpose(1, 2)
        return picked.to(dtype).reshape(-1, self.size, packed.shape[2])

    def write(self, block: Tensor, nodes: Tensor | slice, packed: Tensor) -> None:
        """The rows of a chunk [b · heads, rows, width] into their places in [N, heads, width]."""
        if self.rows != slice(0, self.size):  # one large graph
            start = self.starts[0]
            packed[start + self.rows.start : start + self.rows.stop] = block.transpose(0, 1).to(packed.dtype)
        else:
            packed[nodes] = self._nodes_first(block, packed)

    def add(self, block: Tensor, nodes: Tensor | slice, packed: Tensor) -> None:
        """What the rows of a chunk add to all nodes of their graphs, [b · heads, n, width]."""
        packed[nodes] += self._nodes_first(block, packed)

    def _nodes_first(self, block: Tensor, packed: Tensor) -> Tensor:
        block = block.view(len(self.graphs), -1, self.size, block.shape[-1]).transpose(1, 2)
        return block.reshape(-1, *packed.shape[1:]).to(packed.dtype)


def chunks(ptr: Tensor, heads: int, chunk_size: int | None = None) -> Iterator[Chunk]:
    """All graphs, by size, in chunks of at most ``chunk_size`` scores; a graph that is larger comes in blocks of rows."""
    chunk_size = CHUNK_SIZE if chunk_size is None else chunk_size
    offsets = ptr.tolist()
    by_size: dict[int, list[int]] = {}
    for graph, (start, end) in enumerate(pairwise(offsets)):
        if end > start:
            by_size.setdefault(end - start, []).append(graph)
    for size, graphs in by_size.items():
        together = max(1, chunk_size // (heads * size * size))
        height = min(size, max(1, chunk_size // (heads * size)))
        for first in range(0, len(graphs), together):
            some = graphs[first : first + together]
            for row in range(0, size, height):
                yield Chunk(some, [offsets[g] for g in some], size, slice(row, min(row + height, size)))
