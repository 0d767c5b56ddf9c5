"""The rows of large graphs that are not gentle: measured from a pivot, as `solving` does, with the keys streaming past.

This kernel follows that of `stream_forward`, skips every tile without a row marked there, and touches no other row. With the
row's normalisers (f = exp(u − norm_u), and r or p likewise),

    log κ f_k p_m = strength + (m − norm_s) + (u_k − norm_u) ,
    log ε/p_m     = −log α − (m − norm_s) ,
    log ε κ f_k   = strength − log α + (u_k − norm_u) .

The ninth number of such a row is not a limit but its heaviest active key, and the eleventh its pivot, for the backward.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.forward import keep_stats
from sfiformer.attention.kernels.solving import above_pivot, expm1, flows, log1p, no_heavier, rounding
from sfiformer.attention.kernels.streaming import scores, store_values, weigh, whole
from sfiformer.attention.kernels.tiles import RUNTIME, kept, load_head, locate, no_head

MAX_SWEEPS = tl.constexpr(200)  # no row is known to need as many


@triton.jit
def larger(found, at, x, keys):
    """The largest number of each row so far and its key, with those of one more block."""
    highest = tl.max(x, 1)
    first = tl.min(tl.where(x >= highest[:, None], keys[None, :], 2147483647), 1)
    return tl.maximum(found, highest), tl.where(highest > found, first, at)


@triton.jit
def last_below(
    q_friction, k_friction, limit, n, stride, width, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest u below ``limit`` of each row and its key; −inf where there is none."""
    found, at = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.int32)
    for first in range(0, n, KEYS):
        keys = first + tl.arange(0, KEYS)
        u = scores(q_friction, k_friction, keys, n, stride, width, scale, WIDTH, PRECISION)
        u = tl.where((keys < n)[None, :] & (u < limit[:, None]), u, float("-inf"))
        found, at = larger(found, at, u, keys)
    return found, at


