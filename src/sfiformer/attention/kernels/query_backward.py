"""The backward kernel of queries: a tile of them with the keys streaming past it, in graphs of any size.

It recomputes the flows from the nine numbers a row that the forward left, and applies the closed form of
`sfiformer.flow.exact`. What that needs of a row is, with g_j = dO · v_j (dropout and all),

    ḡ = Σ_A p g / W ,    T = Σ (g − ḡ) z ,    ∂L/∂log κ = T − ḡ ε η .

A sweep over the keys sums these, and a second makes the gradients. Of large graphs the forward also left O₂ = Σ_A p v / W and
O − O₂, O = Σ z v, so the sums are known beforehand, and one sweep does:

    ḡ = dO · O₂ ,    ∂L/∂log κ = dO · (O − O₂) .

Both were summed in products of the type of v. For the keys, and for the gradient of λ, where errors of many rows add up,
that sweep sums all three anew in float32.
Rows that are not gentle count for nothing here: see `chip_backward`, `pivot_backward`. No atomics: two runs agree to the bit.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.key_backward import (
    keep_for_keys,
    note_found,
    plain_gradients,
    share_of,
)
from sfiformer.attention.kernels.streaming import LOG2E, is_gentle
from sfiformer.attention.kernels.tiles import (
    RUNTIME,
    add_to_head,
    block_of_products,
    kept,
    load_head,
    locate,
    no_head,
    row_products,
    store_head,
)


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
def upper_limit(place, is_row, stride, pivot, level, steep, gentle, LARGE: tl.constexpr):
    """Of the active u: of rows solved on chip half-way to the next, else where κ f = η."""
    if LARGE:
        eta = tl.where(gentle & (level > 0), level + tl.exp(steep), 1.0)
        limit = pivot + (tl.log(eta) - steep)
    else:
        limit = tl.load(place + 8 * stride, mask=is_row, other=0.0)
    return limit


@triton.jit
def block_of_scores(
    x, x_friction, upstream, q, k, q_friction, k_friction, grad_out, v, rows, keys, n, stride, width, value_stride, value_width,
    scale, seed, row_number, dropout_p,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s and u of a block of keys, in units of log 2, and g."""
    s = block_of_products(
        x, q, k, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, CHUNK, PRECISION
    ) * (scale * LOG2E)  # fmt: skip
    u = s * 0
    if not DENSE:
        u = block_of_products(
            x_friction, q_friction, k_friction, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, CHUNK, PRECISION
        ) * (scale * LOG2E)  # fmt: skip
    g = block_of_products(
        upstream, grad_out, v, rows, keys, n, value_stride, value_width, ROWS, KEYS, VALUE_WIDTH, CHUNK, PRECISION
    )  # fmt: skip
    if DROPOUT:
        g *= kept(tl.load(seed), row_number[:, None], keys[None, :], dropout_p)
    return s, u, g


