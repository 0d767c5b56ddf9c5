"""The fused kernels as a custom operator: which graphs go to which launch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sfiformer.attention.kernels import MAX_NODES
from sfiformer.attention.kernels.chip_backward import chip_query_kernel
from sfiformer.attention.kernels.forward import forward_kernel, steep_forward_kernel
from sfiformer.attention.kernels.key_backward import key_kernel
from sfiformer.attention.kernels.pivot_backward import pivot_key_kernel, pivot_query_kernel
from sfiformer.attention.kernels.pivot_forward import pivot_forward_kernel
from sfiformer.attention.kernels.query_backward import lam_kernel, query_kernel
from sfiformer.attention.kernels.stream_forward import stream_forward_kernel
from sfiformer.attention.kernels.tiling import (
    DOUBT,
    STRICT,
    Stream,
    chunk,
    in_use,
    log_gentle,
    on_chip_options,
    query_tile,
    registers,
    steep,
    stream_options,
    stream_tiles,
    unit,
)
from sfiformer.branches import Branches
from sfiformer.operators import operator

# As MAX_NODES, with friction in float32: beyond it, streaming takes less time and shared memory.
MAX_FLOAT32 = 512
FEW = 264  # programs of a head that look for rows which are not gentle, as a rule in vain: two for each processor of an H200


@operator("sfiformer::fused_attention")
def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor | None,
    k_friction: Tensor | None,
    ptr: Tensor,
    lam: Tensor,
    seed: Tensor,
    alpha: float,
    potential: bool,
    scale: float,
    dropout_p: float,
    max_nodes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [N, heads, width of v], and what the backward needs. The plain twin is `packed_attention`.

    That is nine numbers a row, [9, N, heads], and where graphs are streamed two more, the number of sweeps over their keys
    (negative where a row was measured from a pivot) and the pivot, and O₂ = Σ_A p v / W and O − O₂, [2, N, heads, width of
    v] in float32 (else empty). Without q_friction and k_friction there is no friction (λ = 0): softmax attention where alpha
    is infinite; such graphs are not streamed. Nothing is written for nodes beyond ptr[-1].
    """
    nodes, heads, _ = q.shape
    out = torch.empty_like(v)
    border = _border(q, q_friction)
    streamed = max_nodes > border
    stats = q.new_empty((9 + 2 * streamed, nodes, heads), dtype=torch.float32)
    stats[9:] = 0  # no sweeps where rows stay on chip
    means = v.new_zeros((2, *v.shape) if streamed else (2, 0), dtype=torch.float32)
    graphs = len(ptr) - 1
    log_alpha, hard = 0.0 if math.isinf(alpha) else math.log(alpha), potential or math.isinf(alpha)
    sizes = (log_alpha, scale, dropout_p, graphs, heads, *_units(q, v), nodes * heads)
    branches = Branches("buckets", q)
    found = torch.zeros(1, dtype=torch.int32, device=q.device)  # rows that are not gentle
    tensors = (q, k, v, q_friction, k_friction, out, stats, found, ptr, lam, seed)
    for bucket, below in in_use(q, min(max_nodes, border)):
        options = on_chip_options(bucket, below, q, v, potential, dropout_p)
        options |= {"LOG_GENTLE": log_gentle(q), **registers(q, bucket.warps, bucket.rows * bucket.keys)}
        with branches.next():
            forward_kernel[(nodes // bucket.rows + graphs, heads)](
                *tensors, *sizes, HARD=hard, DENSE=q_friction is None, **options
            )
            if q_friction is not None:
                bucket = steep(bucket)
                options = on_chip_options(bucket, below, q, v, potential, dropout_p)
                steep_forward_kernel[(min(nodes // bucket.rows + graphs, FEW), heads)](
                    *tensors, *sizes, HARD=hard, **options
                )
    if streamed:
        tensors = (q, k, v, q_friction, k_friction, out, *means, stats, ptr, lam, seed)
        tile, _, _, pivoted = stream_tiles(q, v, streamed)
        options = stream_options(tile, q, v, potential, dropout_p)
        stream_forward_kernel[(nodes // tile.rows + graphs, heads)](
            *tensors, *sizes, border, HARD=hard, DOUBT=DOUBT[q.dtype], LOG_GENTLE=STRICT, **options
        )  # fmt: skip
        options = stream_options(pivoted, q, v, potential, dropout_p)
        pivot_forward_kernel[(nodes // pivoted.rows + graphs, heads)](
            *tensors, *sizes, border, HARD=hard, LOG_GENTLE=STRICT, **options
        )
    branches.join()
    return out, stats, means


@operator("sfiformer::fused_attention_backward")
def fused_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor | None,
    k_friction: Tensor | None,
    ptr: Tensor,
    lam: Tensor,
    seed: Tensor,
    stats: Tensor,
    means: Tensor,
    potential: bool,
    scale: float,
    dropout_p: float,
    max_nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, q_friction, k_friction (empty where there are none) and lam (0 where it is 0)."""
    nodes, heads, _ = q.shape
    of_q, of_k, of_v, of_q_friction, of_k_friction = _like(q, k, v, q_friction, k_friction)
    sums = q.new_empty((8, nodes, heads), dtype=torch.float32)
    graphs, dense, border = len(ptr) - 1, q_friction is None, _border(q, q_friction)
    plain = sums.new_empty((7, heads, nodes))  # of gentle rows, for the keys
    found = torch.zeros(1 + graphs * heads, dtype=torch.int32, device=q.device)  # other rows: `note_found`
    inputs = (q, k, v, q_friction, k_friction, grad_out.contiguous())
    tail = (stats, sums, ptr, seed, scale, dropout_p, graphs, heads, *_units(q, v), nodes * heads)
    _, queries, keys, pivoted = stream_tiles(q, v, max_nodes > border)

    def run(kernel: Any, tile: Stream, *tensors: Tensor, most: int | None = None, **more: Any) -> None:
        options, tiles = stream_options(tile, q, v, potential, dropout_p), nodes // tile.rows + graphs
        kernel[(min(tiles, most or tiles), heads)](*inputs, *tensors, *tail, **options, **more)

    small: dict[str, Any] = {"more_than": border, "LOG_GENTLE": log_gentle(q)}
    large: dict[str, Any] = {"more_than": border, "LOG_GENTLE": STRICT}  # none of them is dense
    branches = Branches("buckets", q)
    gentle = (*means, of_q, of_q_friction, plain, found)
    if nodes:
        run(query_kernel, query_tile(q, v), *gentle, LARGE=False, DENSE=dense, CHUNK=chunk(q, v), **small)
    if not dense:  # whose rows all are gentle
        for bucket, below in in_use(q, min(max_nodes, border)):
            bucket = steep(bucket)
            options = on_chip_options(bucket, below, q, v, potential, dropout_p)
            with branches.next():
                chip_query_kernel[(min(nodes // bucket.rows + graphs, FEW), heads)](
                    *inputs, of_q, of_q_friction, found, *tail, LOG_GENTLE=log_gentle(q), **options
                )
    if max_nodes > border:
        run(query_kernel, queries, *gentle, LARGE=True, DENSE=False, CHUNK=chunk(q, v), **large)
        run(pivot_query_kernel, pivoted, of_q, of_q_friction, found, **large)
    if nodes:  # gentle rows alone: no need to wait for the others
        run(key_kernel, keys, of_k, of_v, of_k_friction, plain, DENSE=dense)
    branches.join()
    grad_lam = torch.zeros_like(lam) if dense else torch.empty_like(lam)
    branches = Branches("buckets", q)
    if graphs and not dense:
        with branches.next():
            lam_kernel[(graphs,)](sums[3], ptr, lam, grad_lam, heads, BLOCK=1024)
    if nodes and not dense:
        options = {**large, "ON_CHIP": log_gentle(q)}
        run(pivot_key_kernel, pivoted, of_k, of_v, of_k_friction, found, most=FEW, **options)
    branches.join()
    return of_q, of_k, of_v, of_q_friction, of_k_friction, grad_lam


@fused_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, q_friction: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    streamed = args[-1] > _border(q, q_friction)
    stats = q.new_empty((9 + 2 * streamed, *q.shape[:2]), dtype=torch.float32)
    means = v.new_empty((2, *v.shape) if streamed else (2, 0), dtype=torch.float32)
    return torch.empty_like(v), stats, means


@fused_attention_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor | None,
    k_friction: Tensor | None,
    ptr: Tensor,
    lam: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    return *_like(q, k, v, q_friction, k_friction), torch.empty_like(lam)


def _border(q: Tensor, q_friction: Tensor | None) -> int:
    """Nodes of the largest graph whose rows stay on chip."""
    return min(MAX_NODES, MAX_FLOAT32) if q.element_size() > 2 and q_friction is not None else MAX_NODES


def _units(q: Tensor, v: Tensor) -> tuple[int, int]:
    return q.shape[2] // unit(q), v.shape[2] // unit(v)


def _like(
    q: Tensor, k: Tensor, v: Tensor, q_friction: Tensor | None, k_friction: Tensor | None
) -> list[Tensor]:
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, q_friction, k_friction)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, _, potential, scale, dropout_p, max_nodes = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.options = (potential, scale, dropout_p, max_nodes)


def _backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dense = ctx.saved_tensors[3] is None
    *of_inputs, of_lam = fused_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    if dense:
        of_inputs[3:] = [None, None]
    return *of_inputs, None, of_lam, *[None] * 6


fused_attention.register_autograd(_backward, setup_context=_setup_context)
