"""Dense attention on packed graphs: flows without friction, softmax(s), by whichever way is quickest."""

from __future__ import annotations

import math
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.attention import cpu
from sfiformer.attention.chunks import Order, chunks
from sfiformer.attention.dense_packed import dense_attention
from sfiformer.attention.dropout import drawn_seed
from sfiformer.attention.fused import fused_attend
from sfiformer.attention.inputs import (
    as_offsets,
    in_common,
    require_finite,
    require_no_gradient,
    require_ptr,
    require_shapes,
)
from sfiformer.attention.widths import wide, widened
from sfiformer.flow import checks

CHUNK_SIZE = 1 << 24  # scores (heads × queries × keys) at a time, where PyTorch holds them
# Nodes of the largest graph that the operator serves: beyond, there are no loops, and PyTorch's kernel is quicker.
LARGEST = cpu.MOST


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

    What `sfi_attention` is for λ = 0 and α = ∞: through the same kernels on a GPU, and the same compiled loops on a CPU.
    Batches with a graph of more than 1,024 nodes go through `torch.nn.functional.scaled_dot_product_attention`, on graphs of
    equal size at a time and so without padding. A GPU then waits to learn the sizes, so such a call cannot be captured, and two
    backward passes agree to the bit only under `torch.use_deterministic_algorithms`.

    It can be differentiated once. `torch.compile` finds no graph breaks on a CPU.
    """
    require_shapes(dropout_p, q=q, k=k, v=v)
    ptr, look = as_offsets(ptr), checks.wanted(check, q)
    operator = q.device.type == "cpu" and _operator_serves(ptr, dropout_p)
    if look and not operator:  # which looks, too
        require_ptr(ptr, len(q), max_nodes)
        require_finite(q=q, k=k, v=v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    require_no_gradient("scale", scale, "multiply q by it, with scale=1.0")
    if look and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    dtype, (q, k, v) = v.dtype, in_common(q, k, v)
    if operator:
        return dense_attention(q, k, v, ptr, drawn_seed(dropout_p), scale, dropout_p, max_nodes, look).to(
            dtype
        )
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
    with torch.autocast(q.device.type, enabled=False):  # which reaches no other way
        return _by_size(q, k, v, ptr, scale, dropout_p).to(dtype)


def _operator_serves(ptr: Tensor, dropout_p: float) -> bool:
    """Whether a CPU attends by the operator: PyTorch's kernel has no dropout, and a compiler cannot follow how it is called."""
    return torch.compiler.is_compiling() or dropout_p > 0 or len(ptr) < 2 or int(ptr.diff().max()) <= LARGEST


def _by_size(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor, scale: float, dropout_p: float) -> Tensor:
    """Graphs of equal size at a time, by PyTorch's kernels: [N, heads, width of v]."""
    heads, width = v.shape[1:]
    # A GPU's own kernels want widths of a multiple of 8; the others would hold all scores.
    q, k, v = (widened(x, wide(x.shape[2], x)) for x in (q, k, v))
    # A GPU's own kernels never hold all scores, so they take a graph of any size whole; not so in float64.
    chunk_size = 1 << 62 if q.is_cuda and q.dtype != torch.float64 else CHUNK_SIZE
    all_chunks = list(chunks(ptr, heads, chunk_size))
    order = Order.of(all_chunks, heads, q.device)
    ordered = [order.gather(x.contiguous()) for x in (q, k, v)]
    outs = [ordered[2][:0]]
    for _, of_same_graphs in groupby(all_chunks, key=lambda chunk: chunk.first):
        rows = []  # [1, b · heads, rows, width of v] each
        for chunk in of_same_graphs:
            queries, keys, values = (order.block(chunk, x)[None] for x in ordered)
            queries = queries[:, :, chunk.rows]
            rows.append(
                F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout_p, scale=scale)
            )
        outs.append(torch.cat(rows, dim=2).flatten(0, 2))
    packed = v.new_zeros(len(v) * heads, v.shape[2]).index_copy(0, order.places, torch.cat(outs))
    return packed.view(v.shape)[..., :width]
