"""The backward kernel of queries of large graphs: a tile of them with the keys streaming past it.

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
from sfiformer.attention.kernels.key_backward import keep_for_keys, plain_gradients, store_columns
from sfiformer.attention.kernels.streaming import LOG2E, is_gentle, scores
from sfiformer.attention.kernels.tiles import RUNTIME, kept, load_chunk, locate


@triton.jit(do_not_specialize=RUNTIME)
def stream_query_kernel(
    q, k, v, q_friction, k_friction, grad_out, means, slopes, grad_q, grad_q_friction, plain, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, units, value_units, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, LOG_GENTLE: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one tile, and the sums of their rows."""
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    start, n, graph, first_row = locate(ptr, graphs, tl.program_id(0), ROWS)
    if (first_row < n) & (n > MORE_THAN):
        rows = first_row + tl.arange(0, ROWS)
        is_row = rows < n
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        row_number = start * heads + head + rows * heads
        pivot, level, steep, m, norm_s, norm_u = load_stats(stats + row_number, is_row, stat_stride)
        gentle = is_row & is_gentle(pivot, steep, m, norm_s, norm_u, LOG_GENTLE)
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
        low_s = norm_s * LOG2E
        reference, threshold = reference * LOG2E, threshold * LOG2E

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
                s + outside, s - outside, u + outside, g, reference[:, None], threshold[:, None], threshold[:, None],
                low_s[:, None], mean[:, None], pull[:, None], share[:, None], POTENTIAL,
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
        place = plain + head * (stat_stride // heads) + start + rows
        limit = pivot + (tl.log(eta) - steep)  # where κ f = η
        keep_for_keys(
            place, stat_stride, is_row, gentle, pivot, level, steep, m, limit,
            mean, pull, grad_log_kappa, norm_s, norm_u,
        )  # fmt: skip
