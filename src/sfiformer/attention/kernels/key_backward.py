"""The backward kernel of keys and values: a tile of keys with the queries streaming past it, in graphs of any size.

For each row the kernels of queries leave the seven numbers of `keep_for_keys`. Rows that are not gentle count for nothing
here: see `pivot_backward`. No atomics: two runs agree to the bit.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.solving import exp
from sfiformer.attention.kernels.streaming import LOG2E
from sfiformer.attention.kernels.tiles import (
    RUNTIME,
    add_to_head,
    head_products,
    kept,
    load_head,
    locate,
    no_head,
    store_head,
)


@triton.jit
def share_of(grad_log_kappa, threshold, norm_u):
    """∂L/∂log κ · exp(threshold − norm_u), finite: without friction (λ → 0) the second factor has no end."""
    share = grad_log_kappa * exp(tl.minimum(threshold - norm_u, 80.0))
    return tl.minimum(tl.maximum(share, -3e38), 3e38)


@triton.jit
def keep_for_keys(
    place, stride, is_row, gentle, pivot, level, steep, m, limit, mean, pull, grad_log_kappa, norm_s, norm_u
):
    """What the keys need of each row: reference, threshold, limit, ḡ, T, share (see `plain_gradients`) and norm_s.

    Exponents are in units of log 2, as they are used. Rows that are not gentle get no flow and no gradient.
    """
    flowing = gentle & (level > 0)
    steepness = exp(tl.where(flowing, steep, 0.0))
    log_eta = tl.log(tl.where(flowing, level, 0.0) + steepness)
    reference = tl.where(flowing, m - log_eta, float("inf"))
    threshold = tl.where(flowing, pivot + (log_eta - steep), norm_u)
    share = tl.where(gentle, share_of(grad_log_kappa, threshold, norm_u), 0.0)
    tl.store(place, reference * LOG2E, mask=is_row)
    tl.store(place + stride, threshold * LOG2E, mask=is_row)
    tl.store(place + 2 * stride, tl.where(flowing, limit, float("-inf")) * LOG2E, mask=is_row)
    tl.store(place + 3 * stride, tl.where(gentle, mean, 0.0), mask=is_row)
    tl.store(place + 4 * stride, tl.where(gentle, pull, 0.0), mask=is_row)
    tl.store(place + 5 * stride, share, mask=is_row)
    tl.store(place + 6 * stride, norm_s * LOG2E, mask=is_row)


@triton.jit
def note_found(found, place):
    """That there are rows which are not gentle: anywhere at all, and in one graph and head. Whoever comes writes the same."""
    tl.store(found, 1)
    tl.store(found + 1 + place, 1)


@triton.jit
def plain_gradients(
    s, high_s, u, g, reference, threshold, limit, norm_s, mean, pull, share, POTENTIAL: tl.constexpr
):
    """z, η p on A, ∂L/∂s and ∂L/∂u of a block; the numbers of its rows (queries) are broadcast to it by the caller.

    With exp(s − reference) = η p and exp(u − threshold) = κ f / η, a flow is z = η p (1 − κ f / η)₊, and a key is active
    where u < limit, which lies at the threshold or between it and the nearest u, so that no last bit decides. ``share`` is
    ∂L/∂log κ · exp(threshold − norm_u), since f itself is exp(u − norm_u). All these exponents come in units of log 2.
    Keys outside the graph have s = u = −inf, and ``high_s`` = +inf.
    """
    ratio = tl.exp2(u - threshold)
    supply = tl.where(u < limit, tl.exp2(s - reference), 0.0)
    taken = supply * ratio
    z = tl.maximum(supply - taken, 0.0)
    spread = tl.exp2(s - norm_s) if POTENTIAL else tl.exp2(norm_s - high_s)
    centred = g - mean
    return z, supply, centred * z - spread * pull, -(taken * centred + ratio * share)


@triton.jit(do_not_specialize=RUNTIME)
def key_kernel(
    q, k, v, q_friction, k_friction, grad_out, grad_k, grad_v, grad_k_friction, plain, stats, sums, ptr, seed,
    scale, dropout_p, graphs, heads, units, value_units, stat_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    POTENTIAL: tl.constexpr, DENSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values of one tile of ROWS keys. Blocks are [keys, queries]: no product need be transposed."""
    width, value_width = units * UNIT, value_units * VALUE_UNIT
    head = tl.program_id(1)
    start, n, graph, first_key = locate(ptr, graphs, tl.program_id(0), ROWS)
    if first_key < n:
        keys = first_key + tl.arange(0, ROWS)
        stride, value_stride = heads * width, heads * value_width
        at, value_at = start * stride + head * width, start * value_stride + head * value_width
        y = load_head(k + at, keys, n, stride, width, WIDTH)
        if not DENSE:
            y_friction = load_head(k_friction + at, keys, n, stride, width, WIDTH)
        values = load_head(v + value_at, keys, n, value_stride, value_width, VALUE_WIDTH)
        of_k, of_k_friction, of_v = no_head(ROWS, WIDTH), no_head(ROWS, WIDTH), no_head(ROWS, VALUE_WIDTH)
        for first in range(0, n, KEYS):
            queries = first + tl.arange(0, KEYS)
            is_query = queries < n
            row_number = start * heads + head + queries * heads
            place = plain + head * (stat_stride // heads) + start + queries
            reference = tl.load(place, mask=is_query, other=float("inf"))
            threshold = tl.load(place + stat_stride, mask=is_query, other=0.0)
            limit = tl.load(place + 2 * stat_stride, mask=is_query, other=float("-inf"))
            mean = tl.load(place + 3 * stat_stride, mask=is_query, other=0.0)
            pull = tl.load(place + 4 * stat_stride, mask=is_query, other=0.0)
            share = tl.load(place + 5 * stat_stride, mask=is_query, other=0.0)
            norm_s = tl.load(place + 6 * stat_stride, mask=is_query, other=0.0)
            x = load_head(q + at, queries, n, stride, width, WIDTH)
            upstream = load_head(grad_out + value_at, queries, n, value_stride, value_width, VALUE_WIDTH)
            s = scale * LOG2E * head_products(y, x, PRECISION)
            if DENSE:
                u = s * 0
            else:
                x_friction = load_head(q_friction + at, queries, n, stride, width, WIDTH)
                u = scale * LOG2E * head_products(y_friction, x_friction, PRECISION)
            g = head_products(values, upstream, PRECISION)
            if DROPOUT:
                keep = kept(tl.load(seed), row_number[None, :], keys[:, None], dropout_p)
                g *= keep
            z, _, grad_s, grad_u = plain_gradients(
                s, s, u, g, reference[None, :], threshold[None, :], limit[None, :], norm_s[None, :],
                mean[None, :], pull[None, :], share[None, :], POTENTIAL,
            )  # fmt: skip
            if DROPOUT:
                z *= keep
            of_v = add_to_head(of_v, z, upstream, PRECISION)
            of_k = add_to_head(of_k, grad_s, x, PRECISION)
            if not DENSE:
                of_k_friction = add_to_head(of_k_friction, grad_u, x_friction, PRECISION)
        is_key = keys < n
        store_head(grad_k + at, keys, of_k, scale, is_key, stride, width, WIDTH)
        if not DENSE:
            store_head(grad_k_friction + at, keys, of_k_friction, scale, is_key, stride, width, WIDTH)
        store_head(grad_v + value_at, keys, of_v, 1.0, is_key, value_stride, value_width, VALUE_WIDTH)
