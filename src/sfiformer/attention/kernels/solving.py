"""Device functions: the flow problems of one tile of scores, solved on chip. The plain twin is `sfiformer.flow.rows`.

A tile holds whole rows, [queries, keys] in float32. Its rows are solved by Newton's method on plain exponentials
(`solve_gently`). Rows that are not gentle are solved with more care (`solve`): checked by measuring the flows from the pivot
u_k (the largest active u), and solved again in logarithms where the check fails.

Only differences of scores enter (s − m, u − u_max, …), so that nothing is lost where scores are large:

    log κ f_k p_m = scale0 + (m − s_ref) + (u_k − u_max) ,
    log ε/p_m     = leak0 − (m − s_ref) ,
    log ε κ f_k   = spill0 + (u_k − u_max) .
"""

import triton
import triton.language as tl

GENTLE = tl.constexpr(32.0)  # η p_max up to here needs no pivot: see `sfiformer.flow.rows`


@triton.jit
def exp(x):
    """e^x as the hardware has it, a power of two; `tl.exp` spends as much again on results that underflow."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def expm1(x):
    """exp(x) − 1 to a few ulp: a series near 0."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040))))))
    return tl.where(tl.abs(x) < 0.25, series, exp(x) - 1)


@triton.jit
def log1p(x):
    return tl.where(tl.abs(x) < 1e-3, x * (1 - x * (0.5 - x / 3)), tl.log(1 + x))


@triton.jit
def row_sums(s, u, valid, lam, log_alpha, n, POTENTIAL: tl.constexpr, HARD: tl.constexpr):
    """Scalings of each row: scale0, s_ref, leak0, spill0, u_max, and the normalisers of r (or p) and f: f = exp(u − norm_u)."""
    inf = float("inf")
    u_max = tl.max(tl.where(valid, u, -inf), 1)
    log_u = tl.log(tl.sum(tl.where(valid, exp(u - u_max[:, None]), 0.0), 1))
    if POTENTIAL:
        s_ref = tl.max(tl.where(valid, s, -inf), 1)
        log_s = tl.log(tl.sum(tl.where(valid, exp(s - s_ref[:, None]), 0.0), 1))
        scale0 = tl.log(lam * n) - log_u - log_s
        norm_s = s_ref + log_s
    else:
        s_ref = tl.min(tl.where(valid, s, inf), 1)
        log_s = tl.log(tl.sum(tl.where(valid, exp(s_ref[:, None] - s), 0.0), 1))
        scale0 = tl.log(lam) - log_u + log_s
        norm_s = s_ref - log_s
    if HARD:
        leak0 = tl.full(s_ref.shape, -inf, tl.float32)
        spill0 = leak0
    else:
        leak0 = -log_alpha - log_s
        spill0 = tl.log(lam) - log_alpha - log_u
    return scale0, s_ref, leak0, spill0, u_max, norm_s, u_max + log_u


@triton.jit
def last_active(u, below, u_min):
    """The largest u among ``below``, or u_min where there is none."""
    found = tl.max(tl.where(below, u, float("-inf")), 1)
    return tl.where(found == float("-inf"), u_min, found)


@triton.jit
def newton(s, u, valid, scale0, s_ref, leak0, u_max):
    """Newton's method from all keys down, on plain exponentials: m = max s, p/p_m, κ f p_m, κ f_max p_m, η p_m and W/p_m."""
    m = tl.max(tl.where(valid, s, float("-inf")), 1)
    weight = tl.where(valid, exp(s - m[:, None]), 0.0)
    scale = exp(tl.minimum(scale0 + (m - s_ref), 60.0))
    friction = tl.where(valid, exp(u - u_max[:, None]) * scale[:, None], 3e38)
    leak = exp(leak0 - (m - s_ref))
    product = weight * friction
    taken, total = tl.sum(product, 1), tl.sum(weight, 1) + leak
    eta = (1 + taken) / total
    moving = 1
    while moving > 0:
        active = friction < eta[:, None]
        # This sum shows that a key leaves even where its weight is below the rounding of the other.
        less = tl.sum(tl.where(active, product, 0.0), 1)
        total = tl.sum(tl.where(active, weight, 0.0), 1) + leak
        lower = (1 + less) / total
        moving = tl.max((less < taken).to(tl.int32), 0)
        taken = less
        eta = tl.where(lower < eta, lower, eta)
    return m, weight, friction, scale, eta, total


@triton.jit
def above_pivot(u, pivot):
    """u − u_k, and 0 within rounding: whether a product is rounded before it is subtracted must not move the pivot itself."""
    above = u - pivot[:, None]
    return tl.where(tl.abs(above) <= 3e-6 * (1 + tl.abs(pivot))[:, None], 0.0, above)


