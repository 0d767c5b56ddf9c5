"""The rows of large graphs that are not gentle: measured from a pivot, as `solving` does, with the keys streaming past.

These kernels follow those of `stream_forward` and `stream_backward`, skip every tile without such a row, and touch no other
row. With the row's normalisers (f = exp(u − norm_u), and r or p likewise),

    log κ f_k p_m = strength + (m − norm_s) + (u_k − norm_u) ,
    log ε/p_m     = −log α − (m − norm_s) ,
    log ε κ f_k   = strength − log α + (u_k − norm_u) .
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.backward import gate_gradient, gradient_of_s, gradient_of_u, load_stats
from sfiformer.attention.kernels.solving import above_pivot, expm1, flows, log1p, rounding
from sfiformer.attention.kernels.stream_backward import store_columns
from sfiformer.attention.kernels.streaming import is_gentle, scores
from sfiformer.attention.kernels.tiles import kept, load_chunk, locate

MAX_SWEEPS = tl.constexpr(200)  # no row is known to need as many


@triton.jit
def last_below(
    q_friction, k_friction, limit, n, stride, width, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest u below ``limit`` of each row, −inf where there is none."""
    found = tl.full([ROWS], float("-inf"), tl.float32)
    for first in range(0, n, KEYS):
        keys = first + tl.arange(0, KEYS)
        u = scores(q_friction, k_friction, keys, n, stride, width, scale, WIDTH, PRECISION)
        below = (keys < n)[None, :] & (u < limit[:, None])
        found = tl.maximum(found, tl.max(tl.where(below, u, float("-inf")), 1))
    return found


