"""Kernels that take a joint product apart into heads, normalised, and put their gradients together again.

A program owns a node: its row of the product is read and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def split_part(
    packed, out, scales, node, eps, PART: tl.constexpr, PARTS: tl.constexpr, NORMED: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One part of a node's row, [heads, width]."""
    heads, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (heads < HEADS)[:, None] & (columns < WIDTH)[None, :]
    place = heads[:, None] * WIDTH + columns[None, :]
    x = tl.load(packed + (node * PARTS + PART) * HEADS * WIDTH + place, mask=inside, other=0.0)
    if PART < NORMED:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
        tl.store(scales + (node * NORMED + PART) * HEADS + heads, scale, mask=heads < HEADS)
        x = wide * scale[:, None]
    tl.store(out + node * HEADS * WIDTH + place, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def join_part(
    packed, grad, scales, of_packed, node, PART: tl.constexpr, PARTS: tl.constexpr, NORMED: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """With y = x r, r = (mean(x²) + eps)^(−1/2): ∂L/∂x = r (g − y · mean(g y))."""
    heads, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (heads < HEADS)[:, None] & (columns < WIDTH)[None, :]
    place = heads[:, None] * WIDTH + columns[None, :]
    g = tl.load(grad + node * HEADS * WIDTH + place, mask=inside, other=0.0)
    at = (node * PARTS + PART) * HEADS * WIDTH + place
    if PART < NORMED:
        scale = tl.load(scales + (node * NORMED + PART) * HEADS + heads, mask=heads < HEADS, other=0.0)[
            :, None
        ]
        y = tl.load(packed + at, mask=inside, other=0.0).to(tl.float32) * scale
        g = g.to(tl.float32)
        g = scale * (g - y * (tl.sum(g * y, 1) / WIDTH)[:, None])
    tl.store(of_packed + at, g.to(of_packed.dtype.element_ty), mask=inside)


@triton.jit
def one_part(
    packed, part, scales, of_packed, node, eps, PART: tl.constexpr, PARTS: tl.constexpr, NORMED: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if of_packed is None:
        split_part(packed, part, scales, node, eps, PART, PARTS, NORMED, HEADS, WIDTH, ROWS, COLUMNS)
    else:
        join_part(packed, part, scales, of_packed, node, PART, PARTS, NORMED, HEADS, WIDTH, ROWS, COLUMNS)


@triton.jit
def parts_kernel(
    packed, part0, part1, part2, part3, part4, scales, of_packed, eps, PARTS: tl.constexpr, NORMED: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A node's parts out of its row, or their gradients into that of the row."""
    node = tl.program_id(0).to(tl.int64)
    one_part(packed, part0, scales, of_packed, node, eps, 0, PARTS, NORMED, HEADS, WIDTH, ROWS, COLUMNS)
    one_part(packed, part1, scales, of_packed, node, eps, 1, PARTS, NORMED, HEADS, WIDTH, ROWS, COLUMNS)
    if PARTS > 2:
        one_part(packed, part2, scales, of_packed, node, eps, 2, PARTS, NORMED, HEADS, WIDTH, ROWS, COLUMNS)
    if PARTS > 3:
        one_part(packed, part3, scales, of_packed, node, eps, 3, PARTS, NORMED, HEADS, WIDTH, ROWS, COLUMNS)
    if PARTS > 4:
        one_part(packed, part4, scales, of_packed, node, eps, 4, PARTS, NORMED, HEADS, WIDTH, ROWS, COLUMNS)


def split(packed: Tensor, normed: int, eps: float) -> list[Tensor]:
    """As `sfiformer.attention.heads.split_heads`, for two to five parts, and the scales."""
    nodes, parts, heads, width = packed.shape
    outs = [packed.new_empty((nodes, heads, width)) for _ in range(parts)]
    scales = packed.new_empty((nodes, normed, heads), dtype=torch.float32)
    if nodes:
        parts_kernel[(nodes,)](packed, *_five(outs), scales, None, eps, parts, normed, **_tile(heads, width))
    return [*outs, scales]


def join(grads: list[Tensor], packed: Tensor, scales: Tensor) -> Tensor:
    nodes, parts, heads, width = packed.shape
    out = torch.empty_like(packed)
    if nodes:
        parts_kernel[(nodes,)](
            packed, *_five(grads), scales, out, 0.0, parts, scales.size(1), **_tile(heads, width)
        )
    return out


def _five(tensors: list[Tensor]) -> list[Tensor]:
    """A kernel must be given something for what it will not touch."""
    return [*tensors, *tensors[:1] * 3][:5]


def _tile(heads: int, width: int) -> dict[str, int]:
    rows, columns = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    warps = max(1, min(8, rows * columns // 256))
    return {"HEADS": heads, "WIDTH": width, "ROWS": rows, "COLUMNS": columns, "num_warps": warps}
