"""The backward kernels: one over tiles of queries, with all keys on chip, and one over tiles of keys, with all queries.

Both recompute the flows from the nine numbers a row that the forward left, and apply the closed form of
`sfiformer.flow.exact`. The first also leaves, for each row, what the second needs of it: the gradient at the heaviest key,
the offset of the mean from it (and by what power of e that was lifted), the pull T and ∂L/∂log κ. No atomics: two runs agree
to the bit.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.solving import LOG_GENTLE, exp, flows, gentle_flows
from sfiformer.attention.kernels.tiles import combine, kept, locate, products


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


@triton.jit(do_not_specialize=["graphs", "stat_stride"])
def query_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_q, grad_q_friction, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, width, value_width, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one tile, and the sums of their rows."""
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
        if tl.max(steep, 0) < LOG_GENTLE:
            limit = tl.load(place + 8 * stat_stride, mask=is_row, other=0.0)
            z, weight, gated = gentle_flows(s, u, valid, pivot, level, steep, m, limit)
            g_top, lift = m * 0, m * 0
            # Σ_A p is made anew: a key at the very edge of A may fall on the other side of it now.
            leak = exp(tl.load(place + 5 * stat_stride, mask=is_row, other=0.0))
            offset = tl.sum(weight * g, 1) / (tl.sum(weight, 1) + leak)
            mean = offset
            centred = g - offset[:, None]
            gate = gated * centred
        else:
            z, log_weight, log_gated = flows(s, u, valid, pivot, level, steep, m)
            total = tl.load(place + 4 * stat_stride, mask=is_row, other=1.0)
            log_leak = tl.load(place + 5 * stat_stride, mask=is_row, other=float("-inf"))
            heaviest = log_weight >= tl.max(log_weight, 1)[:, None]
            g_top = tl.sum(tl.where(heaviest, g, 0.0), 1) / tl.sum(heaviest.to(tl.float32), 1)
            ahead = tl.where(valid, g - g_top[:, None], 0.0)
            lift = tl.maximum(steep, 0.0)
            lifted = exp(tl.minimum(log_weight + lift[:, None], 80.0))
            offset = (tl.sum(lifted * ahead, 1) - exp(tl.minimum(log_leak + lift, 80.0)) * g_top) / total
            mean = tl.where(level > 0, g_top + offset * exp(-lift), 0.0)
            centred = ahead - (offset * exp(-lift))[:, None]
            gate = gate_gradient(log_gated, ahead, offset, lift)
        pull = tl.sum(centred * z, 1)
        grad_log_kappa = pull - mean * (1 - tl.sum(z, 1))
        grad_s = gradient_of_s(s, valid, z, centred, pull, norm_s, POTENTIAL)
        combine(grad_s, k + at, keys, grad_q + at, rows, n, stride, width, scale, WIDTH, PRECISION)
        if not DENSE:
            grad_u = gradient_of_u(u, valid, gate, grad_log_kappa, norm_u)
            combine(
                grad_u, k_friction + at, keys, grad_q_friction + at, rows, n, stride, width, scale, WIDTH, PRECISION
            )  # fmt: skip
        place = sums + first + rows * heads
        tl.store(place, g_top, mask=is_row)
        tl.store(place + stat_stride, offset, mask=is_row)
        tl.store(place + 2 * stat_stride, pull, mask=is_row)
        tl.store(place + 3 * stat_stride, grad_log_kappa, mask=is_row)
        tl.store(place + 4 * stat_stride, lift, mask=is_row)


@triton.jit(do_not_specialize=["graphs", "stat_stride"])
def key_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_k, grad_v, grad_k_friction, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, width, value_width, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of one tile of ROWS keys, with all (up to KEYS) queries of the graph on chip."""
    head = tl.program_id(1)
    start, n, graph, first_key = locate(ptr, graphs, tl.program_id(0), ROWS)
    if (first_key < n) & (n > MORE_THAN) & (n <= KEYS):
        keys, queries = first_key + tl.arange(0, ROWS), tl.arange(0, KEYS)
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        first = start * heads + head  # of the row's numbers

        s = scale * products(q + at, k + at, queries, keys, n, stride, width, KEYS, ROWS, WIDTH, PRECISION)
        if DENSE:
            u = s * 0
        else:
            u = scale * products(
                q_friction + at,
                k_friction + at,
                queries,
                keys,
                n,
                stride,
                width,
                KEYS,
                ROWS,
                WIDTH,
                PRECISION,
            )
        is_query = queries < n
        valid = is_query[:, None] & (keys < n)[None, :]
        pivot, level, steep, m, norm_s, norm_u = load_stats(
            stats + first + queries * heads, is_query, stat_stride
        )
        place = sums + first + queries * heads
        g_top = tl.load(place, mask=is_query, other=0.0)
        offset = tl.load(place + stat_stride, mask=is_query, other=0.0)
        pull = tl.load(place + 2 * stat_stride, mask=is_query, other=0.0)
        grad_log_kappa = tl.load(place + 3 * stat_stride, mask=is_query, other=0.0)
        lift = tl.load(place + 4 * stat_stride, mask=is_query, other=0.0)
        g = products(
            grad_out + value_at, v + value_at, queries, keys, n, value_stride, value_width, KEYS, ROWS, WIDTH, PRECISION
        )  # fmt: skip
        if DROPOUT:
            keep = kept(tl.load(seed), first + queries * heads, keys, dropout_p)
            g = g * keep
        ahead = g - g_top[:, None]
        centred = ahead - (offset * exp(-lift))[:, None]
        if tl.max(steep, 0) < LOG_GENTLE:
            limit = tl.load(stats + first + queries * heads + 8 * stat_stride, mask=is_query, other=0.0)
            z, weight, gated = gentle_flows(s, u, valid, pivot, level, steep, m, limit)
            gate = gated * centred
        else:
            z, log_weight, log_gated = flows(s, u, valid, pivot, level, steep, m)
            gate = gate_gradient(log_gated, ahead, offset, lift)
        seen = z
        if DROPOUT:
            seen = z * keep
        combine(
            tl.trans(seen), grad_out + value_at, queries, grad_v + value_at, keys, n, value_stride, value_width, 1.0,
            WIDTH, PRECISION,
        )  # fmt: skip
        grad_s = gradient_of_s(s, valid, z, centred, pull, norm_s, POTENTIAL)
        combine(
            tl.trans(grad_s), q + at, queries, grad_k + at, keys, n, stride, width, scale, WIDTH, PRECISION
        )
        if not DENSE:
            grad_u = gradient_of_u(u, valid, gate, grad_log_kappa, norm_u)
            combine(
                tl.trans(grad_u), q_friction + at, queries, grad_k_friction + at, keys, n, stride, width, scale,
                WIDTH, PRECISION,
            )  # fmt: skip
