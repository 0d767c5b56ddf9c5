"""Device functions for graphs whose rows do not fit on chip: a tile of queries stays, the keys stream past it in blocks.

Nearly all rows of a large graph are *gentle* (η p_max is moderate: see `sfiformer.flow.rows`) and are solved on plain
exponentials. In units of the largest weight p_m, with w_j = p_j / p_m and c_j = κ f_j p_m, the level η is the root of

    g(η) = Σ_j w_j (η − c_j)₊ + ε η / p_m = 1 ,

and g is increasing, convex and piecewise linear. One sweep over the keys finds g and its slope W at several probes. The least
root of their tangents is an upper bound of η, the root of the chord across 1 a lower one, and a Newton step from the upper
bound errs by at most (upper − lower) · (W_high − W_low) / W in η: the *doubt*, which says whether a row needs another sweep.

Within a block, scores are in units of log 2: `exp2` is what the hardware has.
"""

import triton
import triton.language as tl

from sfiformer.attention.kernels.tiles import add_to_head, head_products, load_head, places, saturated

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
STEEP = tl.constexpr(46.0)  # log κ f_max p_m up to here stays on plain exponentials


@triton.jit
def scores(x, base, keys, n, stride, width, scale, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """scale · x_i · y_j for the rows of a tile and a block of keys: [rows, keys] float32."""
    return scale * head_products(x, load_head(base, keys, n, stride, width, WIDTH), PRECISION)


@triton.jit
def weigh(x, values, total, seen, lost, PRECISION: tl.constexpr):
    """Add Σ_j x_j v_j of a block to ``total``, Σ x to ``seen``, and what rounding to the type of v takes of it to ``lost``."""
    rounded = x.to(values[0].dtype)
    total = add_to_head(total, rounded, values, PRECISION)
    return total, seen + tl.sum(x, 1), lost + tl.sum(x - rounded.to(tl.float32), 1)


@triton.jit
def whole(seen, lost):
    """Factor of a sum of `weigh` that shares out the weights which rounding took: a row of one key has its value exactly."""
    rounded = seen - lost
    return tl.where(rounded > 0, seen / tl.maximum(rounded, 1e-37), 1.0)[:, None]


@triton.jit
def store_values(
    out, means, slopes, rows, is_row, stride, width, sum_z, sum_c, whole_z, whole_c, eta, step, total, taken,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write O, O₂ = Σ_A p v / W and O − O₂, from the sums of z v and of c w v at η, and the step that η takes from there."""
    weight = 1 / tl.maximum(eta, 1e-30)
    for part in tl.static_range(len(sum_z)):
        place, inside = places(rows, is_row, stride, width, part, WIDTH)
        flowing, gated = sum_z[part] * whole_z, sum_c[part] * whole_c
        active = (flowing + gated) * weight[:, None]
        mean = active / tl.maximum(total, 1e-37)[:, None]
        result = flowing + step[:, None] * active
        tl.store(out + place, saturated(result, out.dtype.element_ty), mask=inside)
        tl.store(means + place, mean, mask=inside)
        tl.store(slopes + place, taken[:, None] * mean - gated, mask=inside)


@triton.jit
def scalings(
    m, s_min, u_max, sum_s, sum_r, sum_u, lam, log_alpha, n, POTENTIAL: tl.constexpr, HARD: tl.constexpr
):
    """log κ f_max p_m, ε / p_m, and the normalisers of r (or p) and f of each row, from the sums of a sweep."""
    norm_u = u_max + tl.log(sum_u)
    if POTENTIAL:
        norm_s = m + tl.log(sum_s)
        strength = tl.log(lam * n)
    else:
        norm_s = s_min - tl.log(sum_r)
        strength = tl.log(lam)
    steep = strength + (m - norm_s) + (u_max - norm_u)
    leak = tl.zeros_like(m) if HARD else tl.exp((norm_s - m) - log_alpha)
    return steep, leak, norm_s, norm_u


@triton.jit
def first_sweep(
    q, q_friction, k, k_friction, n, count, step, stride, width, scale, low, middle, high,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, POTENTIAL: tl.constexpr, PROBES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Extremes and sums of each row over ``count`` keys, every ``step``-th, and Σ w, Σ w e where u < probe, e = f / f_max.

    Without probes, Σ w² stands in place of the first. Everything is relative to the extremes seen so far, and rescaled when
    these move.
    """
    inf = float("inf")
    low, middle, high = low * LOG2E, middle * LOG2E, high * LOG2E
    m, u_max = tl.full([ROWS], -inf, tl.float32), tl.full([ROWS], -inf, tl.float32)
    s_min = tl.full([ROWS], inf, tl.float32)
    sum_s, sum_r, sum_u, sum_f = tl.zeros_like(m), tl.zeros_like(m), tl.zeros_like(m), tl.zeros_like(m)
    w_low, w_middle, w_high = tl.zeros_like(m), tl.zeros_like(m), tl.zeros_like(m)
    f_low, f_middle, f_high = tl.zeros_like(m), tl.zeros_like(m), tl.zeros_like(m)
    for first in range(0, count, KEYS):
        index = first + tl.arange(0, KEYS)
        outside = tl.where(index < count, 0.0, -inf)[None, :]  # added, which costs nothing beside the scale
        s = scores(q, k, index * step, n, stride, width, scale * LOG2E, WIDTH, PRECISION)
        u = scores(q_friction, k_friction, index * step, n, stride, width, scale * LOG2E, WIDTH, PRECISION)
        if not POTENTIAL:
            high_s = s - outside
            least = tl.minimum(s_min, tl.min(high_s, 1))
            sum_r = sum_r * tl.exp2(least - s_min) + tl.sum(tl.exp2(least[:, None] - high_s), 1)
            s_min = least
        s += outside
        u += outside
        top, top_u = tl.maximum(m, tl.max(s, 1)), tl.maximum(u_max, tl.max(u, 1))
        shrink, shrink_u = tl.exp2(m - top), tl.exp2(u_max - top_u)
        w, e = tl.exp2(s - top[:, None]), tl.exp2(u - top_u[:, None])
        m, u_max = top, top_u
        sum_s = sum_s * shrink + tl.sum(w, 1)
        sum_u = sum_u * shrink_u + tl.sum(e, 1)
        sum_f = sum_f * (shrink * shrink_u) + tl.sum(w * e, 1)
        if PROBES:
            below = tl.where(e < tl.exp2(low - u_max)[:, None], w, 0.0)
            w_low = w_low * shrink + tl.sum(below, 1)
            f_low = f_low * (shrink * shrink_u) + tl.sum(below * e, 1)
            below = tl.where(e < tl.exp2(middle - u_max)[:, None], w, 0.0)
            w_middle = w_middle * shrink + tl.sum(below, 1)
            f_middle = f_middle * (shrink * shrink_u) + tl.sum(below * e, 1)
            below = tl.where(e < tl.exp2(high - u_max)[:, None], w, 0.0)
            w_high = w_high * shrink + tl.sum(below, 1)
            f_high = f_high * (shrink * shrink_u) + tl.sum(below * e, 1)
        else:
            w_low = w_low * (shrink * shrink) + tl.sum(w * w, 1)
    m, s_min, u_max = m * LN2, s_min * LN2, u_max * LN2
    return m, s_min, u_max, sum_s, sum_r, sum_u, sum_f, w_low, f_low, w_middle, f_middle, w_high, f_high


@triton.jit
def weights(
    q, q_friction, k, k_friction, index, count, step, n, stride, width, scale, m, cut,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """w (0 beyond ``count``) and c of a block of keys; log c = u − cut."""
    s = scores(q, k, index * step, n, stride, width, scale * LOG2E, WIDTH, PRECISION)
    u = scores(q_friction, k_friction, index * step, n, stride, width, scale * LOG2E, WIDTH, PRECISION)
    outside = tl.where(index < count, 0.0, float("-inf"))
    return tl.exp2((s + outside[None, :]) - (m * LOG2E)[:, None]), tl.exp2(u - (cut * LOG2E)[:, None])


@triton.jit
def probe(w, c, eta):
    """Σ w and Σ w c of a block, over the keys with c < η."""
    below = tl.where(c < eta[:, None], w, 0.0)
    return tl.sum(below, 1), tl.sum(below * c, 1)


@triton.jit
def tighten(eta, total, taken, low, g_low, w_low, high, g_high, w_high, upper):
    """Take one probe, W = ``total`` and Σ w c = ``taken`` at η, into a bracket of the root of g(η) = η W − Σ w c = 1."""
    g = eta * total - taken
    upper = tl.minimum(upper, (1 + taken) / tl.maximum(total, 1e-37))  # the root of the tangent
    under = (g <= 1) & (eta >= low)
    over = (g > 1) & (eta <= high)
    low, g_low, w_low = tl.where(under, eta, low), tl.where(under, g, g_low), tl.where(under, total, w_low)
    high, g_high, w_high = tl.where(over, eta, high), tl.where(over, g, g_high), tl.where(over, total, w_high)
    return low, g_low, w_low, high, g_high, w_high, upper


@triton.jit
def chord(low, g_low, w_low, high, g_high, w_high, upper):
    """The lower bound of η, and the doubt about a Newton step from the upper one, relative to η W."""
    across = low + (1 - g_low) * (high - low) / tl.maximum(g_high - g_low, 1e-37)
    lower = tl.where(
        g_high > 1, tl.minimum(across, upper), upper
    )  # else all keys are active: the tangent is exact
    return lower, (upper - lower) * (w_high - w_low) / tl.maximum(upper * w_high, 1e-37)


@triton.jit
def estimate(leak, low, g_low, w_low, high, g_high, w_high, lower, upper):
    """Where the last Newton step starts: η(g = 1) on the cubic through both ends of the bracket and their slopes 1/W.

    So few keys lie between it and the root that the step ends within rounding of the root, whose active set the backward
    needs. Where the active weights of the two ends differ much, the upper bound serves.
    """
    across = g_high - g_low
    t = (1 - g_low) / tl.maximum(across, 1e-37)
    bend = (1 - t) * across * ((1 - t) / tl.maximum(w_low, 1e-37) - t / tl.maximum(w_high, 1e-37))
    cubic = low + t * ((high - low) * t * (3 - 2 * t) + bend)
    smooth = (g_high > 1) & (w_low - leak > 0.5 * (w_high - leak))
    return tl.where(smooth, tl.minimum(tl.maximum(cubic, lower), upper), upper)


@triton.jit
def is_gentle(pivot, steep, m, norm_s, norm_u, log_gentle):
    """Whether the backward of a row can use plain exponentials: no ratio of the row's numbers leaves their range."""
    return (steep < log_gentle) & (norm_u - pivot < 60) & (norm_s - m < 60)
