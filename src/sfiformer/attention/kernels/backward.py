"""The backward kernel of queries: one tile of them, with all keys on chip.

It recomputes the flows from the nine numbers a row that the forward left, and applies the closed form of
`sfiformer.flow.exact`. For the kernels of keys it leaves, for each row, the gradient at the heaviest key, the offset of the
mean from it (lifted by κ f_k), the pull T and ∂L/∂log κ, the size of the terms of a gradient, the heaviest key's number and
its s; and what `keep_for_keys` says.
No atomics: two runs agree to the bit.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.key_backward import keep_for_keys, note_found
from sfiformer.attention.kernels.solving import exp, flows, gentle_weights
from sfiformer.attention.kernels.streaming import is_gentle
from sfiformer.attention.kernels.tiles import RUNTIME, combine, kept, locate, products


@triton.jit
def load_stats(place, is_row, stride):
    """pivot, level, log κ f_k, m, norm_s, norm_u of the given rows; rows outside have no flow."""
    pivot = tl.load(place, mask=is_row, other=0.0)
    level = tl.load(place + stride, mask=is_row, other=0.0)
    steep = tl.load(place + 2 * stride, mask=is_row, other=0.0)
    m = tl.load(place + 3 * stride, mask=is_row, other=0.0)
    norm_s = tl.load(place + 6 * stride, mask=is_row, other=0.0)
    norm_u = tl.load(place + 7 * stride, mask=is_row, other=0.0)
    return pivot, level, steep, m, norm_s, norm_u


@triton.jit
def gate_gradient(log_gated, ahead, offset, lift):
    """κ f p (g − ḡ), from g − g_top and exp(lift) (ḡ − g_top).

    κ f p may exceed any power of ten while g − ḡ falls below all: the two meet as one exponential. What then exceeds the type
    saturates (exact ties have such derivatives).
    """
    gate = (
        exp(tl.minimum(log_gated, 80.0)) * ahead
        - exp(tl.minimum(log_gated - lift[:, None], 80.0)) * offset[:, None]
    )
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


@triton.jit(do_not_specialize=RUNTIME)
def query_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_q, grad_q_friction, plain, found, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, units, value_units, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG_GENTLE: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one tile, and the sums of their rows."""
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    if (first_row < n) & (n > MORE_THAN) & (n <= KEYS):
        rows, keys = first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        first = start * heads + head  # of the row's numbers

        s = scale * products(q + at, k + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION)
        if DENSE:
            u = s * 0
        else:
            u = scale * products(
                q_friction + at, k_friction + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION
            )
        g = products(
            grad_out + value_at, v + value_at, rows, keys, n, value_stride, value_width, ROWS, KEYS, WIDTH, PRECISION
        )  # fmt: skip
        if DROPOUT:
            g = g * kept(tl.load(seed), first + rows * heads, keys, dropout_p)
        is_row = rows < n
        valid = (keys < n)[None, :] & is_row[:, None]
        place = stats + first + rows * heads
        pivot, level, steep, m, norm_s, norm_u = load_stats(place, is_row, stat_stride)
        limit = tl.load(place + 8 * stat_stride, mask=is_row, other=0.0)
        gentle = is_gentle(pivot, steep, m, norm_s, norm_u, LOG_GENTLE)
        if tl.min(gentle.to(tl.int32), 0) > 0:
            weight, taken = gentle_weights(s, u, valid, pivot, level, steep, m, limit)
            g_top, size, top, heaviest = m * 0, m * 0, m.to(tl.int32) * 0, m
            # Σ_A p is made anew: a key at the very edge of A may fall on the other side of it now.
            leak = exp(tl.load(place + 5 * stat_stride, mask=is_row, other=0.0))
            offset = tl.sum(weight * g, 1) / (tl.sum(weight, 1) + leak)
            mean = offset
            g -= offset[:, None]
            eta = (tl.maximum(level, -1e30) + exp(steep))[:, None]
            z = weight * tl.maximum(eta - taken, 0.0)
            pull = tl.sum(g * z, 1)
            grad_log_kappa = pull - mean * (1 - tl.sum(z, 1))
            grad_s = gradient_of_s(s, valid, z, g, pull, norm_s, POTENTIAL)
            share = exp(tl.minimum(pivot - norm_u - steep, 80.0)) * grad_log_kappa  # of f = share · κ f/p_m
            grad_u = -(weight * g + share[:, None]) * taken
        else:
            z, log_weight, log_gated = flows(s, u, valid, pivot, level, steep, m)
            total = tl.load(place + 4 * stat_stride, mask=is_row, other=1.0)
            log_leak = tl.load(place + 5 * stat_stride, mask=is_row, other=float("-inf"))
            largest = tl.max(log_weight, 1)
            top = tl.min(tl.where(log_weight >= largest[:, None], keys[None, :], KEYS - 1), 1)
            heaviest = tl.where(largest > float("-inf"), m + largest, m)
            g_top = tl.sum(tl.where(keys[None, :] == top[:, None], g, 0.0), 1)
            ahead = tl.where(valid, g - g_top[:, None], 0.0)
            lift, size = (
                tl.maximum(steep, 0.0),
                4 * tl.max(tl.abs(g), 1),
            )  # no less than Σ |dO| |v|, as a rule
            lifted = exp(tl.minimum(log_weight + lift[:, None], 80.0))
            offset = (tl.sum(lifted * ahead, 1) - exp(tl.minimum(log_leak + lift, 80.0)) * g_top) / total
            mean = tl.where(level > 0, g_top + offset * exp(-lift), 0.0)
            centred = ahead - (offset * exp(-lift))[:, None]
            pull = tl.sum(centred * z, 1)
            grad_log_kappa = pull - mean * (1 - tl.sum(z, 1))
            grad_s = gradient_of_s(s, valid, z, centred, pull, norm_s, POTENTIAL)
            gate = gate_gradient(log_gated, ahead, offset, lift)
            grad_u = gradient_of_u(u, valid, gate, grad_log_kappa, norm_u)
        combine(grad_s, k + at, keys, grad_q + at, rows, n, stride, width, scale, WIDTH, PRECISION)
        if not DENSE:
            combine(
                grad_u, k_friction + at, keys, grad_q_friction + at, rows, n, stride, width, scale, WIDTH, PRECISION
            )  # fmt: skip
        place = sums + first + rows * heads
        tl.store(place, g_top, mask=is_row)
        tl.store(place + stat_stride, offset, mask=is_row)
        tl.store(place + 2 * stat_stride, pull, mask=is_row)
        tl.store(place + 3 * stat_stride, grad_log_kappa, mask=is_row)
        tl.store(place + 4 * stat_stride, size, mask=is_row)
        tl.store(place + 5 * stat_stride, top.to(tl.float32), mask=is_row)
        tl.store(place + 6 * stat_stride, m * 0 - 1, mask=is_row)  # the pivot's number, which nobody kept
        tl.store(place + 7 * stat_stride, heaviest, mask=is_row)
        place = plain + head * (stat_stride // heads) + start + rows
        keep_for_keys(
            place, stat_stride, is_row, gentle, pivot, level, steep, m, limit,
            mean, pull, grad_log_kappa, norm_s, norm_u,
        )  # fmt: skip
        if tl.max((is_row & (gentle == 0)).to(tl.int32), 0) > 0:
            note_found(found, graph * heads + head)


@triton.jit
def lam_kernel(sums, ptr, lam, grad_lam, heads, BLOCK: tl.constexpr):
    """∂L/∂λ of one graph, Σ ∂L/∂log κ / λ over its rows of ``sums`` [N, heads]; 0 where λ = 0."""
    graph = tl.program_id(0)
    start, end = tl.load(ptr + graph) * heads, tl.load(ptr + graph + 1) * heads
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.load(sums + place, mask=place < end, other=0.0)
    strength = tl.load(lam + graph)
    grad = tl.where(strength > 0, tl.sum(total, 0) / tl.where(strength > 0, strength, 1.0), 0.0)
    tl.store(grad_lam + graph, grad)
