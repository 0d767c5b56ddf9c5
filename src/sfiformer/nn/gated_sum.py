"""The gated mean over incoming edges, GatedGCN's message passing, as an operator with a derivative by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sfiformer.attention import EdgeOrder
from sfiformer.attention.edges import row_sum
from sfiformer.attention.kernels import usable
from sfiformer.operators import operator

_BLOCK = 1 << 18  # numbers in a block of edges


def gated_sum(
    nodes: Tensor, edges: Tensor, pe_gate: Tensor | None, order: EdgeOrder
) -> tuple[Tensor, Tensor]:
    """x̂ and ê of GatedGCN, on edges j → i:

        ê_ij = D x_i + E x_j + C e_ij            η_ij = sigmoid(ê_ij) · g_ij
        x̂_i  = A x_i + Σ_j η_ij ⊙ B x_j / (Σ_j η_ij + 1e-6)

    On a GPU with Triton this is one kernel forward and one backward, in float32 and half precision; otherwise plain PyTorch.
    Two runs agree to the bit.

    Args:
        nodes: A x, D x, B x, E x side by side, [N, 4d].
        edges: C e, [E, d].
        pe_gate: g, [E, 1], or None for g = 1.
        order: of the edges.

    Returns:
        x̂ [N, d], in float32 or better, and ê [E, d].
    """
    x_hat, e_hat, _ = _gated_sum(nodes, edges, pe_gate, *order)
    return x_hat, e_hat


def forward(
    nodes: Tensor, edges: Tensor, pe_gate: Tensor | None, order: EdgeOrder
) -> tuple[Tensor, Tensor, Tensor]:
    """x̂, ê, and for the backward each node's mean Σ η B x_j / (Σ η + 1e-6) beside 1 / (Σ η + 1e-6), [N, 2d]."""
    d = edges.size(1)
    own, query, message, key = nodes.split(d, dim=1)
    e_hat = torch.empty_like(edges)
    stats = nodes.new_empty((len(nodes), 2 * d), dtype=torch.promote_types(nodes.dtype, torch.float32))
    for here, there in _blocks(order, edges):
        source, ptr = order.source[there], _ptr(order, here, there)
        e = torch.add(edges[there], query.index_select(0, order.target[there]), out=e_hat[there])
        gate = torch.sigmoid(e.add_(key.index_select(0, source)))
        if pe_gate is not None:
            gate = gate.mul_(pe_gate[there])
        share = row_sum(gate, ptr, order.by_target).add_(1e-6).reciprocal_()
        mean = row_sum(gate.mul_(message.index_select(0, source)), ptr, order.by_target).mul_(share)
        stats[here] = torch.cat([mean, share], dim=1)
    return own + stats[:, :d], e_hat, stats


