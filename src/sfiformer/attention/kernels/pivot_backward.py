"""The backward of rows that are not gentle: `chip_backward`'s formulas, with keys (of large graphs) or queries streaming past.

These kernels follow those of gentle rows, skip every tile without such a row, and touch no other row. No atomics.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.chip_backward import (
    gate_gradient,
    gradient_of_s,
    gradient_of_u,
    keep_sums,
    lifted_product,
)
from sfiformer.attention.kernels.key_backward import note_found
from sfiformer.attention.kernels.pivot_forward import steep_flows
from sfiformer.attention.kernels.query_backward import load_stats
from sfiformer.attention.kernels.streaming import is_gentle, scores
from sfiformer.attention.kernels.tiles import (
    RUNTIME,
    add_to_head,
    head_products,
    kept,
    load_head,
    locate,
    no_head,
    places,
    row_products,
    saturated,
    store_head,
)


@triton.jit
def steep_rows(place, is_row, stride, log_gentle):
    """The numbers of the rows that are not gentle, and which these are; the others get a level without flow."""
    pivot, level, steep, m, norm_s, norm_u = load_stats(place, is_row, stride)
    hard = is_row & (is_gentle(pivot, steep, m, norm_s, norm_u, log_gentle) == 0)
    return pivot, tl.where(hard, level, float("-inf")), steep, m, norm_s, norm_u, hard


@triton.jit
def ahead_of_top(g, g_top, size, keys, top, valid):
    """g − g_top, and 0 at the heaviest key itself and within rounding, since friction may multiply it by any power of e.

    Only the key's number tells it: from one kernel to the next its g may come out with other last bits, in units of
    ``size`` = Σ |dO| |v_top|.
    """
    ahead = g - g_top[:, None]
    other = (keys[None, :] != top[:, None]) & (tl.abs(ahead) > 4e-7 * size[:, None])
    return tl.where(valid & other, ahead, 0.0)


@triton.jit(do_not_specialize=RUNTIME)
def pivot_query_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_q, grad_q_friction, found, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, units, value_units, stat_stride, more_than,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG_GENTLE: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients of such queries and the sums of their rows: one sweep for the sums, one for the gradients."""
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    rows = first_row + tl.arange(0, ROWS)
    row_number = start * heads + head + rows * heads
    pivot, level, steep, m, norm_s, norm_u, hard = steep_rows(
        stats + row_number, (n > more_than) & (rows < n), stat_stride, LOG_GENTLE
    )
    # The first condition says nothing new, but under a maximum alone the compiler loads two bytes at a time.
    if (first_row < n) & (tl.max(hard.to(tl.int32), 0) > 0):
        note_found(found, graph * heads + head)
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        x = load_head(q + at, rows, n, stride, width, WIDTH)
        x_friction = load_head(q_friction + at, rows, n, stride, width, WIDTH)
        upstream = load_head(grad_out + value_at, rows, n, value_stride, value_width, VALUE_WIDTH)
        total = tl.load(stats + row_number + 4 * stat_stride, mask=hard, other=1.0)
        log_leak = tl.load(stats + row_number + 5 * stat_stride, mask=hard, other=float("-inf"))
        lift = tl.maximum(steep, 0.0)
        top = tl.load(stats + row_number + 8 * stat_stride, mask=hard, other=0.0).to(tl.int32)
        pivot_key = tl.load(stats + row_number + 10 * stat_stride, mask=hard, other=0.0).to(tl.int32)
        g_top, size = row_products(
            upstream, load_head(v + value_at, top, n, value_stride, value_width, VALUE_WIDTH)
        )
        if DROPOUT:
            keep = kept(tl.load(seed), row_number, top, dropout_p)
            g_top, size = g_top * keep, size * keep

        # Σ w (g − g_top), Σ z (g − g_top) and Σ z, the first lifted.
        offset, pull, flow = lift * 0, lift * 0, lift * 0
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            s = scores(x, k + at, keys, n, stride, width, scale, WIDTH, PRECISION)
            u = scores(x_friction, k_friction + at, keys, n, stride, width, scale, WIDTH, PRECISION)
            g = scores(
                upstream, v + value_at, keys, n, value_stride, value_width, 1.0, VALUE_WIDTH, PRECISION
            )
            if DROPOUT:
                g *= kept(tl.load(seed), row_number[:, None], keys[None, :], dropout_p)
            valid = (keys < n)[None, :] & hard[:, None]
            z, log_weight, _ = steep_flows(s, u, valid, keys, pivot, pivot_key, top, m, level, steep, m)
            ahead = ahead_of_top(g, g_top, size, keys, top, valid)
            offset += tl.sum(lifted_product(log_weight + lift[:, None], ahead), 1)
            pull += tl.sum(z * ahead, 1)
            flow += tl.sum(z, 1)
        offset = (offset - lifted_product(log_leak + lift, g_top)) / total
        sunk = offset * tl.exp(-lift)  # ḡ − g_top
        mean = tl.where(level > 0, g_top + sunk, 0.0)
        pull -= sunk * flow
        # Less ḡ (1 − Σ z), and 1 − Σ z is ε η: of the sum itself only rounding would be left.
        grad_log_kappa = pull - mean * (tl.exp(log_leak) * tl.maximum(level, 0.0) + tl.exp(log_leak + steep))

        of_q, of_q_friction = no_head(ROWS, WIDTH), no_head(ROWS, WIDTH)
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            y = load_head(k + at, keys, n, stride, width, WIDTH)
            y_friction = load_head(k_friction + at, keys, n, stride, width, WIDTH)
            s = scale * head_products(x, y, PRECISION)
            u = scale * head_products(x_friction, y_friction, PRECISION)
            g = scores(
                upstream, v + value_at, keys, n, value_stride, value_width, 1.0, VALUE_WIDTH, PRECISION
            )
            if DROPOUT:
                g *= kept(tl.load(seed), row_number[:, None], keys[None, :], dropout_p)
            valid = (keys < n)[None, :] & hard[:, None]
            z, _, log_gated = steep_flows(s, u, valid, keys, pivot, pivot_key, top, m, level, steep, m)
            ahead = ahead_of_top(g, g_top, size, keys, top, valid)
            gate = gate_gradient(log_gated, ahead, offset, lift)
            grad_s = gradient_of_s(s, valid, z, ahead - sunk[:, None], pull, norm_s, POTENTIAL)
            grad_u = gradient_of_u(u, valid, gate, grad_log_kappa, norm_u)
            of_q = add_to_head(of_q, grad_s, y, PRECISION)
            of_q_friction = add_to_head(of_q_friction, grad_u, y_friction, PRECISION)
        store_head(grad_q + at, rows, of_q, scale, hard, stride, width, WIDTH)
        store_head(grad_q_friction + at, rows, of_q_friction, scale, hard, stride, width, WIDTH)
        keep_sums(
            sums + row_number, stat_stride, hard, g_top, offset, pull, grad_log_kappa, size, top, pivot_key, m
        )  # fmt: skip


