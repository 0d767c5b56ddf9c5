"""The fused kernels as a custom operator: which graphs go to which launch, and with what tile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfiformer.attention.kernels.backward import key_kernel, query_kernel
from sfiformer.attention.kernels.forward import forward_kernel

MAX_WIDTH = 256  # of a head
MAX_NODES = 1024  # of a graph whose rows stay on chip


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


def serves(q: Tensor, v: Tensor, max_nodes: int) -> bool:
    """Whether the kernels take these widths, dtypes and sizes."""
    return (
        q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and max(q.shape[-1], v.shape[-1]) <= MAX_WIDTH
        and max_nodes <= MAX_NODES
    )


def _launches(graphs: int, nodes: int, max_nodes: int) -> Iterator[tuple[Bucket, int, int]]:
    """The buckets in use, each with the size that it starts above and the number of its tiles (see `tiles.locate`)."""
    below = 0
    for bucket in BUCKETS:
        if nodes and below < max_nodes:
            yield bucket, below, nodes // bucket.rows + graphs
        below = bucket.keys


def _tile_options(bucket: Bucket, below: int, q: Tensor, potential: bool, dropout_p: float) -> dict[str, Any]:
    """Compile-time settings. Where TF32 is not allowed, three TF32 products make one of float32's accuracy."""
    half = q.element_size() == 2
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return {
        "ROWS": bucket.rows,
        "KEYS": bucket.keys,
        "MORE_THAN": below,
        "WIDTH": 32 if half else 16,
        "POTENTIAL": potential,
        "DROPOUT": dropout_p > 0,
        "PRECISION": "ieee" if half else "tf32" if tf32 else "tf32x3",
        "num_warps": bucket.warps,
        "num_stages": 2 if half else 1,
    }


@torch.library.custom_op("sfiformer::fused_attention", mutates_args=())
def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    lam: Tensor,
    seed: Tensor,
    alpha: float,
    potential: bool,
    scale: float,
    dropout_p: float,
    max_nodes: int,
) -> tuple[Tensor, Tensor]:
    """Attention [N, heads, width of v], and eight numbers a row, [8, N, heads]. The plain twin is `packed_attention`."""
    nodes, heads, width = q.shape
    out = torch.empty_like(v)
    stats = q.new_empty((8, nodes, heads), dtype=torch.float32)
    graphs = len(ptr) - 1
    for bucket, below, tiles in _launches(graphs, nodes, max_nodes):
        options = _tile_options(bucket, below, q, potential, dropout_p)
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
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    lam: Tensor,
    seed: Tensor,
    stats: Tensor,
    potential: bool,
    scale: float,
    dropout_p: float,
    max_nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    nodes, heads, width = q.shape
    grads = [torch.empty_like(x) for x in (q, k, v, q_friction, k_friction)]
    of_q, of_k, of_v, of_q_friction, of_k_friction = grads
    sums = q.new_empty((5, nodes, heads), dtype=torch.float32)
    inputs = (q, k, v, q_friction, k_friction, grad_out.contiguous())
    graphs = len(ptr) - 1
    tail = (stats, sums, ptr, seed, scale, dropout_p, graphs, heads, width, v.shape[2], nodes * heads)
    for bucket, below, tiles in _launches(graphs, nodes, max_nodes):
        options = _tile_options(bucket, below, q, potential, dropout_p)
        grid = (tiles, heads)
        query_kernel[grid](*inputs, of_q, of_q_friction, *tail, **options)
        key_kernel[grid](*inputs, of_k, of_v, of_k_friction, *tail, **options)
    grad_log_kappa = sums[3].sum(-1) if nodes else q.new_zeros(0, dtype=torch.float32)
    by_graph = torch.segment_reduce(grad_log_kappa, "sum", offsets=ptr, initial=0.0)
    grad_lam = torch.where(lam > 0, by_graph / lam.clamp(min=torch.finfo(lam.dtype).tiny), 0).to(lam.dtype)
    return of_q, of_k, of_v, of_q_friction, of_k_friction, grad_lam


@fused_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), q.new_empty((8, *q.shape[:2]), dtype=torch.float32)


@fused_attention_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    lam: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, v, q_friction, k_friction, lam))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, potential, scale, dropout_p, max_nodes = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = (potential, scale, dropout_p, max_nodes)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *of_inputs, of_lam = fused_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *of_inputs, None, of_lam, *[None] * 6


fused_attention.register_autograd(_backward, setup_context=_setup_context)
