"""The forward kernel of large graphs: a tile of queries solves its rows in a few sweeps over the keys.

1. A sample of the keys gives a first guess of η, by Newton's method on the sample alone.
2. One sweep over all keys finds the rows' normalisers and g at three probes around the guess: see `streaming`.
3. Further sweeps with three probes each, only while a row of the tile is in doubt.
4. The last sweep, at a cubic estimate of η, sums the flows z and what friction takes, w c, of the active keys against the
   values (w is their sum over η), and takes the last Newton step on the way: η moves by (1 − g(η)) / W, and Σ z v with it by
   as much of Σ_A w v.

Rows that are not gentle are marked and left to `pivot_forward`.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.solving import GENTLE
from sfiformer.attention.kernels.streaming import (
    STEEP,
    chord,
    estimate,
    first_sweep,
    is_gentle,
    probe,
    scalings,
    store_values,
    tighten,
    weigh,
    weights,
    whole,
)
from sfiformer.attention.kernels.tiles import RUNTIME, kept, load_head, locate, no_head

MAX_SWEEPS = tl.constexpr(12)  # a bracket that rounding keeps open ends here
SAMPLE = tl.constexpr(
    4096
)  # at most so many keys, and at most one in sixteen of a large graph, make the first guess


@triton.jit
def guess(
    q, q_friction, k, k_friction, n, lam, log_alpha, stride, width, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, POTENTIAL: tl.constexpr, HARD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The threshold of u (κ f = η) by Newton's method on a sample of the keys, and how far it may be off.

    A sample of weights w has the error of (Σ w)² / Σ w² equal ones.
    """
    count = tl.minimum(n, tl.maximum(tl.minimum(n // 16, SAMPLE), 4 * KEYS))
    step = n // count
    share = n.to(tl.float32) / count
    none = tl.zeros([ROWS], tl.float32)
    m, s_min, u_max, sum_s, sum_r, sum_u, taken, squares, _, _, _, _, _ = first_sweep(
        q, q_friction, k, k_friction, n, count, step, stride, width, scale, none, none, none,
        ROWS, KEYS, WIDTH, POTENTIAL, False, PRECISION,
    )  # fmt: skip
    steep, leak, _, _ = scalings(
        m, s_min, u_max, sum_s * share, sum_r * share, sum_u * share, lam, log_alpha, n.to(tl.float32), POTENTIAL, HARD
    )  # fmt: skip
    steep = tl.minimum(steep, STEEP)
    cut = u_max - steep
    eta = (1 + taken * tl.exp(steep) * share) / (sum_s * share + leak)
    moving, steps = 1, 0
    while (moving > 0) & (steps < 8):
        total, taken = leak, none
        for first in range(0, count, KEYS):
            w, c = weights(
                q, q_friction, k, k_friction, first + tl.arange(0, KEYS), count, step, n, stride, width, scale, m, cut,
                WIDTH, PRECISION,
            )  # fmt: skip
            w_block, c_block = probe(w, c, eta)
            total += w_block * share
            taken += c_block * share
        lower = tl.minimum((1 + taken) / tl.maximum(total, 1e-37), eta)
        moving = tl.max((lower < 0.99 * eta).to(tl.int32), 0)
        eta = lower
        steps += moving
    return tl.minimum(cut + tl.log(eta), u_max), tl.minimum(3 * tl.sqrt(squares) / sum_s, 1.0)


@triton.jit(do_not_specialize=RUNTIME)
def stream_forward_kernel(
    q, k, v, q_friction, k_friction, out, means, slopes, stats, ptr, lam, seed,
    log_alpha, scale, dropout_p, graphs, heads, units, value_units, stat_stride, more_than,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, HARD: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG_GENTLE: tl.constexpr,
    DOUBT: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one head, for graphs of n > more_than nodes.

    ``means`` are O₂ = Σ_A p v / W, and ``slopes`` ∂O/∂log κ = Σ_A κ f p (O₂ − v), which is O − O₂, but of that difference
    little would be left where friction takes little.
    """
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    if (first_row < n) & (n > more_than):
        rows = first_row + tl.arange(0, ROWS)
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        strength = tl.load(lam + graph)
        x = load_head(q + at, rows, n, stride, width, WIDTH)
        x_friction = load_head(q_friction + at, rows, n, stride, width, WIDTH)
        y, y_friction = k + at, k_friction + at

        threshold, spread = guess(
            x, x_friction, y, y_friction, n, strength, log_alpha, stride, width, scale,
            ROWS, KEYS, WIDTH, POTENTIAL, HARD, PRECISION,
        )  # fmt: skip
        m, s_min, u_max, sum_s, sum_r, sum_u, sum_f, w_low, f_low, w_middle, f_middle, w_high, f_high = first_sweep(
            x, x_friction, y, y_friction, n, n, 1, stride, width, scale, threshold - spread, threshold, threshold + spread,
            ROWS, KEYS, WIDTH, POTENTIAL, True, PRECISION,
        )  # fmt: skip
        steep, leak, norm_s, norm_u = scalings(
            m, s_min, u_max, sum_s, sum_r, sum_u, strength, log_alpha, n.to(tl.float32), POTENTIAL, HARD
        )
        hard = steep > STEEP
        steep = tl.minimum(steep, STEEP)
        cut, c_max = u_max - steep, tl.exp(steep)
        none = tl.zeros([ROWS], tl.float32)
        low, g_low, w_under, high, g_high, w_over, upper = (
            none,
            none,
            leak,
            none + 3e38,
            none,
            sum_s + leak,
            none + 3e38,
        )
        low, g_low, w_under, high, g_high, w_over, upper = tighten(
            c_max, sum_s + leak, sum_f * c_max, low, g_low, w_under, high, g_high, w_over, upper
        )
        low, g_low, w_under, high, g_high, w_over, upper = tighten(
            tl.exp(threshold - spread - cut), w_low + leak, f_low * c_max,
            low, g_low, w_under, high, g_high, w_over, upper,
        )  # fmt: skip
        low, g_low, w_under, high, g_high, w_over, upper = tighten(
            tl.exp(threshold - cut), w_middle + leak, f_middle * c_max,
            low, g_low, w_under, high, g_high, w_over, upper,
        )  # fmt: skip
        low, g_low, w_under, high, g_high, w_over, upper = tighten(
            tl.exp(threshold + spread - cut), w_high + leak, f_high * c_max,
            low, g_low, w_under, high, g_high, w_over, upper,
        )  # fmt: skip
        lower, doubt = chord(low, g_low, w_under, high, g_high, w_over, upper)
        hard = hard | (lower > GENTLE)

        sweeps = 1
        while (sweeps < MAX_SWEEPS) & (tl.max(tl.where(hard, 0.0, doubt), 0) > DOUBT):
            middle = 0.5 * (lower + upper)
            w_low, w_middle, w_high = leak, leak, leak
            f_low, f_middle, f_high = none, none, none
            for first in range(0, n, KEYS):
                w, c = weights(
                    x, x_friction, y, y_friction, first + tl.arange(0, KEYS), n, 1, n, stride, width, scale, m, cut,
                    WIDTH, PRECISION,
                )  # fmt: skip
                w_block, f_block = probe(w, c, lower)
                w_low, f_low = w_low + w_block, f_low + f_block
                w_block, f_block = probe(w, c, middle)
                w_middle, f_middle = w_middle + w_block, f_middle + f_block
                w_block, f_block = probe(w, c, upper)
                w_high, f_high = w_high + w_block, f_high + f_block
            highest = upper
            low, g_low, w_under, high, g_high, w_over, upper = tighten(
                lower, w_low, f_low, low, g_low, w_under, high, g_high, w_over, upper
            )
            low, g_low, w_under, high, g_high, w_over, upper = tighten(
                middle, w_middle, f_middle, low, g_low, w_under, high, g_high, w_over, upper
            )
            low, g_low, w_under, high, g_high, w_over, upper = tighten(
                highest, w_high, f_high, low, g_low, w_under, high, g_high, w_over, upper
            )
            lower, doubt = chord(low, g_low, w_under, high, g_high, w_over, upper)
            hard = hard | (lower > GENTLE)
            sweeps += 1

        eta = estimate(leak, low, g_low, w_under, high, g_high, w_over, lower, upper)
        eta = tl.where(hard, 0.0, eta)
        flow, taken, seen_z, lost_z, seen_c, lost_c = none, none, none, none, none, none
        sum_z, sum_c = no_head(ROWS, VALUE_WIDTH), no_head(ROWS, VALUE_WIDTH)
        row_number = start * heads + head + rows * heads
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            w, c = weights(
                x, x_friction, y, y_friction, keys, n, 1, n, stride, width, scale, m, cut, WIDTH, PRECISION
            )
            w = tl.where(c < eta[:, None], w, 0.0)
            z = w * (eta[:, None] - c)
            w *= c
            if DROPOUT:
                flow += tl.sum(z, 1)
                taken += tl.sum(w, 1)
                keep = kept(tl.load(seed), row_number[:, None], keys[None, :], dropout_p)
                z *= keep
                w *= keep
            values = load_head(v + value_at, keys, n, value_stride, value_width, VALUE_WIDTH)
            sum_z, seen_z, lost_z = weigh(z, values, sum_z, seen_z, lost_z, PRECISION)
            sum_c, seen_c, lost_c = weigh(w, values, sum_c, seen_c, lost_c, PRECISION)

        if not DROPOUT:
            flow, taken = seen_z, seen_c
        total = (flow + taken) / tl.maximum(eta, 1e-30)
        flowing = total > 0
        total += leak
        step = tl.where(flowing, (1 - flow - leak * eta) / tl.maximum(total, 1e-37), 0.0)
        start_eta, eta = eta, eta + step
        # A gentle row may be measured from any friction: from half its level, where nothing cancels.
        pivot = tl.minimum(cut + tl.log(0.5 * eta), u_max)
        hard = hard | (eta > GENTLE)
        hard = hard | (flowing & (is_gentle(pivot, pivot - cut, m, norm_s, norm_u, LOG_GENTLE) == 0))
        is_row = rows < n
        store_values(
            out + value_at, means + value_at, slopes + value_at, rows, is_row & (hard == 0), value_stride, value_width,
            sum_z, sum_c, whole(seen_z, lost_z), whole(seen_c, lost_c), start_eta, step, total, taken, VALUE_WIDTH,
        )  # fmt: skip

        limit = tl.where(steep < STEEP, cut + tl.log(upper), float("inf"))  # of the active u of marked rows
        steep = tl.where(flowing, pivot - cut, 0.0)
        place = stats + row_number
        tl.store(place, tl.where(hard, limit, tl.where(flowing, pivot, u_max)), mask=is_row)
        tl.store(place + stat_stride, tl.where(flowing, eta - tl.exp(steep), float("-inf")), mask=is_row)
        tl.store(place + 2 * stat_stride, steep, mask=is_row)
        tl.store(place + 3 * stat_stride, m, mask=is_row)
        tl.store(place + 4 * stat_stride, total, mask=is_row)
        tl.store(place + 5 * stat_stride, tl.log(leak), mask=is_row)
        tl.store(place + 6 * stat_stride, norm_s, mask=is_row)
        tl.store(place + 7 * stat_stride, norm_u, mask=is_row)
        tl.store(place + 9 * stat_stride, tl.where(hard, -1.0, sweeps + 1.0), mask=is_row)