@triton.jit(do_not_specialize=RUNTIME)
def query_kernel(
    q, k, v, q_friction, k_friction, grad_out, means, slopes, grad_q, grad_q_friction, plain, found, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, units, value_units, stat_stride, more_than,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LARGE: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    POTENTIAL: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG_GENTLE: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one tile, and the sums of their rows; of LARGE graphs, n > more_than, or of the others."""
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    if (first_row < n) & ((n > more_than) == LARGE):
        rows = first_row + tl.arange(0, ROWS)
        is_row = rows < n
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        row_number = start * heads + head + rows * heads
        place = stats + row_number
        pivot, level, steep, m, norm_s, norm_u = load_stats(place, is_row, stat_stride)
        gentle = is_row
        if not DENSE:
            gentle = is_row & is_gentle(pivot, steep, m, norm_s, norm_u, LOG_GENTLE)
        # No sweep where no row is gentle.
        end = n if DENSE else tl.where(tl.max(gentle.to(tl.int32), 0) > 0, n, 0)
        flowing = gentle & (level > 0)
        eta = tl.where(flowing, level + tl.exp(steep), 1.0)
        reference = tl.where(flowing, m - tl.log(eta), float("inf"))
        threshold = tl.where(flowing, pivot + (tl.log(eta) - steep), norm_u)
        limit = upper_limit(place, is_row, stat_stride, pivot, level, steep, gentle, LARGE)
        log_leak = tl.load(place + 5 * stat_stride, mask=is_row, other=float("-inf"))
        spill = tl.where(flowing, tl.exp(log_leak) * eta, 0.0)  # 1 − Σ z
        low_s, high_u = (norm_s * LOG2E)[:, None], (threshold * LOG2E)[:, None]
        edge, top_s = (tl.where(flowing, limit, float("-inf")) * LOG2E)[:, None], (reference * LOG2E)[:, None]

        q, k, v, grad_out = q + at, k + at, v + value_at, grad_out + value_at
        if not DENSE:
            q_friction, k_friction = q_friction + at, k_friction + at
        x = load_head(q, rows, n, stride, width, WIDTH)
        x_friction = x if DENSE else load_head(q_friction, rows, n, stride, width, WIDTH)
        upstream = load_head(grad_out, rows, n, value_stride, value_width, VALUE_WIDTH)
        none = tl.zeros([ROWS], tl.float32)
        moved, supplied, total, flow = none, none, none, none
        if LARGE:
            slope = load_head(slopes + value_at, rows, n, value_stride, value_width, VALUE_WIDTH)
            mean = load_head(means + value_at, rows, n, value_stride, value_width, VALUE_WIDTH)
            slope = tl.where(gentle, row_products(upstream, slope)[0], 0.0)  # ∂L/∂log κ
            mean = tl.where(gentle, row_products(upstream, mean)[0], 0.0)  # ḡ
            pull = slope + mean * spill
        else:
            for first in range(0, end, KEYS):
                keys = first + tl.arange(0, KEYS)
                s, u, g = block_of_scores(
                    x, x_friction, upstream, q, k, q_friction, k_friction, grad_out, v, rows, keys, n, stride, width,
                    value_stride, value_width, scale, seed, row_number, dropout_p,
                    ROWS, KEYS, WIDTH, VALUE_WIDTH, CHUNK, DENSE, DROPOUT, PRECISION,
                )  # fmt: skip
                supply = tl.where((u < edge) & (keys < n)[None, :], tl.exp2(s - top_s), 0.0)
                z = supply * tl.maximum(1 - tl.exp2(u - high_u), 0.0)
                moved += tl.sum(z * g, 1)
                flow += tl.sum(z, 1)
                supplied += tl.sum(supply * g, 1)
                total += tl.sum(supply, 1)
            mean = supplied / tl.maximum(total + spill, 1e-37)
            pull = moved - mean * flow
            slope = pull - mean * spill
        share = share_of(slope, threshold, norm_u)

        of_q, of_q_friction = no_head(ROWS, WIDTH), no_head(ROWS, WIDTH)
        for first in range(0, end, KEYS):
            keys = first + tl.arange(0, KEYS)
            outside = tl.where(keys < n, 0.0, float("-inf"))[None, :]
            s, u, g = block_of_scores(
                x, x_friction, upstream, q, k, q_friction, k_friction, grad_out, v, rows, keys, n, stride, width,
                value_stride, value_width, scale, seed, row_number, dropout_p,
                ROWS, KEYS, WIDTH, VALUE_WIDTH, CHUNK, DENSE, DROPOUT, PRECISION,
            )  # fmt: skip
            z, supply, grad_s, grad_u = plain_gradients(
                s + outside, s - outside, u + outside, g, top_s, high_u, edge,
                low_s, mean[:, None], pull[:, None], share[:, None], POTENTIAL,
            )  # fmt: skip
            if LARGE:
                centred = g - mean[:, None]
                moved += tl.sum(z * centred, 1)
                supplied += tl.sum(supply * centred, 1)
                total += tl.sum(supply, 1)
            y = load_head(k, keys, n, stride, width, WIDTH)
            of_q = add_to_head(of_q, grad_s, y, PRECISION)
            if not DENSE:
                y = load_head(k_friction, keys, n, stride, width, WIDTH)
                of_q_friction = add_to_head(of_q_friction, grad_u, y, PRECISION)
        store_head(grad_q + at, rows, of_q, scale, gentle, stride, width, WIDTH)
        if not DENSE:
            store_head(grad_q_friction + at, rows, of_q_friction, scale, gentle, stride, width, WIDTH)
        if LARGE:
            # How far ḡ was off, and what follows: ḡ = Σ_A p g / W, T = Σ (g − ḡ) z with Σ z = 1 − ε η.
            off = tl.where(flowing, (supplied - spill * mean) / tl.maximum(total + spill, 1e-37), 0.0)
            mean += off
            pull = moved - off * (1 - spill)
            slope = pull - mean * spill
        # Loaded anew: what a tile keeps through both sweeps fills its registers.
        pivot, level, steep, m, norm_s, norm_u = load_stats(stats + row_number, is_row, stat_stride)
        gentle = is_row
        if not DENSE:
            gentle = is_row & is_gentle(pivot, steep, m, norm_s, norm_u, LOG_GENTLE)
        limit = upper_limit(stats + row_number, is_row, stat_stride, pivot, level, steep, gentle, LARGE)
        place = sums + row_number
        tl.store(place, none, mask=gentle)
        tl.store(place + stat_stride, mean, mask=gentle)
        tl.store(place + 2 * stat_stride, pull, mask=gentle)
        tl.store(place + 3 * stat_stride, slope, mask=gentle)
        tl.store(place + 4 * stat_stride, none, mask=gentle)
        place = plain + head * (stat_stride // heads) + start + rows
        keep_for_keys(
            place, stat_stride, is_row, gentle, pivot, level, steep, m, limit, mean, pull, slope, norm_s, norm_u
        )  # fmt: skip
        if (not LARGE) & (tl.max((is_row & (gentle == 0)).to(tl.int32), 0) > 0):
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
