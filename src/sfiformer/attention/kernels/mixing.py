"""The end of the attention layer, LayerNorm(t Ã… + (1 − t) Z… + b) with t = 1/(1 + γ), as one kernel, and two backward.

The plain twin is in `SFiAttention.forward`. Whole rows are on chip, so the backward makes them anew: nothing is kept for it.
Sums over rows are made in at most PARTS pieces and put together in one order. No atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfiformer.operators import operator

PARTS = 1024  # pieces of a sum over rows
TILE, WARPS = 2048, 8  # entries of a tile


@triton.jit
def near_share(raw_gamma):
    """t = 1 / (1 + softplus(raw γ))."""
    raw = tl.load(raw_gamma)
    return 1 / (1 + tl.maximum(raw, 0.0) + tl.log(1 + tl.exp(-tl.abs(raw))))


@triton.jit
def normalised(near, far, bias, share, at, mask, inside, eps, DIM: tl.constexpr):
    """x̂ [ROWS, COLS], its 1/deviation [ROWS], and what the share multiplies."""
    far = tl.load(far + at, mask=mask, other=0.0).to(tl.float32)
    apart = tl.load(near + at, mask=mask, other=0.0).to(tl.float32) - far
    y = far + share * apart + bias[None, :]
    mean = tl.sum(tl.where(inside[None, :], y, 0.0), 1) / DIM
    y = tl.where(inside[None, :], y - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(y * y, 1) / DIM + eps)
    return y * scale[:, None], scale, apart


@triton.jit(do_not_specialize=["size"])
def forward_kernel(
    near, far, raw_gamma, bias, gain, shift, out, size, eps,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    inside = columns < DIM
    mask = (rows < size)[:, None] & inside[None, :]
    own = tl.load(bias + columns, mask=inside, other=0.0)
    by, to = tl.load(gain + columns, mask=inside, other=0.0), tl.load(shift + columns, mask=inside, other=0.0)
    at = rows[:, None].to(tl.int64) * WIDE + columns[None, :]
    x, _, _ = normalised(near, far, own, near_share(raw_gamma), at, mask, inside, eps, DIM)
    at = rows[:, None].to(tl.int64) * DIM + columns[None, :]
    tl.store(out + at, x * by[None, :] + to[None, :], mask=mask)


@triton.jit(do_not_specialize=["size"])
def backward_kernel(
    grad, near, far, raw_gamma, bias, gain, of_near, of_far, sums, of_share, size, stride, eps,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """∂L/∂near and ∂L/∂far; over one piece of the rows Σ g x̂, Σ g, Σ ∂L/∂y, [3, PARTS, dim], and ∂L/∂t, [PARTS]."""
    part, parts, columns = tl.program_id(0), tl.num_programs(0), tl.arange(0, COLS)
    inside = columns < DIM
    share = near_share(raw_gamma)
    own = tl.load(bias + columns, mask=inside, other=0.0)
    by = tl.load(gain + columns, mask=inside, other=0.0)
    # Each place of the tile adds up its own rows; warps wait for one another once, at the end.
    by_x, plain = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    of_own, mixed = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for start in range(part * ROWS, size, parts * ROWS):
        rows = start + tl.arange(0, ROWS)
        real = (rows < size)[:, None]
        mask = real & inside[None, :]
        at = rows[:, None].to(tl.int64) * WIDE + columns[None, :]
        of_x = tl.load(grad + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=mask, other=0.0)
        of_x = of_x.to(tl.float32)
        x, scale, apart = normalised(near, far, own, share, at, mask, inside, eps, DIM)
        by_x += of_x * x
        plain += of_x
        of_x *= by[None, :]
        of_y = of_x - (tl.sum(of_x, 1) / DIM)[:, None] - x * (tl.sum(of_x * x, 1) / DIM)[:, None]
        of_y = tl.where(mask, of_y * scale[:, None], 0.0)
        of_own += of_y
        mixed += of_y * apart
        whole = real & (columns < WIDE)[None, :]  # columns of padding get 0
        tl.store(of_near + at, (of_y * share).to(of_near.dtype.element_ty), mask=whole)
        tl.store(of_far + at, (of_y * (1 - share)).to(of_far.dtype.element_ty), mask=whole)
    at = sums + part * DIM + columns
    tl.store(at, tl.sum(by_x, 0), mask=inside)
    tl.store(at + parts * DIM, tl.sum(plain, 0), mask=inside)
    tl.store(at + 2 * parts * DIM, tl.sum(of_own, 0), mask=inside)
    tl.store(of_share + part, tl.sum(tl.sum(mixed, 0), 0))


@triton.jit(do_not_specialize=["parts"])
def sums_kernel(
    sums, of_share, raw_gamma, of_vectors, of_gamma, parts, dim, PARTS: tl.constexpr, COLS: tl.constexpr
):
    """The pieces put together: gradients of gain, shift and bias, [3, dim], and of the raw γ."""
    part, columns = tl.arange(0, PARTS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    at = (tl.program_id(0) * parts + part)[:, None] * dim + columns[None, :]
    pieces = tl.load(sums + at, mask=(part < parts)[:, None] & (columns < dim)[None, :], other=0.0)
    tl.store(of_vectors + tl.program_id(0) * dim + columns, tl.sum(pieces, 0), mask=columns < dim)
    if tl.program_id(0) + tl.program_id(1) == 0:
        total = tl.sum(tl.load(of_share + part, mask=part < parts, other=0.0), 0)
        share = near_share(raw_gamma)
        tl.store(of_gamma, -total * share * share / (1 + tl.exp(-tl.load(raw_gamma))))


def _tiles(near: Tensor, dim: int) -> tuple[int, dict[str, int]]:
    """The number of tiles, and their compile-time settings. A row's padding is part of its tile."""
    cols = triton.next_power_of_2(max(near.size(1), dim))
    rows = max(1, TILE // cols)
    sizes = {"DIM": dim, "WIDE": near.size(1)}  # known when compiled, so that loads are as wide as can be
    return -(-near.size(0) // rows), {**sizes, "ROWS": rows, "COLS": cols, "num_warps": WARPS}


@operator("sfiformer::mixed_norm")
def mixed_norm(
    near: Tensor, far: Tensor, raw_gamma: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, eps: float
) -> Tensor:
    """LayerNorm(t near + (1 − t) far + bias), t = 1/(1 + softplus(raw_gamma)), over the first columns: [N, ≥ d] → [N, d].

    In float32, whatever the dtype of near and far, which are contiguous.
    """
    out = bias.new_empty(near.size(0), bias.size(0))
    tiles, options = _tiles(near, bias.size(0))
    if tiles:
        forward_kernel[(tiles,)](near, far, raw_gamma, bias, gain, shift, out, near.size(0), eps, **options)
    return out


@operator("sfiformer::mixed_norm_backward")
def mixed_norm_backward(
    grad: Tensor, near: Tensor, far: Tensor, raw_gamma: Tensor, bias: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of near and far, of the raw γ, and of gain, shift and bias, [3, d]."""
    of_near, of_far, of_gamma, of_vectors = _gradients(near, far, raw_gamma, bias)
    dim = bias.size(0)
    tiles, options = _tiles(near, dim)
    parts = max(1, min(PARTS, tiles))
    sums, of_share = bias.new_empty(3 * parts * dim), bias.new_empty(parts)
    backward_kernel[(parts,)](
        grad, near, far, raw_gamma, bias, gain, of_near, of_far, sums, of_share,
        near.size(0), grad.stride(0), eps, **options,
    )  # fmt: skip
    sums_kernel[(3, -(-dim // 8))](
        sums, of_share, raw_gamma, of_vectors, of_gamma, parts, dim, PARTS=PARTS, COLS=8, num_warps=WARPS
    )
    return of_near, of_far, of_gamma, of_vectors


def _gradients(
    near: Tensor, far: Tensor, raw_gamma: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vectors = bias.new_empty(3, bias.size(0))
    return torch.empty_like(near), torch.empty_like(far), torch.empty_like(raw_gamma), vectors


@mixed_norm.register_fake
def _(near: Tensor, far: Tensor, raw_gamma: Tensor, bias: Tensor, *args: Any) -> Tensor:
    return bias.new_empty(near.size(0), bias.size(0))


@mixed_norm_backward.register_fake
def _(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(*args[:4])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    near, far, raw_gamma, bias, gain, _, ctx.eps = inputs
    ctx.save_for_backward(near, far, raw_gamma, bias, gain)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    of_near, of_far, of_gamma, of_vectors = mixed_norm_backward(grad, *ctx.saved_tensors, ctx.eps)
    of_gain, of_shift, of_bias = of_vectors.unbind()
    return of_near, of_far, of_gamma, of_bias, of_gain, of_shift, None


mixed_norm.register_autograd(_backward, setup_context=_setup_context)