@triton.jit
def measure(s, u, valid, u_pivot, scale0, s_ref, leak0, spill0, u_max):
    """Flows seen from the pivot: the level t, log κ f_k, reference m, total weight and log leak of each row."""
    above = above_pivot(u, u_pivot)
    active = valid & (above <= 0)
    m = tl.max(tl.where(active, s, float("-inf")), 1)
    exponent = s - m[:, None]
    scale = scale0 + (m - s_ref) + (u_pivot - u_max)
    depth = -expm1(tl.minimum(above, 0.0))
    lifted = tl.where(active & (depth > 0), exp(exponent + scale[:, None] + tl.log(depth)), 0.0)
    log_leak = leak0 - (m - s_ref)
    total = tl.sum(tl.where(active, exp(exponent), 0.0), 1) + exp(log_leak)
    level = (1 - exp(spill0 + (u_pivot - u_max)) - tl.sum(lifted, 1)) / total
    return level, scale, m, total, log_leak


@triton.jit
def solve_gently(
    s, u, outside, lam, log_alpha, n, POTENTIAL: tl.constexpr, HARD: tl.constexpr, LOG_GENTLE: tl.constexpr
):
    """What `row_sums` and `solve` find of a tile's gentle rows, and which these are, in fewer registers.

    ``outside`` is −inf at the keys beyond the graph, which get no weight, and 0 elsewhere. A gentle row may be measured from
    any friction: here from half its η, where nothing cancels, or from u_max.
    """
    u += outside
    u_max = tl.max(u, 1)
    friction = exp(u - u_max[:, None])
    log_u = tl.log(tl.sum(friction, 1))
    least = tl.min(s - outside, 1)
    m = tl.max(s + outside, 1)
    weight = exp((s + outside) - m[:, None])
    whole = tl.sum(weight, 1)
    if POTENTIAL:
        log_s = tl.log(whole)
        steep = tl.log(lam * n) - log_u - log_s
        norm_s = m + log_s
    else:
        log_s = tl.log(tl.sum(exp(least[:, None] - (s - outside)), 1))
        norm_s = least - log_s
        steep = tl.log(lam) - log_u + (m - norm_s)
    log_leak = tl.full(m.shape, float("-inf"), tl.float32) if HARD else (norm_s - m) - log_alpha
    scale = exp(tl.minimum(steep, 60.0))
    friction *= scale[:, None]  # κ f / p_m
    leak = exp(log_leak)
    taken, total = tl.sum(weight * friction, 1), whole + leak
    eta = (1 + taken) / total
    moving = 1
    while moving > 0:
        active = friction < eta[:, None]
        within = tl.where(active, weight, 0.0)
        # This sum shows that a key leaves even where its weight is below the rounding of the other.
        less = tl.sum(within * friction, 1)
        total = tl.sum(within, 1) + leak
        lower = (1 + less) / total
        moving = tl.max((less < taken).to(tl.int32), 0)
        taken = less
        eta = tl.where(lower < eta, lower, eta)
    active = friction < eta[:, None]
    z = weight * tl.maximum(eta[:, None] - friction, 0.0)
    flowing = tl.max(tl.where(active, weight, 0.0), 1) > 0
    # Half-way between the active u and the others.
    largest = tl.maximum(tl.max(tl.where(active, friction, 0.0), 1), 1e-37)
    following = tl.min(tl.where(active, float("inf"), friction), 1)
    limit = u_max - steep + 0.5 * (tl.log(largest) + tl.log(following))
    log_eta = tl.log(0.5 * eta)
    pivot = u_max + tl.minimum(log_eta - steep, 0.0)
    log_gate = tl.minimum(log_eta, steep)
    level = tl.where(flowing, eta - exp(log_gate), float("-inf"))
    gentle = (tl.log(eta) <= LOG_GENTLE) & (steep <= 46.0)
    return gentle, z, pivot, level, log_gate, m, total, log_leak, limit, norm_s, u_max + log_u


@triton.jit
def rounding(a, b):
    return 1e-6 * (1 + tl.maximum(tl.abs(a), tl.abs(b)))


