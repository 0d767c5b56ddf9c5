"""Rows between two products, on the device: activation, dropout, and the columns that the next product takes."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfiformer.nn.kernels.row_tiles import activated, draw, drop_numbers, kept, load_tile, slope

SUB, COLS = 8, 32  # a tile is 8 · SUB rows of COLS columns
WARPS = 4


@triton.jit(do_not_specialize=["size"])
def hidden_kernel(
    x, out, seed, below, factor, size, WIDTH: tl.constexpr, OUT: tl.constexpr, KEPT: tl.constexpr,
    SUB: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dropout(act(x)) of the first KEPT columns of rows of WIDTH as rows of OUT, with a one and zeros behind them."""
    start = tl.program_id(0) * 8 * SUB
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    behind = tl.where(columns == KEPT, 1.0, 0.0)
    at = (tl.full((), 0, tl.int64) + start) * OUT
    # All columns are loaded, also those behind KEPT: rows that end where a multiple of 8 does are read 16 bytes at a time.
    tile = load_tile(x, start, size, columns, SUB, WIDTH)
    if DROPOUT:
        words = draw(seed, start, columns, SUB)
    for j in tl.static_range(8):
        local = j * SUB + tl.arange(0, SUB)
        y = activated(tile[j].to(tl.float32), ACTIVATION)
        if DROPOUT:
            y = y * kept(words, below, factor, j)
        y = tl.where((columns < KEPT)[None, :], y, behind[None, :])
        mask = (start + local < size)[:, None] & (columns < OUT)[None, :]
        offsets = local[:, None] * OUT + columns[None, :]
        tl.store(out + at + offsets, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size"])
def hidden_gradient_kernel(
    grad_out, x, grad_x, seed, below, factor, size, WIDTH: tl.constexpr, OUT: tl.constexpr, KEPT: tl.constexpr,
    SUB: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """∂L/∂x = mask · act'(x) · ∂L/∂out, with the mask that the forward drew; 0 behind the first KEPT columns."""
    start = tl.program_id(0) * 8 * SUB
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    at = (tl.full((), 0, tl.int64) + start) * WIDTH
    tile = load_tile(x, start, size, columns, SUB, WIDTH)
    grads = load_tile(grad_out, start, size, columns, SUB, OUT)
    if DROPOUT:
        words = draw(seed, start, columns, SUB)
    for j in tl.static_range(8):
        local = j * SUB + tl.arange(0, SUB)
        grad = grads[j].to(tl.float32)
        if ACTIVATION is not None:
            grad = grad * slope(tile[j].to(tl.float32), ACTIVATION)
        if DROPOUT:
            grad = grad * kept(words, below, factor, j)
        grad = tl.where((columns < KEPT)[None, :], grad, 0.0)
        mask = (start + local < size)[:, None] & (columns < WIDTH)[None, :]
        offsets = local[:, None] * WIDTH + columns[None, :]
        tl.store(grad_x + at + offsets, grad.to(grad_x.dtype.element_ty), mask=mask)


def forward(
    x: Tensor,
    seed: Tensor | None,
    width: int,
    dtype: torch.dtype,
    kept: int,
    activation: str | None,
    dropout: float,
) -> Tensor:
    """As `sfiformer.nn.hidden.hidden_rows`."""
    out = x.new_empty((x.size(0), width), dtype=dtype)
    _launch(hidden_kernel, (x.contiguous(), out), x, seed, width, kept, activation, dropout)
    return out


def backward(
    grad_out: Tensor,
    x: Tensor,
    seed: Tensor | None,
    kept: int,
    activation: str | None,
    dropout: float,
) -> Tensor:
    """The gradient of x, from that of the rows made of it."""
    grad_x = x.new_empty(x.shape)
    tensors = (grad_out.contiguous(), x.contiguous(), grad_x)
    _launch(hidden_gradient_kernel, tensors, x, seed, grad_out.size(1), kept, activation, dropout)
    return grad_x


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    x: Tensor,
    seed: Tensor | None,
    width: int,
    kept: int,
    activation: str | None,
    dropout: float,
) -> None:
    rows, own = x.shape
    if rows:
        # A kernel must be given something for a seed that it will not read.
        kernel[triton.cdiv(rows, 8 * SUB), triton.cdiv(max(own, width), COLS)](
            *tensors, x if seed is None else seed, *drop_numbers(dropout), rows, own, width, kept,
            SUB, COLS, activation, seed is not None, num_warps=WARPS,
        )  # fmt: skip
