"""The paper's iteration, a kernel for each step and one for its derivative: `sfiformer.flow.Proximal` row by row.

All flows of a matrix (a graph and head) have one step length, made of sums over the whole of it. Each row leaves its share of
them behind, and every row of the next step adds these up again. Keys that are not there have an infinite threshold; those
behind the last one of a row (`ends`), and rows without keys, as padding is, are not even looked at.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SIZE = 4096  # keys of a row that stays on chip


@triton.jit
def slope_at(z, resistance, threshold, alpha):
    """∇ of the smooth part, R∘z + α (Σz − 1), where there is a key."""
    return tl.where(threshold < float("inf"), resistance * z + alpha * (tl.sum(z, 0) - 1), 0)


@triton.jit
def matrix_sum(shares, row, size, BLOCK: tl.constexpr):
    """Σ of what the rows of a row's matrix left behind."""
    at = tl.arange(0, BLOCK)
    return tl.sum(tl.load(shares + row // size * size + at, mask=at < size, other=0.0), 0)


@triton.jit
def next_length(sums, rows, row, size, BLOCK: tl.constexpr):
    """⟨ΔZ, Δ∇⟩ / ‖Δ∇‖², whether that is a step length, and ‖Δ∇‖² (1 where it is not)."""
    along = matrix_sum(sums, row, size, BLOCK)
    bend = matrix_sum(sums + rows, row, size, BLOCK)
    usable = (bend > 0) & (along > 0)
    bend = tl.where(usable, bend, 1)
    return along / bend, usable, bend


@triton.jit(do_not_specialize=["rows", "size"])
def step_kernel(
    resistance, threshold, alpha, ends, before, after, lengths, lengths_before, sums, sums_before, rows, size,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of one row; the first row of a matrix says how long it was."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + row)
    if (end == 0) & (row % size > 0):
        return
    keys = tl.arange(0, BLOCK)
    place, inside, matrix = row * size + keys, keys < end, row // size
    z = tl.load(before + place, mask=inside, other=0.0)
    r = tl.load(resistance + place, mask=inside, other=1.0)
    limit = tl.load(threshold + place, mask=inside, other=float("inf"))
    penalty = tl.load(alpha + row)
    if FIRST:
        t = tl.load(lengths + matrix)
    else:
        t, usable, _ = next_length(sums_before, rows, row, size, BLOCK)
        t = tl.where(usable, t, tl.load(lengths_before + matrix))
        tl.store(lengths + matrix, t, mask=row % size == 0)
    slope = slope_at(z, r, limit, penalty)
    y = z - t * slope
    reach = t * limit
    moved = tl.where(tl.abs(y) > reach, y - tl.where(y > 0, reach, -reach), 0)
    moved = tl.where(limit < float("inf"), moved, 0)
    bend = slope_at(moved, r, limit, penalty) - slope
    tl.store(after + place, moved, mask=inside)
    tl.store(sums + row, tl.sum((moved - z) * bend, 0))
    tl.store(sums + rows + row, tl.sum(bend * bend, 0))


@triton.jit(do_not_specialize=["rows", "size"])
def gradient_kernel(
    resistance, threshold, alpha, ends, before, after, lengths, sums, sums_after, shares, shares_after,
    totals, totals_after, of_z, of_slope, of_resistance, of_threshold, rows, size,
    FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Back through one step of one row: what reaches z and ∇ after it becomes what reaches those before it.

    The length of the next step was made here, so that its derivative, which the rows of that step left behind in shares,
    comes back here; likewise that of later ones, as far as the length was kept.
    """
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + row)
    if (end == 0) & (row % size > 0):
        return
    keys = tl.arange(0, BLOCK)
    place, inside, matrix = row * size + keys, keys < end, row // size
    z = tl.load(before + place, mask=inside, other=0.0)
    moved = tl.load(after + place, mask=inside, other=0.0)
    r = tl.load(resistance + place, mask=inside, other=1.0)
    limit = tl.load(threshold + place, mask=inside, other=float("inf"))
    penalty, t = tl.load(alpha + row), tl.load(lengths + matrix)
    real = limit < float("inf")
    slope, new_slope = slope_at(z, r, limit, penalty), slope_at(moved, r, limit, penalty)
    change, bend = moved - z, new_slope - slope
    at_z = tl.load(of_z + place, mask=inside, other=0.0)

    at_slope = tl.zeros_like(at_z)
    at_change, at_bend = tl.zeros_like(at_z), tl.zeros_like(at_z)
    if not LAST:
        _, renewed, _ = next_length(sums_after, rows, row, size, BLOCK)
        total = matrix_sum(shares_after, row, size, BLOCK)
        total += tl.where(renewed, 0, tl.load(totals_after + matrix))
        tl.store(totals + matrix, total, mask=row % size == 0)
        length, usable, squares = next_length(sums, rows, row, size, BLOCK)
        factor = tl.where(usable, total / squares, 0)
        at_change = factor * bend
        at_bend = factor * (change - 2 * length * bend)
        at_slope = tl.load(of_slope + place, mask=inside, other=0.0) + at_bend
        at_z += at_change

    at_z += tl.where(real, r * at_slope + penalty * tl.sum(at_slope, 0), 0)
    at_resistance = moved * at_slope
    y = z - t * slope
    active = real & (tl.abs(y) > t * limit)
    at_y = tl.where(active, at_z, 0)
    at_reach = tl.where(y > 0, -at_y, at_y)
    bound = tl.where(real, limit, 0)
    tl.store(shares + row, tl.sum(bound * at_reach - slope * at_y, 0))
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
    resistance: Tensor,
    threshold: Tensor,
    alpha: Tensor,
    ends: Tensor,
    start: Tensor,
    length: Tensor,
    iterations: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flows [rows, n] after all steps; and for the derivative the flows, lengths and sums of each, the start among them.

    Without ``keep`` each step's flows take the place of those before the last, and there is no derivative. Rows are
    those of matrices [n, n], one below the other; alpha and ends are [rows], the first length [matrices].
    """
    rows, size = start.shape
    flows = start.new_zeros((iterations + 1 if keep else 2, rows, size))
    flows[0] = start
    lengths = start.new_empty((iterations, len(length)))
    lengths[0] = length
    sums = start.new_zeros((iterations, 2, rows))
    for k in range(iterations):
        before, after = flows[k % len(flows)], flows[(k + 1) % len(flows)]
        step_kernel[(rows,)](
            resistance, threshold, alpha, ends, before, after, lengths[k], lengths[k - 1], sums[k], sums[k - 1],
            rows, size, k == 0, **_tile(size),
        )  # fmt: skip
    return flows[iterations % len(flows)].clone(), flows, lengths, sums


def iterate_backward(
    grad: Tensor,
    resistance: Tensor,
    threshold: Tensor,
    alpha: Tensor,
    ends: Tensor,
    flows: Tensor,
    lengths: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of resistances and thresholds, [rows, n] each."""
    iterations, matrices = lengths.shape
    rows, size = grad.shape
    of_z, of_slope = grad.clone(), torch.empty_like(grad)
    of_resistance, of_threshold = torch.zeros_like(grad), torch.zeros_like(grad)
    shares = grad.new_zeros((iterations + 1, rows))
    totals = grad.new_zeros((iterations + 2, matrices))
    for k in reversed(range(iterations)):
        last = k == iterations - 1
        gradient_kernel[(rows,)](
            resistance, threshold, alpha, ends, flows[k], flows[k + 1], lengths[k], sums[k],
            sums[k if last else k + 1], shares[k], shares[k + 1], totals[k + 1], totals[k + 2],
            of_z, of_slope, of_resistance, of_threshold, rows, size, k == 0, last, **_tile(size),
        )  # fmt: skip
    return of_resistance, of_threshold


def _tile(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 128))}