@triton.jit
def measure_streamed(
    q, q_friction, k, k_friction, pivot, pivot_key, strength, leak0, norm_s, norm_u, n, stride, width, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`solving.measure` in one sweep: level t, log κ f_k, reference m, total weight and log leak of each row.

    Both sums, Σ_A p and Σ_A p (1 − f/f_k), are kept relative to their own largest term.
    """
    inf = float("inf")
    m, peak = tl.full([ROWS], -inf, tl.float32), tl.full([ROWS], -inf, tl.float32)
    total, lifted = tl.zeros_like(m), tl.zeros_like(m)
    for first in range(0, n, KEYS):
        keys = first + tl.arange(0, KEYS)
        s = scores(q, k, keys, n, stride, width, scale, WIDTH, PRECISION)
        u = scores(q_friction, k_friction, keys, n, stride, width, scale, WIDTH, PRECISION)
        above = above_pivot(tl.where(keys[None, :] == pivot_key[:, None], pivot[:, None], u), pivot)
        active = (keys < n)[None, :] & (above <= 0)
        depth = -expm1(tl.minimum(above, 0.0))
        s = tl.where(active, s, -inf)
        lift = tl.where(depth > 0, s + tl.log(tl.where(depth > 0, depth, 1.0)), -inf)
        top, top_lift = tl.maximum(m, tl.max(s, 1)), tl.maximum(peak, tl.max(lift, 1))
        anchor, anchor_lift = (
            tl.maximum(top, -1e30),
            tl.maximum(top_lift, -1e30),
        )  # while nothing is active: −inf − −inf
        total = total * tl.exp(m - anchor) + tl.sum(tl.exp(s - anchor[:, None]), 1)
        lifted = lifted * tl.exp(peak - anchor_lift) + tl.sum(tl.exp(lift - anchor_lift[:, None]), 1)
        m, peak = top, top_lift
    steep = strength + (m - norm_s) + (pivot - norm_u)
    log_leak = leak0 - (m - norm_s)
    total += tl.exp(log_leak)
    taken = tl.exp(steep + (peak - m) + tl.log(lifted))
    level = (1 - tl.exp(strength + leak0 + (pivot - norm_u)) - taken) / total
    return level, steep, m, total, log_leak


@triton.jit
def steep_flows(s, u, valid, keys, pivot, pivot_key, top, heaviest, level, steep, m):
    """`solving.flows`, though scores come out with other last bits than those that the row was solved with.

    The pivot and the heaviest active key are told by their numbers (where these are known, else −1), and ``heaviest`` is the s
    of the latter. Other keys at the very edge of A may be on its other side now: no flow exceeds the whole.
    """
    u = tl.where(keys[None, :] == pivot_key[:, None], pivot[:, None], u)
    u = tl.where(keys[None, :] == top[:, None], tl.minimum(u, pivot[:, None]), u)
    z, log_weight, log_gated = flows(s, u, valid & no_heavier(s, heaviest), pivot, level, steep, m)
    return tl.minimum(z, 1.0), log_weight, log_gated


@triton.jit(do_not_specialize=RUNTIME)
def pivot_forward_kernel(
    q, k, v, q_friction, k_friction, out, means, slopes, stats, ptr, lam, seed,
    log_alpha, scale, dropout_p, graphs, heads, units, value_units, stat_stride, more_than,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, HARD: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG_GENTLE: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """The marked rows of one tile: Newton's method downwards in logarithms, two sweeps a step, as in `solving.solve`."""
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    rows = first_row + tl.arange(0, ROWS)
    place = stats + start * heads + head + rows * heads
    here = (n > more_than) & (rows < n)
    hard = tl.load(place + 9 * stat_stride, mask=here, other=0.0) < 0
    # The first condition says nothing new, but under a maximum alone the compiler loads two bytes at a time.
    if (first_row < n) & (tl.max(hard.to(tl.int32), 0) > 0):
        inf = float("inf")
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        x = load_head(q + at, rows, n, stride, width, WIDTH)
        x_friction = load_head(q_friction + at, rows, n, stride, width, WIDTH)
        y, y_friction = k + at, k_friction + at
        limit = tl.load(place, mask=hard, other=inf)
        norm_s = tl.load(place + 6 * stat_stride, mask=hard, other=0.0)
        norm_u = tl.load(place + 7 * stat_stride, mask=hard, other=0.0)
        strength = tl.log(tl.load(lam + graph))
        if POTENTIAL:
            strength += tl.log(n.to(tl.float32))
        leak0 = -inf if HARD else -log_alpha

        # No key carries more than the whole flow: η ≤ κ f_j + 1/p_j for every j. In logarithms, and less m − norm_s:
        bound = tl.full([ROWS], inf, tl.float32)
        minus_u, least = tl.full([ROWS], -inf, tl.float32), tl.zeros([ROWS], tl.int32)
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            s = scores(x, y, keys, n, stride, width, scale, WIDTH, PRECISION)
            u = scores(x_friction, y_friction, keys, n, stride, width, scale, WIDTH, PRECISION)
            taken, supply = strength + (u - norm_u[:, None]), norm_s[:, None] - s
            high, low = tl.maximum(taken, supply), tl.minimum(taken, supply)
            inside = (keys < n)[None, :]
            bound = tl.minimum(bound, tl.min(tl.where(inside, high + tl.log(1 + tl.exp(low - high)), inf), 1))
            minus_u, least = larger(minus_u, least, tl.where(inside, -u, -inf), keys)
        bound += norm_u - strength
        limit = tl.minimum(limit + 1e-3, bound) + rounding(bound, norm_u)

        u_min = -minus_u
        pivot, pivot_key, level, steep, m = u_min, least, u_min * 0, u_min * 0, u_min * 0
        total, log_leak = u_min * 0, u_min * 0
        shrinking, sweeps = 1, 2
        shrink = hard
        while (sweeps < MAX_SWEEPS) & (shrinking > 0):
            lower, lower_key = last_below(
                x_friction, y_friction, limit, n, stride, width, scale, ROWS, KEYS, WIDTH, PRECISION
            )
            pivot = tl.where(shrink, tl.where(lower == -inf, u_min, lower), pivot)
            pivot_key = tl.where(shrink, tl.where(lower == -inf, least, lower_key), pivot_key)
            level, steep, m, total, log_leak = measure_streamed(
                x, x_friction, y, y_friction, pivot, pivot_key, strength, leak0, norm_s, norm_u, n, stride, width, scale,
                ROWS, KEYS, WIDTH, PRECISION,
            )  # fmt: skip
            shrink = hard & (level <= 0) & (pivot > u_min)
            rise = log1p(tl.maximum(level * tl.exp(-steep), -0.999999))
            limit = tl.minimum(pivot + rise + rounding(pivot, norm_u), pivot)
            sweeps += 2 * shrinking
            shrinking = tl.max(shrink.to(tl.int32), 0)

        level = tl.where(level > 0, level, -inf)
        heaviest, top = tl.full([ROWS], -inf, tl.float32), tl.zeros([ROWS], tl.int32)
        sum_z, sum_c = no_head(ROWS, VALUE_WIDTH), no_head(ROWS, VALUE_WIDTH)
        taken, seen_z, lost_z, seen_c, lost_c = u_min * 0, u_min * 0, u_min * 0, u_min * 0, u_min * 0
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            s = scores(x, y, keys, n, stride, width, scale, WIDTH, PRECISION)
            u = scores(x_friction, y_friction, keys, n, stride, width, scale, WIDTH, PRECISION)
            valid = (keys < n)[None, :] & hard[:, None]
            z, log_weight, log_gated = steep_flows(
                s, u, valid, keys, pivot, pivot_key, pivot_key * 0 - 1, m, level, steep, m
            )
            heaviest, top = larger(heaviest, top, log_weight, keys)
            # Of use only where the backward finds the row gentle.
            gated = tl.exp(tl.minimum(log_gated, LOG_GENTLE))
            taken += tl.sum(gated, 1)
            if DROPOUT:
                number = start * heads + head + rows * heads
                keep = kept(tl.load(seed), number[:, None], keys[None, :], dropout_p)
                z *= keep
                gated *= keep
            values = load_head(v + value_at, keys, n, value_stride, value_width, VALUE_WIDTH)
            sum_z, seen_z, lost_z = weigh(z, values, sum_z, seen_z, lost_z, PRECISION)
            sum_c, seen_c, lost_c = weigh(gated, values, sum_c, seen_c, lost_c, PRECISION)
        eta = tl.maximum(level, 0.0) + tl.exp(tl.minimum(steep, LOG_GENTLE))
        store_values(
            out + value_at, means + value_at, slopes + value_at, rows, hard, value_stride, value_width,
            sum_z, sum_c, whole(seen_z, lost_z), whole(seen_c, lost_c), eta, u_min * 0, total, taken, VALUE_WIDTH,
        )  # fmt: skip
        top = top.to(tl.float32)
        keep_stats(place, stat_stride, hard, pivot, level, steep, m, total, log_leak, norm_s, norm_u, top)
        tl.store(place + 9 * stat_stride, u_min * 0 - sweeps, mask=hard)
        tl.store(place + 10 * stat_stride, pivot_key.to(tl.float32), mask=hard)
