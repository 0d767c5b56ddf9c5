"""Dense attention on packed graphs: flows without friction, softmax(s), by PyTorch's own kernels."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.attention.chunks import Chunk, Order, chunks
from sfiformer.attention.dropout import kept
from sfiformer.attention.fused import fused_attend
from sfiformer.attention.inputs import as_offsets, in_common, require_finite, require_ptr, require_shapes
from sfiformer.attention.widths import wide, widened
from sfiformer.flow import checks
from sfiformer.operators import operator

CHUNK_SIZE = 1 << 24  # scores (heads × queries × keys) at a time


def dfi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    max_nodes: int | None = None,
    check: bool | None = None,
) -> Tensor:
    """Σ_j softmax_j(q_i·k_j · scale) v_j over the nodes j of i's graph: [nodes, heads, width of v].

    What `sfi_attention` is for λ = 0 and α = ∞: through the same kernels on a GPU, and else through
    `torch.nn.functional.scaled_dot_product_attention`, on graphs of equal size at a time and so without padding. That is
    also where a GPU sends batches with a graph of more than 1,024 nodes: it then waits to learn the sizes, so such a call
    cannot be captured, and two backward passes agree to the bit only under `torch.use_deterministic_algorithms`.

    `torch.compile` finds no graph breaks on a CPU.
    """
    require_shapes(dropout_p, q=q, k=k, v=v)
    ptr, look = as_offsets(ptr), checks.wanted(check, q)
    on_cpu = q.device.type == "cpu"
    compiling = on_cpu and torch.compiler.is_compiling()  # then it is one operator, which looks
    if look and not compiling:
        _require_values(q, k, v, ptr, max_nodes)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype, (q, k, v) = v.dtype, in_common(q, k, v)
    fused = fused_attend(
        q,
        k,
        v,
        None,
        None,
        ptr,
        torch.zeros(ptr.shape[0] - 1, device=q.device),
        alpha=math.inf,
        potential=False,
        scale=scale,
        dropout_p=dropout_p,
        max_nodes=max_nodes,
    )
    if fused is not None:
        return fused.to(dtype)
    seed = torch.randint(1 << 62, ()) if dropout_p and on_cpu else torch.zeros((), dtype=torch.int64)
    if compiling:
        return _dense_attention(q, k, v, ptr, seed, scale, dropout_p, max_nodes, look).to(dtype)
    return _by_size(q, k, v, ptr, int(seed), scale, dropout_p).to(dtype)


def _by_size(
    q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, seed: int, scale: float, dropout_p: float
) -> Tensor:
    """Graphs of equal size at a time, by PyTorch's kernels: [N, heads, width of v]."""
    heads, width = v.shape[1:]
    # A GPU's own kernels want widths of a multiple of 8; the others would hold all scores.
    q, k, v = (widened(x, wide(x.shape[2], x)) for x in (q, k, v))
    all_chunks = _chunks(ptr, q)
    order = Order.of(all_chunks, heads, q.device)
    ordered = [order.gather(x.contiguous()) for x in (q, k, v)]
    outs, index = [ordered[2][:0]], 0
    for _, of_same_graphs in groupby(all_chunks, key=lambda chunk: chunk.first):
        rows = []  # [1, b · heads, rows, width of v] each
        for chunk in of_same_graphs:
            queries, keys, values = (order.block(chunk, x)[None] for x in ordered)
            queries = queries[:, :, chunk.rows]
            rows.append(_attend(queries, keys, values, seed + index, scale, dropout_p))
            index += 1
        outs.append(torch.cat(rows, dim=2).flatten(0, 2))
    packed = v.new_zeros(len(v) * heads, v.shape[2]).index_copy(0, order.places, torch.cat(outs))
    return packed.view(v.shape)[..., :width]


def _chunks(ptr: Tensor, q: Tensor) -> list[Chunk]:
    # A GPU's own kernels never hold all scores, so they take a graph of any size whole; not so in float64.
    chunk_size = 1 << 62 if q.is_cuda and q.dtype != torch.float64 else CHUNK_SIZE
    return list(chunks(ptr, q.shape[1], chunk_size))


def _attend(q: Tensor, k: Tensor, v: Tensor, seed: int, scale: float, dropout_p: float) -> Tensor:
    """softmax(q kᵀ · scale) v. PyTorch has no kernel with dropout for a CPU; the mask is then one that can be made again."""
    if not dropout_p or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, scale=scale)
    work = torch.promote_types(q.dtype, torch.float32)
    p = (q.to(work) * scale @ k.to(work).mT).softmax(-1)
    return ((p * kept(p, dropout_p, seed).div_(1 - dropout_p)) @ v.to(work)).to(v.dtype)


@operator("sfiformer::dense_attention")
def _dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor,
    seed: Tensor,
    scale: float,
    dropout_p: float,
    max_nodes: int | None,
    check: bool,
) -> Tensor:
    """`_by_size`, for the compiler, which cannot follow what depends on the sizes of graphs."""
    if check:
        _require_values(q, k, v, ptr, max_nodes)
    with torch.autocast(q.device.type, enabled=False):
        return _by_size(q, k, v, ptr, int(seed), scale, dropout_p)


@operator("sfiformer::dense_attention_backward")
def _dense_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor,
    seed: Tensor,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: with p = softmax(s) and g = ∂L/∂p, ∂L/∂s_j = p_j (g_j − Σ_i p_i g_i)."""
    work = torch.promote_types(q.dtype, torch.float32)
    all_chunks = _chunks(ptr, q)
    order = Order.of(all_chunks, q.shape[1], q.device)
    parts = [order.gather(x.contiguous()).to(work) for x in (q, k, v, grad_out)]
    grads = [torch.zeros_like(x) for x in parts[:3]]
    with torch.autocast(q.device.type, enabled=False):
        for index, chunk in enumerate(all_chunks):
            queries, keys, values, grad = (order.block(chunk, x) for x in parts)
            of_queries, of_keys, of_values = (order.block(chunk, x) for x in grads)
            queries, grad = queries[:, chunk.rows] * scale, grad[:, chunk.rows]
            p = left = (queries @ keys.mT).softmax(-1)  # [b · heads, rows, n]
            g = grad @ values.mT
            if dropout_p:
                mask = kept(p, dropout_p, int(seed) + index).div_(1 - dropout_p)
                left, g = p * mask, g.mul_(mask)
            of_scores = g.sub_((p * g).sum(-1, keepdim=True)).mul_(p)
            of_values.baddbmm_(left.mT, grad)
            of_keys.baddbmm_(of_scores.mT, queries)
            of_queries[:, chunk.rows] = of_scores @ keys * scale
    of_q, of_k, of_v = (x.new_zeros(x.shape) for x in (q, k, v))
    for packed, here in zip((of_q, of_k, of_v), grads, strict=True):
        order.put(packed, here)
    return of_q, of_k, of_v


@_dense_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    return v.new_empty(v.shape)


@_dense_attention_backward.register_fake
def _(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, scale, dropout_p, _, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = (scale, dropout_p)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return *_dense_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options), *[None] * 6


_dense_attention.register_autograd(_backward, setup_context=_setup_context)


def _require_values(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, max_nodes: int | None) -> None:
    require_ptr(ptr, len(q), max_nodes)
    require_finite(q=q, k=k, v=v)
