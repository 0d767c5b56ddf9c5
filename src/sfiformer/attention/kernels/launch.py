"""The fused kernels as a custom operator: which graphs go to which launch, and with what tile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfiformer.attention.kernels.backward import key_kernel, query_kernel
from sfiformer.attention.kernels.forward import forward_kernel


class Bucket(NamedTuple):
    """Graphs of up to ``keys`` nodes, in tiles of ``rows`` queries."""

    keys: int
    rows: int
    warps: int


BUCKETS = (
    Bucket(64, 64, 4),
    Bucket(128, 32, 4),
    Bucket(256, 32, 8),
    Bucket(512, 16, 8),
    Bucket(1024, 16, 16),
)


def _launches(graphs: int, nodes: int, max_nodes: int) -> Iterator[tuple[Bucket, int, int]]:
    """The buckets in use, each with the size that it starts above and the number of its tiles (see `tiles.locate`)."""
    below = 0
    for bucket in BUCKETS:
        if nodes and below < max_nodes:
            yield bucket, below, nodes // bucket.rows + graphs
        below = bucket.keys


def _precision(bucket: Bucket, q: Tensor) -> str:
    """Of the products. Where TF32 is not allowed, three TF32 products make one of float32's accuracy.

    In long rows those three spill the registers; there, plain multiplications are faster.
    """
    if q.element_size() == 2:
        return "ieee"
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "tf32x3" if bucket.keys <= 128 else "ieee"


def _tile_options(
    bucket: Bucket, below: int, q: Tensor, dense: bool, potential: bool, dropout_p: float
) -> dict[str, Any]:
    """Compile-time settings."""
    half = q.element_size() == 2
    return {
        "ROWS": bucket.rows,
        "KEYS": bucket.keys,
        "MORE_THAN": below,
        "WIDTH": 32 if half else 16,
        "POTENTIAL": potential,
        "DENSE": dense,
        "DROPOUT": dropout_p > 0,
        "PRECISION": _precision(bucket, q),
        "num_warps": bucket.warps,
        "num_stages": 2 if half else 1,
        # The backward must find the forward's scores again, to the bit: no product may melt into a later subtraction.
        "enable_fp_fusion": False,
    }


@torch.library.custom_op("sfiformer::fused_attention", mutates_args=())
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
) -> tuple[Tensor, Tensor]:
    """Attention [N, heads, width of v], and nine numbers a row, [9, N, heads]. The plain twin is `packed_attention`.

    Without q_friction and k_friction there is none of it (λ = 0): softmax attention where alpha is infinite.
    """
    nodes, heads, width = q.shape
    out = torch.empty_like(v)
    stats = q.new_empty((9, nodes, heads), dtype=torch.float32)
    graphs = len(ptr) - 1
    for bucket, below, tiles in _launches(graphs, nodes, max_nodes):
        options = _tile_options(bucket, below, q, q_friction is None, potential, dropout_p)
        forward_kernel[(tiles, heads)](
            q, k, v, q_friction, k_friction, out, stats, ptr, lam, seed, 0.0 if math.isinf(alpha) else math.log(alpha),
            scale, dropout_p, graphs, heads, width, v.shape[2], nodes * heads,
            HARD=potential or math.isinf(alpha), **options,
        )  # fmt: skip
    return out, stats


@torch.library.custom_op("sfiformer::fused_attention_backward", mutates_args=())
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
    potential: bool,
    scale: float,
    dropout_p: float,
    max_nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, q_friction, k_friction (empty where there are none) and lam."""
    nodes, heads, width = q.shape
    of_q, of_k, of_v, of_q_friction, of_k_friction = _like(q, k, v, q_friction, k_friction)
    sums = q.new_empty((5, nodes, heads), dtype=torch.float32)
    inputs = (q, k, v, q_friction, k_friction, grad_out.contiguous())
    graphs = len(ptr) - 1
    tail = (stats, sums, ptr, seed, scale, dropout_p, graphs, heads, width, v.shape[2], nodes * heads)
    for bucket, below, tiles in _launches(graphs, nodes, max_nodes):
        options = _tile_options(bucket, below, q, q_friction is None, potential, dropout_p)
        grid = (tiles, heads)
        query_kernel[grid](*inputs, of_q, of_q_friction, *tail, **options)
        key_kernel[grid](*inputs, of_k, of_v, of_k_friction, *tail, **options)
    grad_log_kappa = sums[3].sum(-1) if nodes else q.new_zeros(0, dtype=torch.float32)
    by_graph = torch.segment_reduce(grad_log_kappa, "sum", offsets=ptr, initial=0.0)
    grad_lam = torch.where(lam > 0, by_graph / lam.clamp(min=torch.finfo(lam.dtype).tiny), 0).to(lam.dtype)
    return of_q, of_k, of_v, of_q_friction, of_k_friction, grad_lam


@fused_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), q.new_empty((9, *q.shape[:2]), dtype=torch.float32)


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


def _like(
    q: Tensor, k: Tensor, v: Tensor, q_friction: Tensor | None, k_friction: Tensor | None
) -> list[Tensor]:
    return [q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, q_friction, k_friction)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, potential, scale, dropout_p, max_nodes = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = (potential, scale, dropout_p, max_nodes)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dense = ctx.saved_tensors[3] is None
    *of_inputs, of_lam = fused_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    if dense:
        of_inputs[3:] = [None, None]
    return *of_inputs, None, of_lam, *[None] * 6


fused_attention.register_autograd(_backward, setup_context=_setup_context)
