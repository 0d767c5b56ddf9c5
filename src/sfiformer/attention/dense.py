"""Dense attention on packed graphs: flows without friction, softmax(s), by PyTorch's own kernels."""

from __future__ import annotations

import math
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.attention.chunks import Order, chunks
from sfiformer.attention.fused import fused_attend
from sfiformer.attention.inputs import as_offsets, in_common, require_finite, require_ptr, require_shapes
from sfiformer.attention.widths import wide, widened
from sfiformer.flow import checks


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
    """
    require_shapes(dropout_p, q=q, k=k, v=v)
    ptr = as_offsets(ptr)
    if checks.wanted(check, q):
        require_ptr(ptr, len(q), max_nodes)
        require_finite(q=q, k=k, v=v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype, (q, k, v) = v.dtype, in_common(q, k, v)
    fused = fused_attend(
        q,
        k,
        v,
        None,
        None,
        ptr,
        torch.zeros(len(ptr) - 1, device=q.device),
        alpha=math.inf,
        potential=False,
        scale=scale,
        dropout_p=dropout_p,
        max_nodes=max_nodes,
    )
    if fused is not None:
        return fused.to(dtype)
    # A GPU's own kernels never hold all scores, so they take a graph of any size whole; not so in float64. They want widths of
    # a multiple of 8; the others would hold all scores.
    chunk_size = 1 << (62 if q.is_cuda and q.dtype != torch.float64 else 24)
    heads, width = v.shape[1:]
    q, k, v = (widened(x, wide(x.shape[2], x)) for x in (q, k, v))
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
    packed = torch.zeros_like(v.flatten(0, 1)).index_copy(0, order.places, torch.cat(outs))
    return packed.view(v.shape)[..., :width].to(dtype)
