"""The edges of a batch in the order of their targets and in that of their sources, and sums along them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.attention import kernels


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
    def of(cls, edge_index: Tensor, nodes: int, *, by_target: bool | None = None) -> EdgeOrder:
        """From edges [2, E], source above target. Nothing waits for a device.

        Args:
            nodes: number of nodes N.
            by_target: whether the edges are known to ascend by target. None looks on the CPU, and sorts on a device.
        """
        source, target = edge_index.contiguous()
        if by_target is None:
            by_target = edge_index.device.type == "cpu" and bool((target[1:] >= target[:-1]).all())
        bounds = torch.arange(nodes + 1, device=edge_index.device)
        narrow = torch.int32 if nodes < 2**31 else torch.int64  # a radix sort passes over the key's bytes
        order, ends, starts = None, target, source
        if not by_target:
            order = target.to(narrow).sort(stable=True).indices
            ends, starts = target.index_select(0, order), source.index_select(0, order)
        # Stable over the order by target: the edges out of one node go by target.
        starts, by_source = starts.to(narrow).sort(stable=True)
        return cls(
            source,
            target,
            order,
            torch.searchsorted(ends, bounds),
            by_source if order is None else order.index_select(0, by_source),
            torch.searchsorted(starts, bounds.to(narrow)),
        )


def row_sum(
    x: Tensor,
    ptr: Tensor,
    order: Tensor | None = None,
    column: Tensor | None = None,
    weight: Tensor | None = None,
    loop: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """out_i = loop_i x_i + Σ_k weight_e x_column(e) over k = ptr[i] … ptr[i+1]-1 with e = order[k]: [M, d] → [len(ptr)-1, d].

    Without ``order`` e is k, without ``column`` it is e's own row, without ``weight`` 1, without ``loop`` 0. A sparse matrix
    times a dense one, or a sum over segments; added up in float32 or better, and so returned unless ``dtype`` says otherwise.
    No derivative: see the operators below.
    """
    if kernels.usable(x):
        from sfiformer.attention.kernels import rows

        return rows.row_sum(x, ptr, order, column, weight, loop, dtype)
    work = x.to(torch.promote_types(x.dtype, torch.float32))
    index = torch.arange(len(x), device=x.device) if column is None else column
    if order is not None:
        index = index.index_select(0, order)
        weight = None if weight is None else weight.index_select(0, order)
    if weight is not None:
        weight = weight.to(work.dtype)
    if x.device.type == "cpu" and index.numel():
        # Rows are gathered, weighed and added up in one pass, several times as fast as index_add.
        out = F.embedding_bag(
            index, work, ptr, mode="sum", per_sample_weights=weight, include_last_offset=True
        )
    else:
        sizes = ptr.diff()
        row = torch.repeat_interleave(sizes, output_size=index.numel())
        terms = work.index_select(0, index)
        terms = terms if weight is None else terms * weight.unsqueeze(-1)
        out = work.new_zeros(len(sizes), work.size(1)).index_add(0, row, terms)
    if loop is not None:
        out = out.addcmul(work, loop.to(work.dtype).unsqueeze(-1))
    return out if dtype is None else out.to(dtype)


@torch.library.custom_op("sfiformer::neighbour_sum", mutates_args=())
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
    return row_sum(x.contiguous(), target_ptr, by_target, source, weight, loop, x.dtype)


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


@torch.library.custom_op("sfiformer::segment_sum", mutates_args=())
def segment_sum(values: Tensor, ptr: Tensor, index: Tensor) -> Tensor:
    """out[s] = Σ values[k] over k = ptr[s] … ptr[s+1]-1: [K, …] → [S, …]; 0 where a segment is empty.

    Half-precision values are added up, and returned, in float32. ``index`` [K] names the segment of each k.
    """
    width = values[0].numel() if len(values) else values.new_empty(values.shape[1:]).numel()
    sums = row_sum(values.reshape(len(values), width).contiguous(), ptr)
    return sums.view(len(ptr) - 1, *values.shape[1:])


@segment_sum.register_fake
def _(values: Tensor, ptr: Tensor, index: Tensor) -> Tensor:
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.new_empty(len(ptr) - 1, *values.shape[1:], dtype=dtype)


def _keep_index(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    values, _, index = inputs
    ctx.save_for_backward(index)
    ctx.dtype = values.dtype


def _spread(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return grad.index_select(0, index).to(ctx.dtype), None, None


segment_sum.register_autograd(_spread, setup_context=_keep_index)
