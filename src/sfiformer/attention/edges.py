"""The edges of a batch in the order of their targets and in that of their sources, and sums along them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.attention import kernels
from sfiformer.operators import operator


class EdgeOrder(NamedTuple):
    """Where the edges into each node and those out of it stand; made once a batch, for all its layers.

    Edges keep the numbers that edge_index gives them. Node i receives the edges by_target[target_ptr[i] : target_ptr[i+1]] and
    sends by_source[source_ptr[i] : source_ptr[i+1]]; of one node's, the latter go by target. Sums over such ranges need no
    atomics, so that two runs agree to the bit.
    """

    source: Tensor  # [E] int64
    target: Tensor  # [E] int64
    by_target: Tensor | None  # [E] int64, None where the edges lie in this order already
    target_ptr: Tensor  # [N+1] int64
    by_source: Tensor  # [E] int64
    source_ptr: Tensor  # [N+1] int64

    @classmethod
    def of(cls, edge_index: Tensor, nodes: int, *, by_target: bool = False) -> EdgeOrder:
        """From edges [2, E], source above target. No step depends on values, so nothing waits for a device.

        Args:
            nodes: number of nodes N.
            by_target: whether the edges are known to ascend by target.
        """
        source, target = edge_index.long().contiguous()
        narrow = torch.int32 if nodes < 2**31 else torch.int64  # a radix sort passes over the key's bytes
        bounds = torch.arange(nodes + 1, device=edge_index.device, dtype=narrow)
        starts, ends = edge_index.to(narrow, memory_format=torch.contiguous_format)
        order = None
        if not by_target:
            ends, order = ends.sort(stable=True)
            starts = starts.index_select(0, order)
        # Stable over the order by target: the edges out of one node go by target.
        starts, by_source = starts.sort(stable=True)
        return cls(
            source,
            target,
            order,
            torch.searchsorted(ends, bounds),
            by_source if order is None else order.index_select(0, by_source),
            torch.searchsorted(starts, bounds),
        )

    def at_source(self, x: Tensor) -> Tensor:
        """x_j for each edge j → i: [N, …] → [E, …]."""
        return spread(x, self.source_ptr, self.source, self.by_source)

    def at_target(self, x: Tensor) -> Tensor:
        """x_i likewise."""
        return spread(x, self.target_ptr, self.target, self.by_target)


def row_sum(
    x: Tensor,
    ptr: Tensor,
    order: Tensor | None = None,
    column: Tensor | None = None,
    weight: Tensor | None = None,
    loop: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """out_i = loop_i x_i + Σ_k weight_e x_column(e) over k = ptr[i] … ptr[i+1]-1 with e = order[k]: [M, …] → [R, …].

    Without ``order`` e is k, without ``column`` it is e's own row, without ``weight`` 1, without ``loop`` 0. A sparse matrix
    times a dense one, or a sum over segments; added up in float32 or better, and so returned unless ``dtype`` says otherwise.
    No derivative: see the operators below.
    """
    rows, rest = len(ptr) - 1, x.shape[1:]
    x = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    if kernels.usable(x):
        from sfiformer.attention.kernels.rows import row_sum as fused

        return fused(x, ptr, order, column, weight, loop, dtype).view(rows, *rest)
    work = x.to(torch.promote_types(x.dtype, torch.float32))
    index = torch.arange(len(x), device=x.device) if column is None else column
    if order is not None:
        index = index.index_select(0, order)
        weight = None if weight is None else weight.index_select(0, order)
    if weight is not None:
        weight = weight.to(work.dtype)
    if not index.numel():
        out = work.new_zeros(rows, work.size(1))
    elif x.device.type == "cpu":
        # Rows are gathered, weighed and added up in one pass, several times as fast as index_add.
        out = F.embedding_bag(
            index, work, ptr, mode="sum", per_sample_weights=weight, include_last_offset=True
        )
    else:
        terms = work.index_select(0, index)
        terms = terms if weight is None else terms * weight.unsqueeze(-1)
        out = torch.segment_reduce(terms, "sum", offsets=ptr, initial=0.0)
    if loop is not None:
        out = out.addcmul(work, loop.to(work.dtype).unsqueeze(-1))
    return (out if dtype is None else out.to(dtype)).view(rows, *rest)


@operator("sfiformer::neighbour_sum")
def neighbour_sum(
    x: Tensor,
    weight: Tensor,
    loop: Tensor,
    source: Tensor,
    target: Tensor,
    by_target: Tensor | None,
    target_ptr: Tensor,
    by_source: Tensor | None,
    source_ptr: Tensor,
) -> Tensor:
    """out_i = loop_i x_i + Σ_{e: j → i} weight_e x_j, [N, d] → [N, d]; weights [E] and loop [N] are constants."""
    return row_sum(x, target_ptr, by_target, source, weight, loop, x.dtype)


@neighbour_sum.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_edges(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, loop, source, target, by_target, target_ptr, by_source, source_ptr = inputs
    # The transposed matrix: sources and targets change places.
    ctx.save_for_backward(weight, loop, target, source, by_source, source_ptr, by_target, target_ptr)


def _transposed(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return neighbour_sum(grad, *ctx.saved_tensors), *[None] * 8


neighbour_sum.register_autograd(_transposed, setup_context=_keep_edges)


@operator("sfiformer::segment_sum")
def segment_sum(values: Tensor, ptr: Tensor, index: Tensor, order: Tensor | None = None) -> Tensor:
    """out[s] = Σ values[order[k]] over k = ptr[s] … ptr[s+1]-1: [K, …] → [S, …]; 0 where a segment is empty.

    Half-precision values are added up, and returned, in float32. ``index`` [K] names the segment of each value; without
    ``order`` it ascends.
    """
    return row_sum(values, ptr, order)


@operator("sfiformer::spread")
def spread(values: Tensor, ptr: Tensor, index: Tensor, order: Tensor | None = None) -> Tensor:
    """out[k] = values[index[k]]: [S, …] → [K, …], the transpose of `segment_sum` and with its arguments.

    As `index_select`, but that its gradient needs no atomics, and that a GPU does not notice an index out of range.
    """
    if kernels.usable(values):
        from sfiformer.attention.kernels.rows import take_rows

        rest = values.shape[1:]
        return take_rows(values.reshape(len(values), rest.numel()), index).view(len(index), *rest)
    return values.index_select(0, index)


@segment_sum.register_fake
def _(values: Tensor, ptr: Tensor, index: Tensor, order: Tensor | None = None) -> Tensor:
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.new_empty(ptr.size(0) - 1, *values.shape[1:], dtype=dtype)


@spread.register_fake
def _(values: Tensor, ptr: Tensor, index: Tensor, order: Tensor | None = None) -> Tensor:
    return values.new_empty(index.size(0), *values.shape[1:])


def _keep_segments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, *segments = inputs
    ctx.save_for_backward(*segments)
    ctx.dtype = values.dtype


def _spread_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return spread(grad, *ctx.saved_tensors).to(ctx.dtype), None, None, None


def _sum_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return segment_sum(grad, *ctx.saved_tensors).to(ctx.dtype), None, None, None


segment_sum.register_autograd(_spread_back, setup_context=_keep_segments)
spread.register_autograd(_sum_back, setup_context=_keep_segments)
