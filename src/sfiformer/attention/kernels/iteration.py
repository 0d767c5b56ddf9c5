"""The paper's iteration, a kernel for each step and one for its derivative: `sfiformer.flow.Proximal` row by row.

All flows of a matrix (a graph and head) have one step length, made of sums over the whole of it. Each row leaves its share of
them behind, and every row of the next step adds these up again. Matrices stand side by side, [graphs, heads, size, size]; what
lies beyond the nodes of a graph is padding, and is not even looked at.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfiformer.attention.kernels.energies import STARTS, energy_kernel, score_kernel, tile


@triton.jit
def slope_at(z, resistance, inside, ALPHA: tl.constexpr):
    """∇ of the smooth part, R∘z + α (Σz − 1), where there is a key."""
    return tl.where(inside, resistance * z + ALPHA * (tl.sum(z, 0) - 1), 0)


@triton.jit
def matrix_sum(shares, first, end, BLOCK: tl.constexpr):
    """Σ of what the rows of a matrix left behind."""
    at = tl.arange(0, BLOCK)
    return tl.sum(tl.load(shares + first + at, mask=at < end, other=0.0), 0)


@triton.jit
def next_length(sums, rows, first, end, BLOCK: tl.constexpr):
    """⟨ΔZ, Δ∇⟩ / ‖Δ∇‖², whether that is a step length, and ‖Δ∇‖² (1 where it is not)."""
    along = matrix_sum(sums, first, end, BLOCK)
    bend = matrix_sum(sums + rows, first, end, BLOCK)
    usable = (bend > 0) & (along > 0)
    bend = tl.where(usable, bend, 1)
    return along / bend, usable, bend


@triton.jit(do_not_specialize=["rows", "size", "heads"])
def step_kernel(
    resistance, friction, lam, sizes, before, after, lengths, lengths_before, sums, sums_before, rows, size, heads,
    FIRST: tl.constexpr, ALPHA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of one row; the first row of a matrix says how long it was: from 1/(1 + α n) on."""
    row = tl.program_id(0).to(tl.int64)
    matrix = row // size
    first, end = matrix * size, tl.load(sizes + matrix // heads)
    if row - first >= end:
        return
    keys = tl.arange(0, BLOCK)
    place, inside = row * size + keys, keys < end
    z = tl.load(before + place, mask=inside, other=0.0)
    r = tl.load(resistance + place, mask=inside, other=1.0)
    limit = tl.load(lam + matrix // heads) * tl.load(friction + place, mask=inside, other=0.0)
    if FIRST:
        t = 1 / (1 + ALPHA * end.to(z.dtype))
    else:
        t, usable, _ = next_length(sums_before, rows, first, end, BLOCK)
        t = tl.where(usable, t, tl.load(lengths_before + matrix))
    tl.store(lengths + matrix, t, mask=row == first)
    slope = slope_at(z, r, inside, ALPHA)
    y = z - t * slope
    reach = t * limit
    moved = tl.where(tl.abs(y) > reach, y - tl.where(y > 0, reach, -reach), 0)
    bend = slope_at(moved, r, inside, ALPHA) - slope
    tl.store(after + place, moved, mask=inside)
    tl.store(sums + row, tl.sum((moved - z) * bend, 0))
    tl.store(sums + rows + row, tl.sum(bend * bend, 0))


@triton.jit(do_not_specialize=["rows", "size", "heads"])
def gradient_kernel(
    resistance, friction, lam, sizes, before, after, lengths, sums, sums_after, shares, shares_after,
    totals, totals_after, of_z, of_slope, of_resistance, of_threshold, rows, size, heads,
    FIRST: tl.constexpr, LAST: tl.constexpr, ALPHA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Back through one step of one row: what reaches z and ∇ after it becomes what reaches those before it.

    The length of the next step was made here, so that its derivative, which the rows of that step left behind in shares,
    comes back here; likewise that of later ones, as far as the length was kept.
    """
    row = tl.program_id(0).to(tl.int64)
    matrix = row // size
    first, end = matrix * size, tl.load(sizes + matrix // heads)
    if row - first >= end:
        return
    keys = tl.arange(0, BLOCK)
    place, inside = row * size + keys, keys < end
    z = tl.load(before + place, mask=inside, other=0.0)
    moved = tl.load(after + place, mask=inside, other=0.0)
    r = tl.load(resistance + place, mask=inside, other=1.0)
    limit = tl.load(lam + matrix // heads) * tl.load(friction + place, mask=inside, other=0.0)
    t = tl.load(lengths + matrix)
    slope, new_slope = slope_at(z, r, inside, ALPHA), slope_at(moved, r, inside, ALPHA)
    change, bend = moved - z, new_slope - slope
    at_z = tl.load(of_z + place, mask=inside, other=0.0)

    at_slope = tl.zeros_like(at_z)
    at_change, at_bend = tl.zeros_like(at_z), tl.zeros_like(at_z)
    if not LAST:
        _, renewed, _ = next_length(sums_after, rows, first, end, BLOCK)
        total = matrix_sum(shares_after, first, end, BLOCK)
        total += tl.where(renewed, 0, tl.load(totals_after + matrix))
        tl.store(totals + matrix, total, mask=row == first)
        length, usable, squares = next_length(sums, rows, first, end, BLOCK)
        factor = tl.where(usable, total / squares, 0)
        at_change = factor * bend
        at_bend = factor * (change - 2 * length * bend)
        at_slope = tl.load(of_slope + place, mask=inside, other=0.0) + at_bend
        at_z += at_change

    at_z += tl.where(inside, r * at_slope + ALPHA * tl.sum(at_slope, 0), 0)
    at_resistance = moved * at_slope
    y = z - t * slope
    active = inside & (tl.abs(y) > t * limit)
    at_y = tl.where(active, at_z, 0)
    at_reach = tl.where(y > 0, -at_y, at_y)
    tl.store(shares + row, tl.sum(limit * at_reach - slope * at_y, 0))
    before_slope = -t * at_y - at_bend
    if FIRST:
        at_resistance += z * before_slope
    else:
        tl.store(of_z + place, at_y - at_change, mask=inside)
        tl.store(of_slope + place, before_slope, mask=inside)
    at_threshold = t * at_reach
    if not LAST:
        at_resistance += tl.load(of_resistance + place, mask=inside, other=0.0)
        at_threshold += tl.load(of_threshold + place, mask=inside, other=0.0)
    tl.store(of_resistance + place, at_resistance, mask=inside)
    tl.store(of_threshold + place, at_threshold, mask=inside)


def iterate(
    s: Tensor,
    u: Tensor,
    lam: Tensor,
    sizes: Tensor,
    alpha: float,
    scale: float,
    iterations: int,
    start: str,
    seed: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Flows after all steps, and what the derivative takes: resistances, frictions; flows before, lengths, sums of each step.

    Without ``keep`` each step's flows take the place of those before the last, and there is no derivative.

    Args:
        s, u: scores [graphs, heads, size, size], to be multiplied by ``scale``.
        lam, sizes: of each graph, λ and its nodes.
    """
    graphs, heads, size, _ = s.shape
    rows = graphs * heads * size
    resistance, friction, z = torch.empty_like(s), torch.empty_like(s), torch.zeros_like(s)
    flows = s.new_empty((iterations if keep else min(iterations, 2), *s.shape))
    lengths, sums = s.new_empty((iterations, graphs * heads)), s.new_empty((iterations, 2, rows))
    energy_kernel[(rows,)](
        s, u, sizes, resistance, friction, flows, seed, size, heads, scale, STARTS.index(start), **tile(size)
    )
    for k in range(iterations):
        before = flows[k % len(flows)]
        after = z if k == iterations - 1 else flows[(k + 1) % len(flows)]
        step_kernel[(rows,)](
            resistance, friction, lam, sizes, before, after, lengths[k], lengths[k - 1], sums[k], sums[k - 1],
            rows, size, heads, k == 0, alpha, **tile(size),
        )  # fmt: skip
    return z, resistance, friction, flows, lengths, sums


def iterate_backward(
    grad: Tensor,
    z: Tensor,
    resistance: Tensor,
    friction: Tensor,
    flows: Tensor,
    lengths: Tensor,
    sums: Tensor,
    lam: Tensor,
    sizes: Tensor,
    alpha: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the scores, and of λ."""
    graphs, heads, size, _ = z.shape
    rows, iterations = graphs * heads * size, len(lengths)
    of_z, of_slope, of_s, of_u = grad.clone(), *(torch.empty_like(grad) for _ in range(3))
    shares = grad.new_empty((iterations + 1, rows))
    totals = grad.new_zeros((iterations + 2, graphs * heads))
    for k in reversed(range(iterations)):
        last = k == iterations - 1
        gradient_kernel[(rows,)](
            resistance, friction, lam, sizes, flows[k], z if last else flows[k + 1], lengths[k], sums[k],
            sums[k if last else k + 1], shares[k], shares[k + 1], totals[k + 1], totals[k + 2],
            of_z, of_slope, of_s, of_u, rows, size, heads, k == 0, last, alpha, **tile(size),
        )  # fmt: skip
    of_lam = shares[0]  # which nobody reads any more
    score_kernel[(rows,)](
        resistance, friction, lam, sizes, of_s, of_u, of_lam, size, heads, scale, **tile(size)
    )
    return of_s, of_u, of_lam.view(graphs, -1).sum(1)
