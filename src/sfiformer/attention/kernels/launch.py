"""The fused kernels as a custom operator: which graphs go to which launch, and with what tile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfiformer.attention.branches import Branches
from sfiformer.attention.kernels import MAX_NODES
from sfiformer.attention.kernels.backward import query_kernel
from sfiformer.attention.kernels.forward import forward_kernel
from sfiformer.attention.kernels.key_backward import key_kernel
from sfiformer.attention.kernels.pivot_backward import pivot_key_kernel, pivot_query_kernel
from sfiformer.attention.kernels.pivot_forward import pivot_forward_kernel
from sfiformer.attention.kernels.stream_backward import stream_query_kernel
from sfiformer.attention.kernels.stream_forward import stream_forward_kernel


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
    """The buckets in use, the slowest first, each with the size that it starts above and the number of its tiles."""
    below = (0, *(bucket.keys for bucket in BUCKETS))
    for bucket, more_than in reversed(list(zip(BUCKETS, below, strict=False))):
        if nodes and more_than < min(max_nodes, MAX_NODES):
            yield bucket, more_than, nodes // bucket.rows + graphs


def _tile_options(
    bucket: Bucket, below: int, q: Tensor, dense: bool, potential: bool, dropout_p: float
) -> dict[str, Any]:
    """Compile-time settings of the kernels with rows on chip."""
    half = q.element_size() == 2
    return {
        "ROWS": bucket.rows,
        "KEYS": bucket.keys,
        "MORE_THAN": below,
        "WIDTH": _chunk(q.shape[2]) if half else 16,
        "POTENTIAL": potential,
        "DENSE": dense,
        "DROPOUT": dropout_p > 0,
        "PRECISION": _precision(q, long=bucket.keys > 128),
        "LOG_GENTLE": _log_gentle(q),
        "num_warps": bucket.warps,
        "num_stages": 2 if half else 1,
        # The backward must find the forward's scores again, to the bit: no product may melt into a later subtraction.
        "enable_fp_fusion": False,
    }


def _chunk(width: int) -> int:
    """Columns of a head at a time: many where heads are wide, and few where more would be padding."""
    if width >= 128:
        return 64
    return 32 if width % 32 == 0 else 16


def _log_gentle(q: Tensor) -> float:
    """Up to which log η p_max rows on chip need no pivot. What is lost grows with η, and half precision loses more itself."""
    return math.log(1024) if q.element_size() == 2 else STRICT


def _precision(q: Tensor, *, long: bool = False) -> str:
    """Of products. Where TF32 is not allowed, three TF32 products make one of float32's accuracy.

    In long rows on chip those three spill the registers; there, plain multiplications are faster.
    """
    if q.element_size() == 2:
        return "ieee"
    if torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return "ieee" if long else "tf32x3"


STRICT = 3.5  # log κ f_k of streamed rows up to which the backward needs no pivot
# The error of a streamed row's flows, at worst: well below the rounding of its output.
DOUBT = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}


class Stream(NamedTuple):
    """Tiles of ``rows`` nodes that stay while blocks of ``keys`` stream past."""

    rows: int
    keys: int
    warps: int
    stages: int


def _stream_options(tile: Stream, q: Tensor, v: Tensor, potential: bool, dropout_p: float) -> dict[str, Any]:
    """Compile-time settings of the streaming kernels: a tile holds whole heads, padded to a power of two on chip."""
    return {
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "WIDTH": _padded(q.shape[2]),
        "VALUE_WIDTH": _padded(v.shape[2]),
        "POTENTIAL": potential,
        "DROPOUT": dropout_p > 0,
        "PRECISION": _precision(q),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _stream_tiles(q: Tensor, v: Tensor, max_nodes: int) -> tuple[Stream, Stream, Stream, Stream]:
    """Tiles of the forward, of the backward's queries and of its keys, and of rows measured from a pivot."""
    width, half = _padded(max(q.shape[2], v.shape[2])), q.element_size() == 2
    steep = Stream(32, 32, 4, 1)
    if half and width <= 64:
        keys = Stream(64, 32, 4, 2) if max_nodes > MAX_NODES else Stream(32, 32, 4, 1)
        keys = Stream(64, 64, 4, 1) if width <= 32 else keys
        return Stream(128, 64, 8, 3), Stream(128, 64, 8, 3), keys, steep
    if half and width <= 128:
        return Stream(64, 32, 8, 2), Stream(64, 32, 8, 2), Stream(32, 64, 4, 1), steep
    if half:
        return Stream(64, 32, 8, 2), Stream(32, 64, 8, 2), Stream(32, 64, 8, 2), steep
    if width <= 64:
        return Stream(64, 32, 8, 2), Stream(64, 32, 8, 1), Stream(64, 32, 8, 1), steep
    return Stream(32, 32, 8, 1), Stream(32, 32, 8, 1), Stream(32, 32, 8, 1), steep._replace(rows=16, warps=8)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [N, heads, width of v], and what the backward needs. The plain twin is `packed_attention`.

    That is nine numbers a row, [9, N, heads], and where graphs are streamed two more, the number of sweeps over their keys
    (negative where a row was measured from a pivot) and the pivot, and O₂ = Σ_A p v / W and O − O₂, [2, N, heads, width of
    v] in float32 (else empty). Without q_friction and k_friction there is no friction (λ = 0): softmax attention where alpha
    is infinite; such graphs are not streamed.
    """
    nodes, heads, width = q.shape
    out = torch.empty_like(v)
    streamed = max_nodes > MAX_NODES
    stats = q.new_empty((9 + 2 * streamed, nodes, heads), dtype=torch.float32)
    stats[9:] = 0  # no sweeps where rows stay on chip
    means = v.new_zeros((2, *v.shape) if streamed else (2, 0), dtype=torch.float32)
    graphs = len(ptr) - 1
    log_alpha, hard = 0.0 if math.isinf(alpha) else math.log(alpha), potential or math.isinf(alpha)
    sizes = (log_alpha, scale, dropout_p, graphs, heads, width, v.shape[2], nodes * heads)
    branches = Branches("buckets", q)
    # Half of the registers hold a gentle tile: twice as many programs at a time.
    lean = {"maxnreg": 128} if q.element_size() == 2 and q.is_cuda else {}
    for bucket, below, tiles in _launches(graphs, nodes, max_nodes):
        options = _tile_options(bucket, below, q, q_friction is None, potential, dropout_p)
        with branches.next():
            forward_kernel[(tiles, heads)](
                q,
                k,
                v,
                q_friction,
                k_friction,
                out,
                stats,
                ptr,
                lam,
                seed,
                *sizes,
                HARD=hard,
                **options,
                **lean,
            )
    if streamed:
        tensors = (q, k, v, q_friction, k_friction, out, *means, stats, ptr, lam, seed)
        tile, _, _, steep = _stream_tiles(q, v, max_nodes)
        options = _stream_options(tile, q, v, potential, dropout_p)
        stream_forward_kernel[(nodes // tile.rows + graphs, heads)](
            *tensors,
            *sizes,
            MORE_THAN=MAX_NODES,
            HARD=hard,
            DOUBT=DOUBT[q.dtype],
            LOG_GENTLE=_log_gentle(q),
            **options,
        )
        options = _stream_options(steep, q, v, potential, dropout_p)
        pivot_forward_kernel[(nodes // steep.rows + graphs, heads)](
            *tensors, *sizes, MORE_THAN=MAX_NODES, HARD=hard, LOG_GENTLE=STRICT, **options
        )
    branches.join()
    return out, stats, means


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
    means: Tensor,
    potential: bool,
    scale: float,
    dropout_p: float,
    max_nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, q_friction, k_friction (empty where there are none) and lam."""
    nodes, heads, width = q.shape
    of_q, of_k, of_v, of_q_friction, of_k_friction = _like(q, k, v, q_friction, k_friction)
    sums = q.new_empty((7, nodes, heads), dtype=torch.float32)
    graphs, dense = len(ptr) - 1, q_friction is None
    plain = sums.new_empty((7, heads, nodes))  # of gentle rows, for the keys
    found = torch.zeros((graphs, heads), dtype=torch.int32, device=q.device)  # whether there are other rows
    inputs = (q, k, v, q_friction, k_friction, grad_out.contiguous())
    tail = (stats, sums, ptr, seed, scale, dropout_p, graphs, heads, width, v.shape[2], nodes * heads)
    _, queries, keys, steep = _stream_tiles(q, v, max_nodes)

    def run(kernel: Any, tile: Stream, *tensors: Tensor, **more: Any) -> None:
        options = _stream_options(tile, q, v, potential, dropout_p)
        kernel[(nodes // tile.rows + graphs, heads)](*inputs, *tensors, *tail, **options, **more)

    large = {"MORE_THAN": MAX_NODES, "LOG_GENTLE": STRICT}
    branches = Branches("buckets", q)
    for bucket, below, tiles in _launches(graphs, nodes, max_nodes):
        options = _tile_options(bucket, below, q, dense, potential, dropout_p)
        with branches.next():
            query_kernel[(tiles, heads)](*inputs, of_q, of_q_friction, plain, found, *tail, **options)
    if max_nodes > MAX_NODES:
        run(stream_query_kernel, queries, *means, of_q, of_q_friction, plain, **large)
        run(pivot_query_kernel, steep, of_q, of_q_friction, found, **large)
    branches.join()
    if nodes:
        run(key_kernel, keys, of_k, of_v, of_k_friction, plain, DENSE=dense)
    if nodes and not dense:
        run(pivot_key_kernel, steep, of_k, of_v, of_k_friction, found, ON_CHIP=_log_gentle(q), **large)
    grad_log_kappa = sums[3].sum(-1) if nodes else q.new_zeros(0, dtype=torch.float32)
    by_graph = torch.segment_reduce(grad_log_kappa, "sum", offsets=ptr, initial=0.0)
    grad_lam = torch.where(lam > 0, by_graph / lam.clamp(min=torch.finfo(lam.dtype).tiny), 0).to(lam.dtype)
    return of_q, of_k, of_v, of_q_friction, of_k_friction, grad_lam


@fused_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    streamed = args[-1] > MAX_NODES
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
