"""The forward kernel: scores, flows and their sums of values for one tile of queries, with all keys of the graph on chip."""

import triton
import triton.language as tl

from sfiformer.attention.kernels.solving import row_sums, solve, solve_gently
from sfiformer.attention.kernels.tiles import RUNTIME, combine, kept, locate, products


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q, k, v, q_friction, k_friction, out, stats, ptr, lam, seed,
    log_alpha, scale, dropout_p, graphs, heads, units, value_units, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, HARD: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    LOG_GENTLE: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one head, for graphs of MORE_THAN < n ≤ KEYS nodes. DENSE: there is no friction, u = 0."""
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    if (first_row < n) & (n > MORE_THAN) & (n <= KEYS):
        rows, keys = first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width

        s = scale * products(q + at, k + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION)
        if DENSE:
            u = s * 0
        else:
            u = scale * products(
                q_friction + at, k_friction + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION
            )
        strength, size = tl.load(lam + graph), n.to(tl.float32)
        outside = tl.where(keys < n, 0.0, float("-inf"))[None, :]
        is_gentle, z, pivot, level, steep, m, total, log_leak, limit, norm_s, norm_u = solve_gently(
            s, u, outside, strength, log_alpha, size, POTENTIAL, HARD, LOG_GENTLE
        )
        if not is_gentle:
            # Made anew, so that the scores need not be kept for this.
            s = scale * products(q + at, k + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION)
            if not DENSE:
                u = scale * products(
                    q_friction + at,
                    k_friction + at,
                    rows,
                    keys,
                    n,
                    stride,
                    width,
                    ROWS,
                    KEYS,
                    WIDTH,
                    PRECISION,
                )
            valid = (keys < n)[None, :] & (rows >= 0)[:, None]
            scale0, s_ref, leak0, spill0, u_max, norm_s, norm_u = row_sums(
                s, u, valid, strength, log_alpha, size, POTENTIAL, HARD
            )
            z, pivot, level, steep, m, total, log_leak, limit = solve(
                s, u, valid, scale0, s_ref, leak0, spill0, u_max
            )
        first = start * heads + head  # of the row's numbers
        if DROPOUT:
            z = z * kept(tl.load(seed), first + rows * heads, keys, dropout_p)
        combine(
            z,
            v + value_at,
            keys,
            out + value_at,
            rows,
            n,
            value_stride,
            value_width,
            1.0,
            WIDTH,
            PRECISION,
        )
        is_row = rows < n
        place = stats + first + rows * heads
        tl.store(place, pivot, mask=is_row)
        tl.store(place + stat_stride, level, mask=is_row)
        tl.store(place + 2 * stat_stride, steep, mask=is_row)
        tl.store(place + 3 * stat_stride, m, mask=is_row)
        tl.store(place + 4 * stat_stride, total, mask=is_row)
        tl.store(place + 5 * stat_stride, log_leak, mask=is_row)
        tl.store(place + 6 * stat_stride, norm_s, mask=is_row)
        tl.store(place + 7 * stat_stride, norm_u, mask=is_row)
        tl.store(place + 8 * stat_stride, limit, mask=is_row)