@triton.jit
def add_at(out, rows, x, factor, is_row, stride, width, WIDTH: tl.constexpr):
    """Add factor · x, heads in parts, to what an earlier kernel wrote there; only this program touches it."""
    for part in tl.static_range(len(x)):
        place, inside = places(rows, is_row, stride, width, part, WIDTH)
        before = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, saturated(before + x[part] * factor, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def pivot_key_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_k, grad_v, grad_k_friction, found, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, units, value_units, stat_stride, more_than,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG_GENTLE: tl.constexpr,
    ON_CHIP: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """What such queries add to the gradients of every so many-th tile of keys, where their kernels found any in the graph."""
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    if tl.load(found) == 0:  # as a rule: there are none in the whole batch
        return
    head = tl.program_id(1)
    for tile in range(tl.program_id(0), stat_stride // heads // ROWS + graphs, tl.num_programs(0)):
        start, n, graph, first_key = locate(ptr, graphs, tile, ROWS)
        if (first_key < n) & (tl.load(found + 1 + graph * heads + head, mask=first_key < n, other=0) > 0):
            keys = first_key + tl.arange(0, ROWS)
            stride, value_stride = heads * width, heads * value_width
            at, value_at = start * stride + head * width, start * value_stride + head * value_width
            log_gentle = tl.where(n > more_than, LOG_GENTLE, ON_CHIP)
            of_k, of_k_friction, of_v = no_head(ROWS, WIDTH), no_head(ROWS, WIDTH), no_head(ROWS, VALUE_WIDTH)
            for first in range(0, n, KEYS):
                queries = first + tl.arange(0, KEYS)
                row_number = start * heads + head + queries * heads
                pivot, level, steep, m, norm_s, norm_u, hard = steep_rows(
                    stats + row_number, queries < n, stat_stride, log_gentle
                )
                if tl.max(hard.to(tl.int32), 0) > 0:
                    place = sums + row_number
                    g_top = tl.load(place, mask=hard, other=0.0)
                    offset = tl.load(place + stat_stride, mask=hard, other=0.0)
                    pull = tl.load(place + 2 * stat_stride, mask=hard, other=0.0)
                    grad_log_kappa = tl.load(place + 3 * stat_stride, mask=hard, other=0.0)
                    size = tl.load(place + 4 * stat_stride, mask=hard, other=0.0)
                    top = tl.load(place + 5 * stat_stride, mask=hard, other=0.0).to(tl.int32)
                    pivot_key = tl.load(place + 6 * stat_stride, mask=hard, other=0.0).to(tl.int32)
                    heaviest = tl.load(place + 7 * stat_stride, mask=hard, other=0.0)
                    lift = tl.maximum(steep, 0.0)
                    x = load_head(q + at, queries, n, stride, width, WIDTH)
                    x_friction = load_head(q_friction + at, queries, n, stride, width, WIDTH)
                    upstream = load_head(
                        grad_out + value_at, queries, n, value_stride, value_width, VALUE_WIDTH
                    )
                    s = scores(x, k + at, keys, n, stride, width, scale, WIDTH, PRECISION)
                    u = scores(x_friction, k_friction + at, keys, n, stride, width, scale, WIDTH, PRECISION)
                    g = scores(
                        upstream,
                        v + value_at,
                        keys,
                        n,
                        value_stride,
                        value_width,
                        1.0,
                        VALUE_WIDTH,
                        PRECISION,
                    )
                    if DROPOUT:
                        keep = kept(tl.load(seed), row_number[:, None], keys[None, :], dropout_p)
                        g *= keep
                    valid = (keys < n)[None, :] & hard[:, None]
                    z, _, log_gated = steep_flows(
                        s, u, valid, keys, pivot, pivot_key, top, heaviest, level, steep, m
                    )
                    ahead = ahead_of_top(g, g_top, size, keys, top, valid)
                    gate = gate_gradient(log_gated, ahead, offset, lift)
                    sunk = offset * tl.exp(-lift)
                    grad_s = gradient_of_s(s, valid, z, ahead - sunk[:, None], pull, norm_s, POTENTIAL)
                    grad_u = gradient_of_u(u, valid, gate, grad_log_kappa, norm_u)
                    if DROPOUT:
                        z *= keep
                    of_v = add_to_head(of_v, tl.trans(z), upstream, PRECISION)
                    of_k = add_to_head(of_k, tl.trans(grad_s), x, PRECISION)
                    of_k_friction = add_to_head(of_k_friction, tl.trans(grad_u), x_friction, PRECISION)
            is_key = keys < n
            add_at(grad_k + at, keys, of_k, scale, is_key, stride, width, WIDTH)
            add_at(grad_k_friction + at, keys, of_k_friction, scale, is_key, stride, width, WIDTH)
            add_at(grad_v + value_at, keys, of_v, 1.0, is_key, value_stride, value_width, VALUE_WIDTH)
