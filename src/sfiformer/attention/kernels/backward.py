"""The backward kernels: one over tiles of queries, with all keys on chip, and one over tiles of keys, with all queries.

Both recompute the flows from the eight numbers a row that the forward left, and apply the closed form of
`sfiformer.flow.exact`. The first also leaves, for each row, what the second needs of it: the gradient at the heaviest key,
the (lifted) offset of the mean from it, the pull T and ∂L/∂log κ. No atomics: two runs agree to the bit.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.solving import flows
from sfiformer.attention.kernels.tiles import combine, kept, products


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
def gradient_of_s(s, valid, z, ahead, offset, lift, pull, norm_s, POTENTIAL: tl.constexpr):
    """∂L/∂s of a tile whose rows are queries, from g − g_top and exp(lift) (ḡ − g_top)."""
    spread = tl.exp(s - norm_s[:, None]) if POTENTIAL else tl.exp(norm_s[:, None] - s)
    centred = ahead - (offset * tl.exp(-lift))[:, None]
    return tl.where(valid, centred * z - spread * pull[:, None], 0.0)


@triton.jit
def gradient_of_u(u, valid, log_gated, ahead, offset, lift, grad_log_kappa, norm_u):
    """∂L/∂u likewise. κ f p may exceed any power of ten while g − ḡ falls below all: the two meet as one exponential.

    What then exceeds the type saturates (exact ties have such derivatives).
    """
    gate = (
        tl.exp(tl.minimum(log_gated, 80.0)) * ahead
        - tl.exp(tl.minimum(log_gated - lift[:, None], 80.0)) * offset[:, None]
    )
    grad_u = -gate - tl.exp(u - norm_u[:, None]) * grad_log_kappa[:, None]
    return tl.where(valid, tl.minimum(tl.maximum(grad_u, -1e28), 1e28), 0.0)


@triton.jit
def query_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_q, grad_q_friction, stats, sums, ptr, tile_graph, tile_start, seed,
    scale, dropout_p, heads, width, value_width, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of one tile, and the sums of their rows."""
    tile, head = tl.program_id(0), tl.program_id(1)
    graph = tl.load(tile_graph + tile)
    if graph >= 0:
        start = tl.load(ptr + graph)
        n = (tl.load(ptr + graph + 1) - start).to(tl.int32)
        if (n > MORE_THAN) & (n <= KEYS):
            rows, keys = tl.load(tile_start + tile) + tl.arange(0, ROWS), tl.arange(0, KEYS)
            stride, value_stride = heads * width, heads * value_width
            at, value_at = start * stride + head * width, start * value_stride + head * value_width
            first = start * heads + head  # of the row's numbers

            s = scale * products(q + at, k + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION)
            u = scale * products(
                q_friction + at, k_friction + at, rows, keys, n, stride, width, ROWS, KEYS, WIDTH, PRECISION
            )
            g = products(
                grad_out + value_at,
                v + value_at,
                rows,
                keys,
                n,
                value_stride,
                value_width,
                ROWS,
                KEYS,
                WIDTH,
                PRECISION,
            )
            if DROPOUT:
                g = g * kept(tl.load(seed), first + rows * heads, keys, dropout_p)
            is_row = rows < n
            valid = (keys < n)[None, :] & is_row[:, None]
            place = stats + first + rows * heads
            pivot, level, steep, m, norm_s, norm_u = load_stats(place, is_row, stat_stride)
            total = tl.load(place + 4 * stat_stride, mask=is_row, other=1.0)
            log_leak = tl.load(place + 5 * stat_stride, mask=is_row, other=float("-inf"))
            z, log_weight, log_gated = flows(s, u, valid, pivot, level, steep, m)

            heaviest = log_weight >= tl.max(log_weight, 1)[:, None]
            g_top = tl.sum(tl.where(heaviest, g, 0.0), 1) / tl.sum(heaviest.to(tl.float32), 1)
            ahead = tl.where(valid, g - g_top[:, None], 0.0)
            lift = tl.maximum(steep, 0.0)
            lifted = tl.exp(tl.minimum(log_weight + lift[:, None], 80.0))
            offset = (tl.sum(lifted * ahead, 1) - tl.exp(tl.minimum(log_leak + lift, 80.0)) * g_top) / total
            offset = tl.where(level > 0, offset, -g_top * tl.exp(tl.minimum(lift, 80.0)))
            mean = g_top + offset * tl.exp(-lift)
            pull = tl.sum((ahead - (offset * tl.exp(-lift))[:, None]) * z, 1)
            grad_log_kappa = pull - mean * (1 - tl.sum(z, 1))
            grad_s = gradient_of_s(s, valid, z, ahead, offset, lift, pull, norm_s, POTENTIAL)
            combine(grad_s, k + at, keys, grad_q + at, rows, n, stride, width, scale, WIDTH, PRECISION)
            grad_u = gradient_of_u(u, valid, log_gated, ahead, offset, lift, grad_log_kappa, norm_u)
            combine(
                grad_u,
                k_friction + at,
                keys,
                grad_q_friction + at,
                rows,
                n,
                stride,
                width,
                scale,
                WIDTH,
                PRECISION,
            )
            place = sums + first + rows * heads
            tl.store(place, g_top, mask=is_row)
            tl.store(place + stat_stride, offset, mask=is_row)
            tl.store(place + 2 * stat_stride, pull, mask=is_row)
            tl.store(place + 3 * stat_stride, grad_log_kappa, mask=is_row)