@triton.jit
def solve(s, u, valid, scale0, s_ref, leak0, spill0, u_max):
    """The flows z of a tile and, for each row, pivot u_k, level t, log κ f_k, reference m, total weight, log leak and a limit.

    A row of level −inf has no flow. In gentle rows the limit lies half-way between the active u and the others: whether a key
    is active is seen again even where its u comes out with another last bit.
    """
    u_min = tl.min(tl.where(valid, u, float("inf")), 1)
    m, weight, friction, steep, eta, total = newton(s, u, valid, scale0, s_ref, leak0, u_max)
    active = valid & (friction < eta[:, None])
    pivot = last_active(u, active, u_min)
    scale = scale0 + (m - s_ref) + (pivot - u_max)
    # A pivot at the very edge of the active set keeps a level, whatever the last bit of its friction.
    level = tl.maximum(eta - exp(tl.minimum(scale, 60.0)), 1e-7 * eta)
    level = tl.where(tl.max(active.to(tl.int32), 1) > 0, level, float("-inf"))
    following = tl.min(tl.where(valid & (friction >= eta[:, None]), u, float("inf")), 1)
    limit = 0.5 * pivot + 0.5 * following
    log_leak = leak0 - (m - s_ref)
    z = weight * tl.maximum(eta[:, None] - friction, 0.0)
    if (tl.max(eta, 0) > GENTLE) | (tl.max(steep, 0) > 1e20):
        level, scale, m, total, log_leak = measure(s, u, valid, pivot, scale0, s_ref, leak0, spill0, u_max)
        rise = log1p(level * exp(-scale))
        grown = valid & (u > pivot[:, None]) & (u < (pivot + rise)[:, None])
        wrong = ((level <= 0) & (pivot > u_min)) | ((level > 0) & (tl.max(grown.to(tl.int32), 1) > 0))
        if tl.max(wrong.to(tl.int32), 0) > 0:
            # No key carries more than the whole flow: η ≤ κ f_j + 1/p_j for every j. In logarithms, and less m − s_ref:
            taken = scale0[:, None] + (u - u_max[:, None])
            supply = s_ref[:, None] - s
            high, low = tl.maximum(taken, supply), tl.minimum(taken, supply)
            bound = tl.min(tl.where(valid, high + tl.log(1 + exp(low - high)), float("inf")), 1)
            bound = bound - scale0 + u_max
            start = last_active(u, valid & (u < (bound + rounding(bound, u_max))[:, None]), u_min)
            pivot = tl.where(wrong, start, pivot)
            shrinking = 1
            while shrinking > 0:
                level, scale, m, total, log_leak = measure(
                    s, u, valid, pivot, scale0, s_ref, leak0, spill0, u_max
                )
                shrink = (level <= 0) & (pivot > u_min)
                rise = log1p(tl.maximum(level * exp(-scale), -0.999999))
                bound = tl.minimum(pivot + rise + rounding(pivot, u_max), pivot)
                lower = last_active(u, valid & (u < bound[:, None]), u_min)
                pivot = tl.where(shrink, lower, pivot)
                shrinking = tl.max(shrink.to(tl.int32), 0)
            # The backward may yet find these rows gentle, and then asks for the limit.
            following = tl.min(tl.where(valid & (above_pivot(u, pivot) > 0), u, float("inf")), 1)
            limit = 0.5 * pivot + 0.5 * following
        level = tl.where(level > 0, level, float("-inf"))
        z, _, _ = flows(s, u, valid, pivot, level, scale, m)
    level = tl.where(level > 0, level, float("-inf"))
    return z, pivot, level, scale, m, total, log_leak, limit


@triton.jit
def no_heavier(s, top):
    """Which keys have no larger s than ``top``, give or take far more than rounding."""
    return s <= (top + 1e-3 * (1 + tl.abs(top)))[:, None]


@triton.jit
def flows(s, u, valid, pivot, level, scale, m):
    """z, log p/p_m (−inf outside A) and log κ f p (what friction takes from each flow), from the solution of `solve`.

    A key is active where t + κ (f_k − f_j) > 0, which holds for the pivot whatever the last bit of its recomputed score; and
    none is heavier than m. Where another last bit alone puts a heavier key on this side of the edge, its weight, which may be
    any power of e, would make a flow of that rounding.
    """
    above = above_pivot(u, pivot)
    steep = exp(tl.minimum(scale, 80.0))[:, None]
    up = expm1(above)
    inside = ((above <= 0) | (steep * up < level[:, None])) & no_heavier(s, m)
    active = valid & (level[:, None] > 0) & inside
    exponent = tl.where(active, tl.minimum(s - m[:, None], 0.0), float("-inf"))
    weight = exp(exponent)
    depth = tl.abs(up)
    lifted = tl.where(
        depth > 0, exp(exponent + scale[:, None] + tl.log(tl.where(depth > 0, depth, 1.0))), 0.0
    )
    z = tl.maximum(weight * level[:, None] + tl.where(above <= 0, lifted, -lifted), 0.0)
    return tl.where(active, z, 0.0), exponent, exponent + scale[:, None] + above
