"""The backward kernel of queries whose rows are not gentle, with all keys of their graph on chip: the closed form of
`sfiformer.flow.exact`, measured from the pivot.

It follows `query_backward`, skips every tile of gentle rows, and touches no gentle row. For the kernels of keys it leaves, for
each row, the gradient at the heaviest key, the offset of the mean from it (lifted by κ f_k), the pull T and ∂L/∂log κ, the
size of the terms of a gradient, the numbers of the heaviest key and of the pivot, and the former's s. No atomics.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.query_backward import load_stats
from sfiformer.attention.kernels.solving import exp, flows
from sfiformer.attention.kernels.streaming import is_gentle
from sfiformer.attention.kernels.tiles import RUNTIME, combine, kept, locate, products


@triton.jit
def lifted_product(log_factor, x):
    """exp(log_factor) x, so far inside the type that 300,000 of them have a finite sum, though x be the gradient of a tie."""
    product = exp(tl.minimum(log_factor, 80.0)) * x
    return tl.minimum(tl.maximum(product, -1e33), 1e33)


@triton.jit
def gate_gradient(log_gated, ahead, offset, lift):
    """κ f p (g − ḡ), from g − g_top and exp(lift) (ḡ − g_top).

    κ f p may exceed any power of ten while g − ḡ falls below all: the two meet as one exponential. What then exceeds the type
    saturates (exact ties have such derivatives).
    """
    gate = lifted_product(log_gated, ahead) - lifted_product(log_gated - lift[:, None], offset[:, None])
    return tl.minimum(tl.maximum(gate, -1e28), 1e28)


@triton.jit
def gradient_of_s(s, valid, z, centred, pull, norm_s, POTENTIAL: tl.constexpr):
    """∂L/∂s of a tile whose rows are queries."""
    spread = exp(s - norm_s[:, None]) if POTENTIAL else exp(norm_s[:, None] - s)
    return tl.where(valid, centred * z - spread * pull[:, None], 0.0)


@triton.jit
def gradient_of_u(u, valid, gate, grad_log_kappa, norm_u):
    """∂L/∂u likewise."""
    return tl.where(valid, -gate - exp(u - norm_u[:, None]) * grad_log_kappa[:, None], 0.0)


@triton.jit
def keep_sums(place, stride, mask, g_top, offset, pull, grad_log_kappa, size, top, pivot_key, heaviest):
    """Write what the kernels of keys need of each row that is not gentle."""
    tl.store(place, g_top, mask=mask)
    tl.store(place + stride, offset, mask=mask)
    tl.store(place + 2 * stride, pull, mask=mask)
    tl.store(place + 3 * stride, grad_log_kappa, mask=mask)
    tl.store(place + 4 * stride, size, mask=mask)
    tl.store(place + 5 * stride, top.to(tl.float32), mask=mask)
    tl.store(place + 6 * stride, pivot_key.to(tl.float32), mask=mask)
    tl.store(place + 7 * stride, heaviest, mask=mask)


@triton.jit
def with_pivot(u, valid, keys, pivot, KEYS: tl.constexpr):
    """u with the row's pivot at the very value that it was solved with, and the pivot's number (−1: not found).

    In tiles of another shape scores come out with other last bits, which are rounding errors of a score's largest terms, not of
    the pivot's own u. The pivot is the key that is nearest to it, if it is as near as that.
    """
    away = tl.where(valid, tl.abs(u - pivot[:, None]), float("inf"))
    nearest, largest = tl.min(away, 1), tl.max(tl.where(valid, tl.abs(u), 0.0), 1)
    number = tl.min(tl.where(away <= nearest[:, None], keys[None, :], KEYS - 1), 1)
    number = tl.where(nearest <= 3e-6 * (1 + largest), number, -1)
    return tl.where(keys[None, :] == number[:, None], pivot[:, None], u), number


@triton.jit(do_not_specialize=RUNTIME)
def chip_query_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_q, grad_q_friction, found, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, units, value_units, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG_GENTLE: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients of such queries, and the sums of their rows, in every so many-th tile: few programs look for few rows."""
    if tl.load(found) == 0:  # as a rule: there are none in the whole batch
        return
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    for tile in range(tl.program_id(0), stat_stride // heads // ROWS + graphs, tl.num_programs(0)):
        start, n, _, first_row = locate(ptr, graphs, tile, ROWS)
        rows, keys = first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
        row_number = start * heads + head + rows * heads
        place = stats + row_number
        is_row = (rows < n) & (n > MORE_THAN) & (n <= KEYS)
        pivot, level, steep, m, norm_s, norm_u = load_stats(place, is_row, stat_stride)
        is_row = is_row & (is_gentle(pivot, steep, m, norm_s, norm_u, LOG_GENTLE) == 0)
        # The first condition says nothing new, but under a maximum alone the compiler loads two bytes at a time.
        if (first_row < n) & (tl.max(is_row.to(tl.int32), 0) > 0):
            stride, value_stride = heads * width, heads * value_width
            at, value_at = start * stride + head * width, start * value_stride + head * value_width
            s = scale * products(q + at, k + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION)
            u = scale * products(
                q_friction + at, k_friction + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION
            )
            g = products(
                grad_out + value_at, v + value_at, rows, keys, n, value_stride, value_width, ROWS, KEYS, WIDTH, PRECISION
            )  # fmt: skip
            if DROPOUT:
                g = g * kept(tl.load(seed), row_number[:, None], keys[None, :], dropout_p)
            valid = (keys < n)[None, :] & is_row[:, None]
            u, pivot_key = with_pivot(u, valid, keys, pivot, KEYS)
            z, log_weight, log_gated = flows(s, u, valid, pivot, level, steep, m)
            total = tl.load(place + 4 * stat_stride, mask=is_row, other=1.0)
            log_leak = tl.load(place + 5 * stat_stride, mask=is_row, other=float("-inf"))
            largest = tl.max(log_weight, 1)
            top = tl.min(tl.where(log_weight >= largest[:, None], keys[None, :], KEYS - 1), 1)
            heaviest = tl.where(largest > float("-inf"), m + largest, m)
            g_top = tl.sum(tl.where(keys[None, :] == top[:, None], g, 0.0), 1)
            ahead = tl.where(valid, g - g_top[:, None], 0.0)
            size = 4 * tl.max(tl.abs(g), 1)  # no less than Σ |dO| |v|, as a rule
            lift = tl.maximum(steep, 0.0)
            offset = tl.sum(lifted_product(log_weight + lift[:, None], ahead), 1)
            offset = (offset - lifted_product(log_leak + lift, g_top)) / total
            sunk = offset * exp(-lift)  # ḡ − g_top
            mean = tl.where(level > 0, g_top + sunk, 0.0)
            centred = ahead - sunk[:, None]
            pull = tl.sum(centred * z, 1)
            # Less ḡ (1 − Σ z), and 1 − Σ z is ε η: of the sum itself only rounding would be left.
            grad_log_kappa = pull - mean * (exp(log_leak) * tl.maximum(level, 0.0) + exp(log_leak + steep))
            grad_s = gradient_of_s(s, valid, z, centred, pull, norm_s, POTENTIAL)
            gate = gate_gradient(log_gated, ahead, offset, lift)
            grad_u = gradient_of_u(u, valid, gate, grad_log_kappa, norm_u)
            own = tl.where(is_row, rows, n)  # no others are written
            combine(grad_s, k + at, keys, grad_q + at, own, n, stride, width, scale, WIDTH, PRECISION)
            combine(
                grad_u, k_friction + at, keys, grad_q_friction + at, own, n, stride, width, scale, WIDTH, PRECISION
            )  # fmt: skip
            keep_sums(
                sums + row_number, stat_stride, is_row, g_top, offset, pull, grad_log_kappa, size, top, pivot_key, heaviest
            )  # fmt: skip
