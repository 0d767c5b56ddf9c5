"""The backward kernels of large graphs: a tile of queries with the keys streaming past it, and a tile of keys with the queries.

The forward left O₂ = Σ_A p v / W and O − O₂ of each row, O = Σ z v, so the sums that the closed form of
`sfiformer.flow.exact` needs are known before the sweep:

    ḡ = dO · O₂ ,    ∂L/∂log κ = Σ g z − ḡ = dO · (O − O₂) ,    T = Σ g z − ḡ Σ z = ∂L/∂log κ + ḡ ε η .

Both were summed in products of the type of v. For the keys, and for the gradient of λ, where errors of many rows add up,
the sweep sums all three anew in float32.
Rows that are not gentle count for nothing here: see `pivot_backward`. No atomics: two runs agree to the bit.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.backward import load_stats
from sfiformer.attention.kernels.streaming import LOG2E, is_gentle, scores
from sfiformer.attention.kernels.tiles import kept, load_chunk, locate


@triton.jit
def store_columns(out, rows, x, is_row, stride, width, WIDTH: tl.constexpr):
    """Write the tile ``x`` [rows, WIDTH] of a tensor whose heads have ``width`` columns."""
    columns = tl.arange(0, WIDTH)
    inside = is_row[:, None] & (columns < width)[None, :]
    tl.store(out + (rows[:, None] * stride + columns[None, :]), x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def plain_gradients(
    s, high_s, u, g, reference, threshold, norm_s, mean, pull, share, POTENTIAL: tl.constexpr
):
    """z, η p on A, ∂L/∂s and ∂L/∂u of a block; the numbers of its rows (queries) are broadcast to it by the caller.

    With exp(s − reference) = η p and exp(u − threshold) = κ f / η, a flow is z = η p (1 − κ f / η)₊. ``share`` is
    ∂L/∂log κ · exp(threshold − norm_u), since f itself is exp(u − norm_u). All these exponents come in units of log 2.
    Keys outside the graph have s = u = −inf, and ``high_s`` = +inf.
    """
    ratio = tl.exp2(u - threshold)
    supply = tl.where(ratio < 1, tl.exp2(s - reference), 0.0)
    taken = supply * ratio
    z = supply - taken
    spread = tl.exp2(s - norm_s) if POTENTIAL else tl.exp2(norm_s - high_s)
    centred = g - mean
    return z, supply, centred * z - spread * pull, -(taken * centred + ratio * share)


@triton.jit
def stream_query_kernel(
    q, k, v, q_friction, k_friction, grad_out, means, slopes, grad_q, grad_q_friction, plain, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, width, value_width, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one tile, and the sums of their rows."""
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    if (first_row < n) & (n > MORE_THAN):
        rows = first_row + tl.arange(0, ROWS)
        is_row = rows < n
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        row_number = start * heads + head + rows * heads
        pivot, level, steep, m, norm_s, norm_u = load_stats(stats + row_number, is_row, stat_stride)
        gentle = is_row & is_gentle(pivot, steep, m, norm_s, norm_u)
        flowing = gentle & (level > 0)
        eta = tl.where(flowing, level + tl.exp(steep), 1.0)
        reference = tl.where(flowing, m - tl.log(eta), float("inf"))
        threshold = tl.where(flowing, pivot + (tl.log(eta) - steep), norm_u)
        log_leak = tl.load(stats + row_number + 5 * stat_stride, mask=is_row, other=float("-inf"))
        upstream = load_chunk(grad_out + value_at, rows, n, value_stride, 0, value_width, VALUE_WIDTH)
        slope = load_chunk(slopes + value_at, rows, n, value_stride, 0, value_width, VALUE_WIDTH)
        mean = load_chunk(means + value_at, rows, n, value_stride, 0, value_width, VALUE_WIDTH)
        slope = tl.where(gentle, tl.sum(upstream.to(tl.float32) * slope, 1), 0.0)  # ∂L/∂log κ
        mean = tl.where(gentle, tl.sum(upstream.to(tl.float32) * mean, 1), 0.0)  # ḡ
        spill = tl.where(flowing, tl.exp(log_leak) * eta, 0.0)  # 1 − Σ z
        pull = slope + mean * spill
        relative = tl.exp(tl.minimum(threshold - norm_u, 80.0))
        share = slope * relative
        reference, threshold, norm_s = reference * LOG2E, threshold * LOG2E, norm_s * LOG2E

        x = load_chunk(q + at, rows, n, stride, 0, width, WIDTH)
        x_friction = load_chunk(q_friction + at, rows, n, stride, 0, width, WIDTH)
        of_q = tl.zeros([ROWS, WIDTH], tl.float32)
        of_q_friction = tl.zeros([ROWS, WIDTH], tl.float32)
        moved, supplied, total = (
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS], tl.float32),
        )
        for first in range(0, n, KEYS):
            keys = first + tl.arange(0, KEYS)
            outside = tl.where(keys < n, 0.0, float("-inf"))[None, :]
            y = load_chunk(k + at, keys, n, stride, 0, width, WIDTH)
            y_friction = load_chunk(k_friction + at, keys, n, stride, 0, width, WIDTH)
            s = scale * LOG2E * tl.dot(x, tl.trans(y), input_precision=PRECISION)
            u = scale * LOG2E * tl.dot(x_friction, tl.trans(y_friction), input_precision=PRECISION)
            g = scores(
                upstream, v + value_at, keys, n, value_stride, value_width, 1.0, VALUE_WIDTH, PRECISION
            )
            if DROPOUT:
                g *= kept(tl.load(seed), row_number, keys, dropout_p)
            z, supply, grad_s, grad_u = plain_gradients(
                s + outside, s - outside, u + outside, g, reference[:, None], threshold[:, None], norm_s[:, None],
                mean[:, None], pull[:, None], share[:, None], POTENTIAL,
            )  # fmt: skip
            centred = g - mean[:, None]
            moved += tl.sum(z * centred, 1)
            supplied += tl.sum(supply * centred, 1)
            total += tl.sum(supply, 1)
            of_q = tl.dot(grad_s.to(y.dtype), y, of_q, input_precision=PRECISION)
            of_q_friction = tl.dot(grad_u.to(y.dtype), y_friction, of_q_friction, input_precision=PRECISION)
        store_columns(grad_q + at, rows, of_q * scale, gentle, stride, width, WIDTH)
        store_columns(grad_q_friction + at, rows, of_q_friction * scale, gentle, stride, width, WIDTH)
        # How far ḡ was off, and what follows: ḡ = Σ_A p g / W, T = Σ (g − ḡ) z with Σ z = 1 − ε η.
        off = tl.where(flowing, (supplied - spill * mean) / tl.maximum(total + spill, 1e-37), 0.0)
        mean += off
        pull = moved - off * (1 - spill)
        grad_log_kappa = pull - mean * spill
        place = sums + row_number
        tl.store(place, mean * 0, mask=gentle)
        tl.store(place + stat_stride, mean, mask=gentle)
        tl.store(place + 2 * stat_stride, pull, mask=gentle)
        tl.store(place + 3 * stat_stride, grad_log_kappa, mask=gentle)
        tl.store(place + 4 * stat_stride, mean * 0, mask=gentle)
        # For the keys, [6, heads, N]: rows that are not gentle have no flow and no gradient here.
        place = plain + head * (stat_stride // heads) + start + rows
        tl.store(place, reference, mask=is_row)
        tl.store(place + stat_stride, threshold, mask=is_row)
        tl.store(place + 2 * stat_stride, mean, mask=is_row)
        tl.store(place + 3 * stat_stride, pull, mask=is_row)
        tl.store(place + 4 * stat_stride, grad_log_kappa * relative, mask=is_row)
        tl.store(place + 5 * stat_stride, norm_s, mask=is_row)


@triton.jit
def stream_key_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_k, grad_v, grad_k_friction, plain, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, width, value_width, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of one tile of ROWS keys. Blocks are [keys, queries]: no product need be transposed."""
    head = tl.program_id(1)
    start, n, graph, first_key = locate(ptr, graphs, tl.program_id(0), ROWS)
    if (first_key < n) & (n > MORE_THAN):
        keys = first_key + tl.arange(0, ROWS)
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        y = load_chunk(k + at, keys, n, stride, 0, width, WIDTH)
        y_friction = load_chunk(k_friction + at, keys, n, stride, 0, width, WIDTH)
        values = load_chunk(v + value_at, keys, n, value_stride, 0, value_width, VALUE_WIDTH)
        of_k = tl.zeros([ROWS, WIDTH], tl.float32)
        of_k_friction = tl.zeros([ROWS, WIDTH], tl.float32)
        of_v = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
        for first in range(0, n, KEYS):
            queries = first + tl.arange(0, KEYS)
            is_query = queries < n
            row_number = start * heads + head + queries * heads
            place = plain + head * (stat_stride // heads) + start + queries
            reference = tl.load(place, mask=is_query, other=float("inf"))
            threshold = tl.load(place + stat_stride, mask=is_query, other=0.0)
            mean = tl.load(place + 2 * stat_stride, mask=is_query, other=0.0)
            pull = tl.load(place + 3 * stat_stride, mask=is_query, other=0.0)
            share = tl.load(place + 4 * stat_stride, mask=is_query, other=0.0)
            norm_s = tl.load(place + 5 * stat_stride, mask=is_query, other=0.0)
            x = load_chunk(q + at, queries, n, stride, 0, width, WIDTH)
            x_friction = load_chunk(q_friction + at, queries, n, stride, 0, width, WIDTH)
            upstream = load_chunk(grad_out + value_at, queries, n, value_stride, 0, value_width, VALUE_WIDTH)
            s = scale * LOG2E * tl.dot(y, tl.trans(x), input_precision=PRECISION)
            u = scale * LOG2E * tl.dot(y_friction, tl.trans(x_friction), input_precision=PRECISION)
            g = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
            if DROPOUT:
                keep = tl.trans(kept(tl.load(seed), row_number, keys, dropout_p))
                g *= keep
            z, _, grad_s, grad_u = plain_gradients(
                s, s, u, g, reference[None, :], threshold[None, :], norm_s[None, :],
                mean[None, :], pull[None, :], share[None, :], POTENTIAL,
            )  # fmt: skip
            if DROPOUT:
                z *= keep
            of_v = tl.dot(z.to(upstream.dtype), upstream, of_v, input_precision=PRECISION)
            of_k = tl.dot(grad_s.to(x.dtype), x, of_k, input_precision=PRECISION)
            of_k_friction = tl.dot(grad_u.to(x.dtype), x_friction, of_k_friction, input_precision=PRECISION)
        is_key = keys < n
        store_columns(grad_k + at, keys, of_k * scale, is_key, stride, width, WIDTH)
        store_columns(grad_k_friction + at, keys, of_k_friction * scale, is_key, stride, width, WIDTH)
        store_columns(grad_v + value_at, keys, of_v, is_key, value_stride, value_width, VALUE_WIDTH)