@triton.jit
def measure_streamed(
    q, q_friction, k, k_friction, pivot, strength, leak0, norm_s, norm_u, n, stride, width, scale,
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
        above = above_pivot(u, pivot)
        active = (keys < n)[None, :] & (above <= 0)
        depth = -expm1(tl.minimum(above, 0.0))
        s = tl.where(active, s, -inf)
        lift = tl.where(depth > 0, s + tl.log(tl.where(depth > 0, depth, 1.0)), -inf)
        top, top_lift = tl.maximum(m, tl.max(s, 1)), tl.maximum(peak, tl.max(lift, 1))
        anchor, anchor_lift = tl.maximum(top, -1e30), tl.maximum(top_lift, -1e30)  # while nothing is active: −inf − −inf
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
def pivot_forward_kernel(
    q, k, v, q_friction, k_friction, out, means, stats, ptr, lam, seed,
    log_alpha, scale, dropout_p, graphs, heads, width, value_width, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, HARD: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The marked rows of one tile: Newton's method downwards in logarithms, two sweeps a step, as in `solving.solve`."""
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    rows = first_row + tl.arange(0, ROWS)
    place = stats + start * heads + head + rows * heads
    here = (n > MORE_THAN) & (rows < n)
    hard = tl.load(place + 8 * stat_stride, mask=here, other=0.0) < 0
    if tl.max(hard.to(tl.int32), 0) > 0:
        inf = float("inf")
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        x = load_chunk(q + at, rows, n, stride, 0, width, WIDTH)
        x_friction = load_chunk(q_friction + at, rows, n, stride, 0, width, WIDTH)
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
        u_min = tl.full([ROWS], inf, tl.float32)
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            s = scores(x, y, keys, n, stride, width, scale, WIDTH, PRECISION)
            u = scores(x_friction, y_friction, keys, n, stride, width, scale, WIDTH, PRECISION)
            taken, supply = strength + (u - norm_u[:, None]), norm_s[:, None] - s
            high, low = tl.maximum(taken, supply), tl.minimum(taken, supply)
            inside = (keys < n)[None, :]
            bound = tl.minimum(bound, tl.min(tl.where(inside, high + tl.log(1 + tl.exp(low - high)), inf), 1))
            u_min = tl.minimum(u_min, tl.min(tl.where(inside, u, inf), 1))
        bound += norm_u - strength
        limit = tl.minimum(limit + 1e-3, bound) + rounding(bound, norm_u)

        pivot, level, steep, m = u_min, u_min * 0, u_min * 0, u_min * 0
        total, log_leak = u_min * 0, u_min * 0
        shrinking, sweeps = 1, 2
        shrink = hard
        while (sweeps < MAX_SWEEPS) & (shrinking > 0):
            lower = last_below(x_friction, y_friction, limit, n, stride, width, scale, ROWS, KEYS, WIDTH, PRECISION)
            pivot = tl.where(shrink, tl.where(lower == -inf, u_min, lower), pivot)
            level, steep, m, total, log_leak = measure_streamed(
                x, x_friction, y, y_friction, pivot, strength, leak0, norm_s, norm_u, n, stride, width, scale,
                ROWS, KEYS, WIDTH, PRECISION,
            )  # fmt: skip
            shrink = hard & (level <= 0) & (pivot > u_min)
            rise = log1p(tl.maximum(level * tl.exp(-steep), -0.999999))
            limit = tl.minimum(pivot + rise + rounding(pivot, norm_u), pivot)
            sweeps += 2 * shrinking
            shrinking = tl.max(shrink.to(tl.int32), 0)

        level = tl.where(level > 0, level, -inf)
        sum_z = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
        sum_w = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            s = scores(x, y, keys, n, stride, width, scale, WIDTH, PRECISION)
            u = scores(x_friction, y_friction, keys, n, stride, width, scale, WIDTH, PRECISION)
            valid = (keys < n)[None, :] & hard[:, None]
            z, log_weight, _ = flows(s, u, valid, pivot, level, steep, m)
            w = tl.exp(log_weight)
            if DROPOUT:
                keep = kept(tl.load(seed), start * heads + head + rows * heads, keys, dropout_p)
                z *= keep
                w *= keep
            values = load_chunk(v + value_at, keys, n, value_stride, 0, value_width, VALUE_WIDTH)
            sum_z = tl.dot(z.to(values.dtype), values, sum_z, input_precision=PRECISION)
            sum_w = tl.dot(w.to(values.dtype), values, sum_w, input_precision=PRECISION)
        store_columns(out + value_at, rows, sum_z, hard, value_stride, value_width, VALUE_WIDTH)
        store_columns(means + value_at, rows, sum_w / total[:, None], hard, value_stride, value_width, VALUE_WIDTH)
        tl.store(place, pivot, mask=hard)
        tl.store(place + stat_stride, level, mask=hard)
        tl.store(place + 2 * stat_stride, steep, mask=hard)
        tl.store(place + 3 * stat_stride, m, mask=hard)
        tl.store(place + 4 * stat_stride, total, mask=hard)
        tl.store(place + 5 * stat_stride, log_leak, mask=hard)
        tl.store(place + 8 * stat_stride, u_min * 0 + sweeps, mask=hard)


@triton.jit
def steep_rows(place, is_row, stride):
    """The numbers of the rows that are not gentle, and which these are; the others get a level without flow."""
    pivot, level, steep, m, norm_s, norm_u = load_stats(place, is_row, stride)
    hard = is_row & (is_gentle(pivot, steep, m, norm_s, norm_u) == 0)
    return pivot, tl.where(hard, level, float("-inf")), steep, m, norm_s, norm_u, hard


@triton.jit
def ahead_of_top(g, g_top, valid):
    """g − g_top, and 0 within rounding: friction may multiply the heaviest key's own difference by any power of e."""
    ahead = g - g_top[:, None]
    return tl.where(valid & (tl.abs(ahead) > 4e-7 * tl.abs(g_top)[:, None]), ahead, 0.0)


@triton.jit
def pivot_query_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_q, grad_q_friction, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, width, value_width, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of such queries and the sums of their rows: one sweep for the sums, one for the gradients."""
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    rows = first_row + tl.arange(0, ROWS)
    row_number = start * heads + head + rows * heads
    pivot, level, steep, m, norm_s, norm_u, hard = steep_rows(
        stats + row_number, (n > MORE_THAN) & (rows < n), stat_stride
    )
    if tl.max(hard.to(tl.int32), 0) > 0:
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        x = load_chunk(q + at, rows, n, stride, 0, width, WIDTH)
        x_friction = load_chunk(q_friction + at, rows, n, stride, 0, width, WIDTH)
        upstream = load_chunk(grad_out + value_at, rows, n, value_stride, 0, value_width, VALUE_WIDTH)
        total = tl.load(stats + row_number + 4 * stat_stride, mask=hard, other=1.0)
        log_leak = tl.load(stats + row_number + 5 * stat_stride, mask=hard, other=float("-inf"))
        lift = tl.maximum(steep, 0.0)

        # Σ w (g − g_top), Σ z (g − g_top), Σ w and Σ z, where g_top is g at the heaviest key so far.
        heaviest = tl.full([ROWS], float("-inf"), tl.float32)
        g_top, offset, pull, weight, flow = lift * 0, lift * 0, lift * 0, lift * 0, lift * 0
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            s = scores(x, k + at, keys, n, stride, width, scale, WIDTH, PRECISION)
            u = scores(x_friction, k_friction + at, keys, n, stride, width, scale, WIDTH, PRECISION)
            g = scores(upstream, v + value_at, keys, n, value_stride, value_width, 1.0, VALUE_WIDTH, PRECISION)
            if DROPOUT:
                g *= kept(tl.load(seed), row_number, keys, dropout_p)
            valid = (keys < n)[None, :] & hard[:, None]
            z, log_weight, _ = flows(s, u, valid, pivot, level, steep, m)
            top = tl.max(log_weight, 1)
            is_top = log_weight >= top[:, None]
            g_here = tl.sum(tl.where(is_top, g, 0.0), 1) / tl.sum(is_top.to(tl.float32), 1)
            heavier = top > heaviest
            moved = tl.where(heavier, g_top - g_here, 0.0)
            offset += moved * weight
            pull += moved * flow
            g_top = tl.where(heavier, g_here, g_top)
            heaviest = tl.maximum(heaviest, top)
            lifted = tl.exp(tl.minimum(log_weight + lift[:, None], 80.0))
            ahead = ahead_of_top(g, g_top, valid)
            offset += tl.sum(lifted * ahead, 1)
            pull += tl.sum(z * ahead, 1)
            weight += tl.sum(lifted, 1)
            flow += tl.sum(z, 1)
        offset = (offset - tl.exp(tl.minimum(log_leak + lift, 80.0)) * g_top) / total
        sunk = offset * tl.exp(-lift)  # ḡ − g_top
        mean = tl.where(level > 0, g_top + sunk, 0.0)
        pull -= sunk * flow
        grad_log_kappa = pull - mean * (1 - flow)

        of_q = tl.zeros([ROWS, WIDTH], tl.float32)
        of_q_friction = tl.zeros([ROWS, WIDTH], tl.float32)
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            y = load_chunk(k + at, keys, n, stride, 0, width, WIDTH)
            y_friction = load_chunk(k_friction + at, keys, n, stride, 0, width, WIDTH)
            s = scale * tl.dot(x, tl.trans(y), input_precision=PRECISION)
            u = scale * tl.dot(x_friction, tl.trans(y_friction), input_precision=PRECISION)
            g = scores(upstream, v + value_at, keys, n, value_stride, value_width, 1.0, VALUE_WIDTH, PRECISION)
            if DROPOUT:
                g *= kept(tl.load(seed), row_number, keys, dropout_p)
            valid = (keys < n)[None, :] & hard[:, None]
            z, _, log_gated = flows(s, u, valid, pivot, level, steep, m)
            ahead = ahead_of_top(g, g_top, valid)
            gate = gate_gradient(log_gated, ahead, offset, lift)
            grad_s = gradient_of_s(s, valid, z, ahead - sunk[:, None], pull, norm_s, POTENTIAL)
            grad_u = gradient_of_u(u, valid, gate, grad_log_kappa, norm_u)
            of_q = tl.dot(grad_s.to(y.dtype), y, of_q, input_precision=PRECISION)
            of_q_friction = tl.dot(grad_u.to(y.dtype), y_friction, of_q_friction, input_precision=PRECISION)
        store_columns(grad_q + at, rows, of_q * scale, hard, stride, width, WIDTH)
        store_columns(grad_q_friction + at, rows, of_q_friction * scale, hard, stride, width, WIDTH)
        place = sums + row_number
        tl.store(place, g_top, mask=hard)
        tl.store(place + stat_stride, offset, mask=hard)
        tl.store(place + 2 * stat_stride, pull, mask=hard)
        tl.store(place + 3 * stat_stride, grad_log_kappa, mask=hard)
        tl.store(place + 4 * stat_stride, lift, mask=hard)


@triton.jit
def add_columns(out, rows, x, is_row, stride, width, WIDTH: tl.constexpr):
    """Add a tile to what an earlier kernel wrote there; only this program touches it."""
    columns = tl.arange(0, WIDTH)
    inside = is_row[:, None] & (columns < width)[None, :]
    place = out + (rows[:, None] * stride + columns[None, :])
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (before + x).to(out.dtype.element_ty), mask=inside)


@triton.jit
def pivot_key_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_k, grad_v, grad_k_friction, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, width, value_width, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What such queries add to the gradients of one tile of ROWS keys: blocks of KEYS queries, most of them skipped."""
    head = tl.program_id(1)
    start, n, graph, first_key = locate(ptr, graphs, tl.program_id(0), ROWS)
    if (first_key < n) & (n > MORE_THAN):
        keys = first_key + tl.arange(0, ROWS)
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        of_k = tl.zeros([ROWS, WIDTH], tl.float32)
        of_k_friction = tl.zeros([ROWS, WIDTH], tl.float32)
        of_v = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
        some = 0
        for first in range(0, n, KEYS):
            queries = first + tl.arange(0, KEYS)
            row_number = start * heads + head + queries * heads
            pivot, level, steep, m, norm_s, norm_u, hard = steep_rows(
                stats + row_number, queries < n, stat_stride
            )
            if tl.max(hard.to(tl.int32), 0) > 0:
                some = 1
                place = sums + row_number
                g_top = tl.load(place, mask=hard, other=0.0)
                offset = tl.load(place + stat_stride, mask=hard, other=0.0)
                pull = tl.load(place + 2 * stat_stride, mask=hard, other=0.0)
                grad_log_kappa = tl.load(place + 3 * stat_stride, mask=hard, other=0.0)
                lift = tl.load(place + 4 * stat_stride, mask=hard, other=0.0)
                x = load_chunk(q + at, queries, n, stride, 0, width, WIDTH)
                x_friction = load_chunk(q_friction + at, queries, n, stride, 0, width, WIDTH)
                upstream = load_chunk(grad_out + value_at, queries, n, value_stride, 0, value_width, VALUE_WIDTH)
                s = scores(x, k + at, keys, n, stride, width, scale, WIDTH, PRECISION)
                u = scores(x_friction, k_friction + at, keys, n, stride, width, scale, WIDTH, PRECISION)
                g = scores(upstream, v + value_at, keys, n, value_stride, value_width, 1.0, VALUE_WIDTH, PRECISION)
                if DROPOUT:
                    keep = kept(tl.load(seed), row_number, keys, dropout_p)
                    g *= keep
                valid = (keys < n)[None, :] & hard[:, None]
                z, _, log_gated = flows(s, u, valid, pivot, level, steep, m)
                ahead = ahead_of_top(g, g_top, valid)
                gate = gate_gradient(log_gated, ahead, offset, lift)
                sunk = offset * tl.exp(-lift)
                grad_s = gradient_of_s(s, valid, z, ahead - sunk[:, None], pull, norm_s, POTENTIAL)
                grad_u = gradient_of_u(u, valid, gate, grad_log_kappa, norm_u)
                if DROPOUT:
                    z *= keep
                of_v += tl.dot(tl.trans(z).to(upstream.dtype), upstream, input_precision=PRECISION)
                of_k += tl.dot(tl.trans(grad_s).to(x.dtype), x, input_precision=PRECISION)
                of_k_friction += tl.dot(tl.trans(grad_u).to(x.dtype), x_friction, input_precision=PRECISION)
        if some > 0:
            is_key = keys < n
            add_columns(grad_k + at, keys, of_k * scale, is_key, stride, width, WIDTH)
            add_columns(grad_k_friction + at, keys, of_k_friction * scale, is_key, stride, width, WIDTH)
            add_columns(grad_v + value_at, keys, of_v, is_key, value_stride, value_width, VALUE_WIDTH)