@triton.jit
def key_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_k, grad_v, grad_k_friction, stats, sums, ptr, tile_graph, tile_start, seed,
    scale, dropout_p, heads, width, value_width, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MORE_THAN: tl.constexpr, WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of one tile of ROWS keys, with all (up to KEYS) queries of the graph on chip."""
    tile, head = tl.program_id(0), tl.program_id(1)
    graph = tl.load(tile_graph + tile)
    if graph >= 0:
        start = tl.load(ptr + graph)
        n = (tl.load(ptr + graph + 1) - start).to(tl.int32)
        if (n > MORE_THAN) & (n <= KEYS):
            keys, queries = tl.load(tile_start + tile) + tl.arange(0, ROWS), tl.arange(0, KEYS)
            stride, value_stride = heads * width, heads * value_width
            at, value_at = start * stride + head * width, start * value_stride + head * value_width
            first = start * heads + head  # of the row's numbers

            s = scale * products(
                q + at, k + at, queries, keys, n, stride, width, KEYS, ROWS, WIDTH, PRECISION
            )
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
            g = products(
                grad_out + value_at,
                v + value_at,
                queries,
                keys,
                n,
                value_stride,
                value_width,
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
            z, _, log_gated = flows(s, u, valid, pivot, level, steep, m)
            place = sums + first + queries * heads
            g_top = tl.load(place, mask=is_query, other=0.0)
            offset = tl.load(place + stat_stride, mask=is_query, other=0.0)
            pull = tl.load(place + 2 * stat_stride, mask=is_query, other=0.0)
            grad_log_kappa = tl.load(place + 3 * stat_stride, mask=is_query, other=0.0)
            seen = z
            if DROPOUT:
                keep = kept(tl.load(seed), first + queries * heads, keys, dropout_p)
                g, seen = g * keep, z * keep
            combine(
                tl.trans(seen), grad_out + value_at, queries, grad_v + value_at, keys, n, value_stride, value_width, 1.0,
                WIDTH, PRECISION,
            )  # fmt: skip
            ahead, lift = g - g_top[:, None], tl.maximum(steep, 0.0)
            grad_s = gradient_of_s(s, valid, z, ahead, offset, lift, pull, norm_s, POTENTIAL)
            combine(
                tl.trans(grad_s),
                q + at,
                queries,
                grad_k + at,
                keys,
                n,
                stride,
                width,
                scale,
                WIDTH,
                PRECISION,
            )
            grad_u = gradient_of_u(u, valid, log_gated, ahead, offset, lift, grad_log_kappa, norm_u)
            combine(
                tl.trans(grad_u), q_friction + at, queries, grad_k_friction + at, keys, n, stride, width, scale,
                WIDTH, PRECISION,
            )  # fmt: skip
