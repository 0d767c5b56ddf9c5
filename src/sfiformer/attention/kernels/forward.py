"""The forward kernels: scores, flows and their sums of values for one tile of queries, with all keys of the graph on chip."""

import triton
import triton.language as tl

from sfiformer.attention.kernels.solving import row_sums, solve, solve_gently
from sfiformer.attention.kernels.tiles import RUNTIME, combine, kept, locate, products


@triton.jit
def keep_stats(stats, stride, mask, pivot, level, steep, m, total, log_leak, norm_s, norm_u, limit):
    """Write the nine numbers of each row that the backward recomputes its flows from."""
    tl.store(stats, pivot, mask=mask)
    tl.store(stats + stride, level, mask=mask)
    tl.store(stats + 2 * stride, steep, mask=mask)
    tl.store(stats + 3 * stride, m, mask=mask)
    tl.store(stats + 4 * stride, total, mask=mask)
    tl.store(stats + 5 * stride, log_leak, mask=mask)
    tl.store(stats + 6 * stride, norm_s, mask=mask)
    tl.store(stats + 7 * stride, norm_u, mask=mask)
    tl.store(stats + 8 * stride, limit, mask=mask)


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q, k, v, q_friction, k_friction, out, stats, found, ptr, lam, seed,
    log_alpha, scale, dropout_p, graphs, heads, units, value_units, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, HARD: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    LOG_GENTLE: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """The gentle rows of one tile and one head, for graphs of MORE_THAN < n ≤ KEYS nodes. DENSE: there is no friction, u = 0.

    Rows that are not gentle get NaN for a level, and are ``found``: see `steep_forward_kernel`.
    """
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
        outside = tl.where(keys < n, 0.0, float("-inf"))[None, :]
        gentle, z, pivot, level, steep, m, total, log_leak, limit, norm_s, norm_u = solve_gently(
            s, u, outside, tl.load(lam + graph), log_alpha, n.to(tl.float32), POTENTIAL, HARD, LOG_GENTLE
        )
        if DENSE:
            gentle = rows >= 0  # whatever the scores, numbers or not: nobody else writes them
        row_number = start * heads + head + rows * heads
        if DROPOUT:
            z = z * kept(tl.load(seed), row_number[:, None], keys[None, :], dropout_p)
        own = tl.where(gentle, rows, n)  # no others are written
        columns = tl.where(tl.min(own, 0) < n, value_units, 0) * VALUE_UNIT  # none where no row is gentle
        combine(z, v + value_at, keys, out + value_at, own, n, value_stride, columns, 1.0, WIDTH, PRECISION)
        level = tl.where(gentle, level, float("nan"))
        place = stats + row_number
        keep_stats(
            place, stat_stride, rows < n, pivot, level, steep, m, total, log_leak, norm_s, norm_u, limit
        )
        if tl.max(((rows < n) & (gentle == 0)).to(tl.int32), 0) > 0:
            tl.store(found, 1)  # whoever comes writes the same


@triton.jit(do_not_specialize=RUNTIME)
def steep_forward_kernel(
    q, k, v, q_friction, k_friction, out, stats, found, ptr, lam, seed,
    log_alpha, scale, dropout_p, graphs, heads, units, value_units, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, HARD: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """The rows that `forward_kernel` left, in every so many-th tile: few programs look for few rows."""
    if tl.load(found) == 0:  # as a rule: there are none in the whole batch
        return
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    for tile in range(tl.program_id(0), stat_stride // heads // ROWS + graphs, tl.num_programs(0)):
        start, n, graph, first_row = locate(ptr, graphs, tile, ROWS)
        rows, keys = first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
        row_number = start * heads + head + rows * heads
        place = stats + row_number
        is_row = (rows < n) & (n > MORE_THAN) & (n <= KEYS)
        level = tl.load(place + stat_stride, mask=is_row, other=0.0)
        left = is_row & (level != level)
        # The first condition says nothing new, but under a maximum alone the compiler loads two bytes at a time.
        if (first_row < n) & (tl.max(left.to(tl.int32), 0) > 0):
            stride, value_stride = heads * width, heads * value_width
            at, value_at = start * stride + head * width, start * value_stride + head * value_width
            s = scale * products(q + at, k + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION)
            u = scale * products(
                q_friction + at, k_friction + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION
            )
            valid = (keys < n)[None, :] & (rows >= 0)[:, None]
            scale0, s_ref, leak0, spill0, u_max, norm_s, norm_u = row_sums(
                s, u, valid, tl.load(lam + graph), log_alpha, n.to(tl.float32), POTENTIAL, HARD
            )
            z, pivot, level, steep, m, total, log_leak, limit = solve(
                s, u, valid, scale0, s_ref, leak0, spill0, u_max
            )
            sick = norm_s + norm_u
            z = tl.where(
                (sick != sick)[:, None], float("nan"), z
            )  # of scores that are no numbers nothing else is to be had
            if DROPOUT:
                z = z * kept(tl.load(seed), row_number[:, None], keys[None, :], dropout_p)
            own = tl.where(left, rows, n)  # no others are written
            combine(
                z, v + value_at, keys, out + value_at, own, n, value_stride, value_width, 1.0, WIDTH, PRECISION
            )  # fmt: skip
            keep_stats(
                place, stat_stride, left, pivot, level, steep, m, total, log_leak, norm_s, norm_u, limit
            )
