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
def load_stats(stats, rows, is_row, heads, head, stride):
    """pivot, level, log κ f_k, m, norm_s, norm_u of the given rows; rows outside have no flow."""
    place = stats + rows * heads + head
    pivot = tl.load(place, mask=is_row, other=0.0)
    level = tl.load(place + stride, mask=is_row, other=0.0)
    steep = tl.load(place + 2 * stride, mask=is_row, other=0.0)
    m = tl.load(place + 3 * stride, mask=is_row, other=0.0)
    norm_s = tl.load(place + 6 * stride, mask=is_row, other=0.0)
    norm_u = tl.load(place + 7 * stride, mask=is_row, other=0.0)
    return pivot, level, steep, m, norm_s, norm_u


@triton.jit
def score_gradients(
    s, u, valid, z, log_gated, ahead, offset, lift, pull, grad_log_kappa, norm_s, norm_u, POTENTIAL: tl.constexpr
):
    """∂L/∂s and ∂L/∂u of a tile whose rows are queries, from g − g_top and exp(lift) (ḡ − g_top).

    κ f p may exceed any power of ten while g − ḡ falls below all: the two meet as one exponential. What then exceeds the
    type saturates (exact ties have such derivatives).
    """
    centred = ahead - (offset * tl.exp(-lift))[:, None]
    spread = tl.exp(s - norm_s[:, None]) if POTENTIAL else tl.exp(norm_s[:, None] - s)
    grad_s = centred * z - spread * pull[:, None]
    gate = tl.exp(tl.minimum(log_gated, 80.0)) * ahead - tl.exp(tl.minimum(log_gated - lift[:, None], 80.0)) * offset[:, None]
    grad_u = -gate - tl.exp(u - norm_u[:, None]) * grad_log_kappa[:, None]
    grad_u = tl.minimum(tl.maximum(grad_u, -1e28), 1e28)
    return tl.where(valid, grad_s, 0.0), tl.where(valid, grad_u, 0.0)


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
        n = tl.load(ptr + graph + 1) - start
        if (n > MORE_THAN) & (n <= KEYS):
            local = tl.load(tile_start + tile) + tl.arange(0, ROWS)
            rows, keys = start + local, start + tl.arange(0, KEYS)
            is_row, is_key = local < n, tl.arange(0, KEYS) < n
            stride, value_stride = heads * width, heads * value_width
            at, value_at = head * width, head * value_width

            s = scale * products(q + at, k + at, rows, is_row, keys, is_key, stride, width, ROWS, KEYS, WIDTH, PRECISION)
            u = scale * products(
                q_friction + at, k_friction + at, rows, is_row, keys, is_key, stride, width, ROWS, KEYS, WIDTH, PRECISION
            )
            g = products(
                grad_out + value_at, v + value_at, rows, is_row, keys, is_key, value_stride, value_width,
                ROWS, KEYS, WIDTH, PRECISION,
            )  # fmt: skip
            if DROPOUT:
                g = g * kept(tl.load(seed), rows, keys, heads, head, dropout_p)
            valid = is_key[None, :] & is_row[:, None]
            pivot, level, steep, m, norm_s, norm_u = load_stats(stats, rows, is_row, heads, head, stat_stride)
            place = stats + rows * heads + head
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
            grad_s, grad_u = score_gradients(
                s, u, valid, z, log_gated, ahead, offset, lift, pull, grad_log_kappa, norm_s, norm_u, POTENTIAL
            )
            combine(grad_s, k + at, keys, is_key, grad_q + at, rows, is_row, stride, width, scale, WIDTH, PRECISION)
            combine(
                grad_u, k_friction + at, keys, is_key, grad_q_friction + at, rows, is_row, stride, width, scale, WIDTH, PRECISION
            )
            place = sums + rows * heads + head
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
        n = tl.load(ptr + graph + 1) - start
        if (n > MORE_THAN) & (n <= KEYS):
            local = tl.load(tile_start + tile) + tl.arange(0, ROWS)
            keys, queries = start + local, start + tl.arange(0, KEYS)
            is_key, is_query = local < n, tl.arange(0, KEYS) < n
            stride, value_stride = heads * width, heads * value_width
            at, value_at = head * width, head * value_width

            s = scale * products(q + at, k + at, queries, is_query, keys, is_key, stride, width, KEYS, ROWS, WIDTH, PRECISION)
            u = scale * products(
                q_friction + at, k_friction + at, queries, is_query, keys, is_key, stride, width, KEYS, ROWS, WIDTH, PRECISION
            )
            g = products(
                grad_out + value_at, v + value_at, queries, is_query, keys, is_key, value_stride, value_width,
                KEYS, ROWS, WIDTH, PRECISION,
            )  # fmt: skip
            valid = is_query[:, None] & is_key[None, :]
            pivot, level, steep, m, norm_s, norm_u = load_stats(stats, queries, is_query, heads, head, stat_stride)
            z, _, log_gated = flows(s, u, valid, pivot, level, steep, m)
            place = sums + queries * heads + head
            g_top = tl.load(place, mask=is_query, other=0.0)
            offset = tl.load(place + stat_stride, mask=is_query, other=0.0)
            pull = tl.load(place + 2 * stat_stride, mask=is_query, other=0.0)
            grad_log_kappa = tl.load(place + 3 * stat_stride, mask=is_query, other=0.0)
            seen = z
            if DROPOUT:
                keep = kept(tl.load(seed), queries, keys, heads, head, dropout_p)
                g, seen = g * keep, z * keep
            combine(
                tl.trans(seen), grad_out + value_at, queries, is_query, grad_v + value_at, keys, is_key,
                value_stride, value_width, 1.0, WIDTH, PRECISION,
            )  # fmt: skip
            grad_s, grad_u = score_gradients(
                s, u, valid, z, log_gated, g - g_top[:, None], offset, tl.maximum(steep, 0.0), pull, grad_log_kappa,
                norm_s, norm_u, POTENTIAL,
            )  # fmt: skip
            combine(
                tl.trans(grad_s), q + at, queries, is_query, grad_k + at, keys, is_key, stride, width, scale, WIDTH, PRECISION
            )
            combine(
                tl.trans(grad_u), q_friction + at, queries, is_query, grad_k_friction + at, keys, is_key,
                stride, width, scale, WIDTH, PRECISION,
            )  # fmt: skip