def backward(
    of_x_hat: Tensor,
    of_e_hat: Tensor | None,
    nodes: Tensor,
    pe_gate: Tensor | None,
    e_hat: Tensor,
    stats: Tensor,
    order: EdgeOrder,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of nodes, edges and the positional gate, from those of x̂ and ê:

    ∂L/∂η_ij = p_i ⊙ (B x_j − mean_i) and ∂L/∂(B x_j) = Σ_i η_ij ⊙ p_i with p_i = ∂L/∂x̂_i / (Σ_j η_ij + 1e-6).
    """
    d = e_hat.size(1)
    mean, share = stats.split(d, dim=1)
    message, pulls = nodes[:, 2 * d : 3 * d], of_x_hat * share
    of_e, pulled = (torch.empty_like(e_hat, dtype=stats.dtype) for _ in range(2))  # ∂L/∂ê, and η ⊙ p_i
    of_pe_gate = None if pe_gate is None else torch.empty_like(pe_gate)
    of_nodes = torch.empty_like(nodes)
    of_own, of_query, of_message, of_key = of_nodes.split(d, dim=1)
    for here, there in _blocks(order, e_hat):
        target = order.target[there]
        gate = torch.sigmoid(e_hat[there]).to(stats.dtype)
        of_gate = message.index_select(0, order.source[there]).to(stats.dtype)
        of_gate.sub_(mean.index_select(0, target))
        pull = torch.index_select(pulls, 0, target, out=pulled[there])
        of_gate.mul_(pull).mul_(gate)  # ∂L/∂η ⊙ σ(ê)
        pull.mul_(gate)
        slope = 1 - gate
        if pe_gate is not None and of_pe_gate is not None:
            pull.mul_(pe_gate[there])
            slope.mul_(pe_gate[there])
            of_pe_gate[there] = of_gate.sum(1, keepdim=True)
        of = torch.mul(of_gate, slope, out=of_e[there])
        if of_e_hat is not None:
            of.add_(of_e_hat[there])
        of_query[here] = row_sum(of, _ptr(order, here, there), order.by_target)
    of_own.copy_(of_x_hat)
    for of, by_edge in ((of_message, pulled), (of_key, of_e)):
        of.copy_(row_sum(by_edge, order.source_ptr, order.by_source))
    return of_nodes, of_e.to(e_hat.dtype), of_pe_gate


def _blocks(order: EdgeOrder, edges: Tensor) -> Iterator[tuple[slice, slice]]:
    """Nodes and the edges into them: all, or where there are many on a CPU as many at a time as stay in its caches."""
    width, ptr = edges.size(1), order.target_ptr
    if edges.device.type != "cpu" or order.by_target is not None or edges.numel() < 16 * _BLOCK:
        yield slice(None), slice(None)
        return
    ends = torch.arange(_BLOCK // width, len(edges), max(1, _BLOCK // width))
    bounds = [0, *torch.searchsorted(ptr, ends).unique().tolist(), len(ptr) - 1]
    for first, last in pairwise(bounds):
        if first < last:
            yield slice(first, last), slice(int(ptr[first]), int(ptr[last]))


def _ptr(order: EdgeOrder, here: slice, there: slice) -> Tensor:
    """Where the edges into each node of a block start, counted from the block's first."""
    if here.start is None:
        return order.target_ptr
    return order.target_ptr[here.start : here.stop + 1] - there.start


@operator("sfiformer::gated_sum")
def _gated_sum(
    nodes: Tensor,
    edges: Tensor,
    pe_gate: Tensor | None,
    source: Tensor,
    target: Tensor,
    by_target: Tensor | None,
    target_ptr: Tensor,
    by_source: Tensor,
    source_ptr: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    order = EdgeOrder(source, target, by_target, target_ptr, by_source, source_ptr)
    if usable(nodes):
        from sfiformer.nn.kernels import gated

        return gated.forward(nodes, edges, pe_gate, order)
    return forward(nodes, edges, pe_gate, order)


@operator("sfiformer::gated_sum_backward")
def _gated_sum_backward(
    of_x_hat: Tensor,
    of_e_hat: Tensor | None,
    nodes: Tensor,
    pe_gate: Tensor | None,
    e_hat: Tensor,
    stats: Tensor,
    source: Tensor,
    target: Tensor,
    by_target: Tensor | None,
    target_ptr: Tensor,
    by_source: Tensor,
    source_ptr: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    order = EdgeOrder(source, target, by_target, target_ptr, by_source, source_ptr)
    if usable(nodes):
        from sfiformer.nn.kernels import gated

        grads = gated.backward(of_x_hat, of_e_hat, nodes, pe_gate, e_hat, stats, order)
    else:
        grads = backward(of_x_hat, of_e_hat, nodes, pe_gate, e_hat, stats, order)
    of_nodes, of_edges, of_pe_gate = grads
    return of_nodes, of_edges, nodes.new_empty(0) if of_pe_gate is None else of_pe_gate


@_gated_sum.register_fake
def _(nodes: Tensor, edges: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    work = torch.promote_types(nodes.dtype, torch.float32)
    x_hat, stats = (nodes.new_empty((nodes.size(0), k * edges.size(1)), dtype=work) for k in (1, 2))
    return x_hat, torch.empty_like(edges), stats


@_gated_sum_backward.register_fake
def _(
    of_x_hat: Tensor,
    of_e_hat: Tensor | None,
    nodes: Tensor,
    pe_gate: Tensor | None,
    e_hat: Tensor,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    of_pe_gate = nodes.new_empty(0) if pe_gate is None else torch.empty_like(pe_gate)
    return torch.empty_like(nodes), torch.empty_like(e_hat), of_pe_gate


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    nodes, _, pe_gate, *order = inputs
    _, e_hat, stats = output
    ctx.set_materialize_grads(False)  # a last layer gives ê no gradient: no need to read zeros
    ctx.save_for_backward(nodes, pe_gate, e_hat, stats, *order)


def _backward(
    ctx: Any, of_x_hat: Tensor | None, of_e_hat: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    nodes, pe_gate, e_hat, stats, *order = ctx.saved_tensors
    if of_x_hat is None:
        of_x_hat = torch.zeros_like(stats[:, : e_hat.size(1)])
    grads = _gated_sum_backward(of_x_hat, of_e_hat, nodes, pe_gate, e_hat, stats, *order)
    of_nodes, of_edges, of_pe_gate = grads
    return of_nodes, of_edges, None if pe_gate is None else of_pe_gate, *[None] * 6


_gated_sum.register_autograd(_backward, setup_context=_setup_context)
