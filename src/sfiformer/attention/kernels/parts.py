"""The projections of a layer taken apart: queries and keys divided by their root mean square, values as they are.

One kernel forward and one backward in place of a norm and of a copy of each part, which the attention wants contiguous. The
plain twin is `SFiAttention._normalised`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 2048, 4  # entries of a tile


@triton.jit
def tile_of(rows, columns, part, PARTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets into [N, PARTS, HEADS, WIDTH] of rows of one part, numbered as in [N, HEADS, WIDTH]."""
    rows = rows.to(tl.int64)
    return ((rows // HEADS * (PARTS - 1) + part) * HEADS + rows)[:, None] * WIDTH + columns[None, :]


@triton.jit(do_not_specialize=["size"])
def forward_kernel(
    packed, out, size, eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows, columns, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS), tl.program_id(1)
    mask = (rows < size)[:, None] & (columns < WIDTH)[None, :]
    at = tile_of(rows, columns, part, PARTS, HEADS, WIDTH)
    x = tl.load(packed + at, mask=mask, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
    x *= tl.where(part < PARTS - 1, scale, 1.0)[:, None]
    at = (part * size + rows).to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size"])
def backward_kernel(
    grad_0, grad_1, grad_2, grad_3, grad_4, packed, of_packed, size, eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """∂L/∂x = s (g − x s² mean(g x)) with s = 1 / rms(x); g for the values."""
    rows, columns, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS), tl.program_id(1)
    mask = (rows < size)[:, None] & (columns < WIDTH)[None, :]
    grad = grad_0
    if part == 1:
        grad = grad_1
    if part == 2:
        grad = grad_2
    if part == 3:
        grad = grad_3
    if part == 4:
        grad = grad_4
    own = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    g = tl.load(grad + own, mask=mask, other=0.0).to(tl.float32)
    at = tile_of(rows, columns, part, PARTS, HEADS, WIDTH)
    if part < PARTS - 1:
        x = tl.load(packed + at, mask=mask, other=0.0).to(tl.float32)
        scale = 1 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
        along = tl.sum(g * x, 1) / WIDTH * scale * scale
        g = (g - x * along[:, None]) * scale[:, None]
    tl.store(of_packed + at, g.to(of_packed.dtype.element_ty), mask=mask)


def normalised_parts(packed: Tensor, eps: float) -> tuple[Tensor, ...]:
    """[N, 3 or 5, heads, width] → 3 or 5 of [N, heads, width], contiguous: x / √(mean(x²) + ε), and the last as it is."""
    return _Parts.apply(packed.contiguous(), eps)


class _Parts(torch.autograd.Function):
    # Outputs that share their memory are not for an operator, hence a function around one.

    @staticmethod
    def forward(ctx: Any, packed: Tensor, eps: float) -> tuple[Tensor, ...]:
        ctx.save_for_backward(packed)
        ctx.eps = eps
        return taken_apart(packed, eps).unbind()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return taken_apart_backward([grad.contiguous() for grad in grads], *ctx.saved_tensors, ctx.eps), None


def _launch(packed: Tensor) -> tuple[tuple[int, int], int, dict[str, int]]:
    nodes, parts, heads, width = packed.shape
    cols = triton.next_power_of_2(width)
    rows = max(1, TILE // cols)
    sizes = {
        "PARTS": parts,
        "HEADS": heads,
        "WIDTH": width,
    }  # known when compiled, so that loads are as wide as can be
    options = {**sizes, "ROWS": rows, "COLS": cols, "num_warps": WARPS}
    return (-(-nodes * heads // rows), parts), nodes * heads, options


@torch.library.custom_op("sfiformer::taken_apart", mutates_args=())
def taken_apart(packed: Tensor, eps: float) -> Tensor:
    """[N, parts, heads, width] → [parts, N, heads, width], all but the last part normalised."""
    out = torch.empty_like(packed.transpose(0, 1), memory_format=torch.contiguous_format)
    grid, size, options = _launch(packed)
    if out.numel():
        forward_kernel[grid](packed, out, size, eps, **options)
    return out


@torch.library.custom_op("sfiformer::taken_apart_backward", mutates_args=())
def taken_apart_backward(grads: Sequence[Tensor], packed: Tensor, eps: float) -> Tensor:
    """The gradient of ``packed`` from those of the parts."""
    out = torch.empty_like(packed)
    grid, size, options = _launch(packed)
    if out.numel():
        grads = [*grads, *[packed] * (5 - len(grads))]  # the rest is not read
        backward_kernel[grid](*grads, packed, out, size, eps, **options)
    return out


@taken_apart.register_fake
def _(packed: Tensor, eps: float) -> Tensor:
    return torch.empty_like(packed.transpose(0, 1), memory_format=torch.contiguous_format)


@taken_apart_backward.register_fake
def _(grads: Sequence[Tensor], packed: Tensor, eps: float) -> Tensor:
    return torch.empty_like(packed)
