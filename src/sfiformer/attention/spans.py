"""Spans of a batch: as much of it as is gathered, attended to and put back at a time, on a CPU by each thread."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sfiformer.attention import cpu
from sfiformer.attention.chunks import Chunk, chunks
from sfiformer.attention.threads import side_by_side

# Numbers of one tensor (nodes × heads × width) that are gathered at a time, on a CPU by each thread; about sixteen such tensors
# are. A single graph may have more.
SPAN_SIZE = 1 << 17
SPAN_SIZE_ELSEWHERE = 1 << 18


class Span(NamedTuple):
    """Chunks that follow one another: of whole graphs, so that each span can be treated apart from the others."""

    first: int  # number of chunks before
    chunks: list[Chunk]

    @property
    def pairs(self) -> int:
        """Of queries and keys."""
        return sum(
            len(chunk.graphs) * (chunk.rows.stop - chunk.rows.start) * chunk.size for chunk in self.chunks
        )


def for_each_span(
    attend: Callable[[Span], None], ptr: Tensor, q: Tensor, v: Tensor, without: Container[int] = ()
) -> None:
    """attend(span) for all graphs of a batch, whose queries [nodes, heads, width] and values these are.

    Or for all but some, ``without``.
    """
    if q.device.type == "cpu" and torch.promote_types(q.dtype, torch.float32) == torch.float32:
        cpu.prepare()
    heads = q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        pieces = spans(ptr, q, max(q.shape[2], v.shape[2]), without)
        side_by_side(attend, pieces, q.device, lambda span: heads * span.pairs)


def spans(ptr: Tensor, like: Tensor, width: int, without: Container[int] = ()) -> Iterator[Span]:
    """All graphs, by size: in chunks, and as many of these each as keep a tensor [nodes, heads, width] below `SPAN_SIZE`.

    On a CPU, whose threads share the spans, graphs of one size come in as many chunks as these take, too.
    """
    heads, shared = like.shape[1], like.device.type == "cpu"
    nodes = (SPAN_SIZE if shared else SPAN_SIZE_ELSEWHERE) // max(heads * width, 1)
    span = Span(0, [])
    for index, chunk in enumerate(chunks(ptr, heads, None, nodes if shared else None, without)):
        end = chunk.first + len(chunk.graphs) * chunk.size
        others = bool(span.chunks) and chunk.first > span.chunks[-1].first
        if others and end - span.chunks[0].first > nodes:
            yield span
            span = Span(index, [])
        span.chunks.append(chunk)
    if span.chunks:
        yield span
