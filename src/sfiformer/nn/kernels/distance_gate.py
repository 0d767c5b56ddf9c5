"""GatedGCN's gate by distances, g(t) = sigmoid(w · act(h) + c) with h = v t + b, fused over its d channels: one kernel forward,
two backward (`sfiformer.nn.distance_gate`).

A tile is ROWS edges by all channels, GROUPS of LANES of them, and h is made anew for the backward. A thread has one edge and a
channel of each group, so that most of a sum over channels stays in it. Sums over edges are made in at most PIECES pieces, in
float32, and put together in one order: there are no atomics, and two runs agree to the bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfiformer.nn.kernels.row_tiles import PIECES, activated, slope, sum_pieces

GROUPS, WARPS = 8, 8


@triton.jit
def load_channels(base, WIDTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """[GROUPS, 1, LANES] of a vector of parameters; 0 beyond."""
    channels = tl.arange(0, GROUPS)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
    return tl.load(base + channels, mask=channels < WIDTH, other=0.0)


@triton.jit
def store_channels(base, sums, WIDTH: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """The sum over the edges of a tile."""
    channels = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tl.store(base + channels, tl.sum(sums, 1), mask=channels < WIDTH)


@triton.jit
def over_channels(x):
    """[GROUPS, ROWS, LANES] → [ROWS], first within threads."""
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit(do_not_specialize=["size"])
def forward_kernel(
    distance, first_weight, first_bias, last_weight, last_bias, gate, size,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """g of one piece of the edges."""
    v = load_channels(first_weight, WIDTH, GROUPS, LANES)
    b = load_channels(first_bias, WIDTH, GROUPS, LANES)
    w = load_channels(last_weight, WIDTH, GROUPS, LANES)
    c = tl.load(last_bias)
    for start in range(tl.program_id(0) * ROWS, size, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        t = tl.load(distance + rows, mask=rows < size, other=0.0).to(tl.float32)
        h = v * t[None, :, None] + b  # [GROUPS, ROWS, LANES]
        z = over_channels(activated(h, ACTIVATION) * w) + c
        tl.store(gate + rows, tl.sigmoid(z), mask=rows < size)


@triton.jit(do_not_specialize=["size"])
def backward_kernel(
    of_gate, gate, distance, first_weight, first_bias, last_weight, of_distance, sums, size,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """∂L/∂t = v · ∂L/∂h; over one piece of the edges Σ t ∂L/∂h, Σ ∂L/∂h, Σ act(h) ∂L/∂z and Σ ∂L/∂z, [PIECES, 3 d + 1].

    ∂L/∂z = ∂L/∂g g (1 − g) and ∂L/∂h = ∂L/∂z w ⊙ act'(h).
    """
    v = load_channels(first_weight, WIDTH, GROUPS, LANES)
    b = load_channels(first_bias, WIDTH, GROUPS, LANES)
    w = load_channels(last_weight, WIDTH, GROUPS, LANES)
    # Each place of the tile adds up its own edges; warps wait for one another once, at the end.
    of_v = tl.zeros([GROUPS, ROWS, LANES], tl.float32)
    of_b = tl.zeros([GROUPS, ROWS, LANES], tl.float32)
    of_w = tl.zeros([GROUPS, ROWS, LANES], tl.float32)
    of_c = tl.zeros([ROWS], tl.float32)
    for start in range(tl.program_id(0) * ROWS, size, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        t = tl.load(distance + rows, mask=rows < size, other=0.0).to(tl.float32)
        g = tl.load(gate + rows, mask=rows < size, other=0.0)
        of_z = tl.load(of_gate + rows, mask=rows < size, other=0.0).to(tl.float32) * g * (1 - g)
        h = v * t[None, :, None] + b  # [GROUPS, ROWS, LANES]
        of_h = of_z[None, :, None] * w * slope(h, ACTIVATION)
        of_v += t[None, :, None] * of_h
        of_b += of_h
        of_w += of_z[None, :, None] * activated(h, ACTIVATION)
        of_c += of_z
        if of_distance is not None:
            of_t = over_channels(of_h * v).to(of_distance.dtype.element_ty)
            tl.store(of_distance + rows, of_t, mask=rows < size)
    sums += tl.program_id(0) * (3 * WIDTH + 1)
    store_channels(sums, of_v, WIDTH, GROUPS, LANES)
    store_channels(sums + WIDTH, of_b, WIDTH, GROUPS, LANES)
    store_channels(sums + 2 * WIDTH, of_w, WIDTH, GROUPS, LANES)
    tl.store(sums + 3 * WIDTH, tl.sum(of_c, 0))


def forward(
    distance: Tensor,
    first_weight: Tensor,
    first_bias: Tensor,
    last_weight: Tensor,
    last_bias: Tensor,
    activation: str,
) -> Tensor:
    """g, [E, 1] in float32."""
    gate = distance.new_empty(distance.shape, dtype=torch.float32)
    size, width = distance.numel(), first_bias.numel()
    if size:
        programs, tile = _tiles(size, width)
        forward_kernel[(programs,)](
            distance.contiguous(), first_weight, first_bias, last_weight, last_bias, gate, size,
            width, *tile, activation, num_warps=WARPS,
        )  # fmt: skip
    return gate


def backward(
    of_gate: Tensor,
    gate: Tensor,
    distance: Tensor,
    first_weight: Tensor,
    first_bias: Tensor,
    last_weight: Tensor,
    activation: str,
    of_distance: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the distance (empty unless ``of_distance``), and of the parameters one behind the other, [3 d + 1]."""
    size, width = distance.numel(), first_bias.numel()
    programs, tile = _tiles(size, width)
    of_t = distance.new_empty(distance.shape if of_distance else 0)
    sums = first_bias.new_empty((programs, 3 * width + 1))
    backward_kernel[(programs,)](
        of_gate.contiguous(), gate, distance.contiguous(), first_weight, first_bias, last_weight,
        of_t if of_distance else None, sums, size, width, *tile, activation, num_warps=WARPS,
    )  # fmt: skip
    return of_t, sum_pieces(sums)


def _tiles(size: int, width: int) -> tuple[int, tuple[int, int, int]]:
    """Programs, one at least, and groups, rows and lanes of a tile."""
    lanes = triton.next_power_of_2(triton.cdiv(width, GROUPS))
    rows = max(1, 32 * WARPS // lanes)
    return max(1, min(PIECES, triton.cdiv(size, rows))), (GROUPS, rows, lanes)
