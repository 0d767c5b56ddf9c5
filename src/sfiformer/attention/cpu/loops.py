"""The loops of `sfiformer.attention.cpu`; float32 throughout. Numba compiles them when they are first called (`compile_all`).

They are of rows of scores, or of whole graphs, one head after the other: where a graph has a dozen nodes, PyTorch's calls for
its products take longer than what they compute. All are in one file: what Numba keeps of one does not follow another.

No loop of rows both adds up and writes: whether such a one is made of vectors, and so in which order it adds up, is decided by
where its arrays lie. As they are, two runs agree to the bit.
"""

import numpy as np
from numba import njit

from sfiformer.attention.cpu.jit import F, jitted

GENTLE, RANGE = F(32.0), F(1e26)  # as in `sfiformer.flow.rows`

LOG2_E = F(1.4426950408889634)
# ln 2 as a sum: products of the first with whole numbers up to 2^8 are exact.
LN_2_HIGH, LN_2_LOW = F(0.693359375), F(-2.12194440e-4)


@njit(
    forceinline=True, error_model="numpy", fastmath=False
)  # as written; unsaid, it would inherit from who calls first
def exp(x):
    """e^x for x ≤ 0, to two units in the last place; 0 below −87.

    x = k ln 2 + r with |r| ≤ ln 2 / 2; a polynomial for e^r (Cephes), and 2^k by its bits.
    """
    k = np.floor(x * LOG2_E + F(0.5))
    r = x - k * LN_2_HIGH - k * LN_2_LOW
    y = F(1.9875691500e-4)
    y = y * r + F(1.3981999507e-3)
    y = y * r + F(8.3334519073e-3)
    y = y * r + F(4.1665795894e-2)
    y = y * r + F(1.6666665459e-1)
    y = y * r + F(5.0000001201e-1)
    y = y * r * r + r + F(1.0)
    power = np.int32((np.int32(max(F(-126.0), k)) + np.int32(127)) << np.int32(23)).view(np.float32)
    return F(0.0) if x < F(-87.0) else y * power  # a NaN stays one


@njit(inline="always")
def ordered(bits):
    """The bits of a number as an integer that is the larger, the larger the number; and back."""
    return bits ^ (bits >> np.int32(31) & np.int32(0x7FFFFFFF))


@njit(inline="always")
def largest(row):
    """Its maximum. Integers know no NaN, which would keep a processor from comparing many numbers at once."""
    bits = row.view(np.int32)
    top = np.int32(-(2**31))
    for j in range(len(bits)):
        top = max(top, ordered(bits[j]))
    return np.int32(ordered(top)).view(np.float32)


@njit(inline="always")
def exponentials(row, out):
    """exp(row − its maximum), and the sum of that."""
    top = largest(row)
    for j in range(len(row)):
        out[j] = exp(row[j] - top)
    total = F(0.0)
    for j in range(len(row)):
        total += out[j]
    return total


@njit(inline="always")
def scales(exp_s, total_s, total_u, lam, alpha, potential):
    """κ f_j p_max / exp_u_j and ε / p_max, as `Block.scales`; and Σ e^(s_max − s), of the absolute scaling."""
    if potential:
        return F(len(exp_s)) / total_s / total_u * lam, F(0.0), total_s
    total = F(0.0)
    for j in range(len(exp_s)):
        total += F(1.0) / exp_s[j]
    return total / total_u * lam, F(1.0) / (total * alpha), total


@jitted
def solve(s, u, lam, height, alpha, potential, keep, z, eta, first, last):
    """Rows first … last − 1 by Newton's method (`sfiformer.flow.rows`); whether one needs a pivot, where all ends.

    A row r has λ = lam[r // height].
    """
    n, drops = s.shape[1], len(keep) > 0
    weight, friction = np.empty(n, np.float32), np.empty(n, np.float32)  # p_j and κ f_j, in units of p_max
    for r in range(first, last):
        total_s, total_u = exponentials(s[r], weight), exponentials(u[r], friction)
        scale, leak, _ = scales(weight, total_s, total_u, lam[r // height], alpha, potential)
        for j in range(n):
            friction[j] *= scale
        taken = F(0.0)
        for j in range(n):
            taken += friction[j] * weight[j]
        level = (taken + F(1.0)) / (total_s + leak)
        while True:
            less, total = F(0.0), F(0.0)
            for j in range(n):
                on = weight[j] if friction[j] < level else F(0.0)
                less += on * friction[j]
                total += on
            if not less < taken:
                break
            taken = less
            level = min((less + F(1.0)) / (total + leak), level)
        if not (level <= GENTLE and scale < RANGE):  # what is not finite too
            return True
        eta[r] = level
        for j in range(n):
            z[r, j] = max(level - friction[j], F(0.0)) * weight[j]
        if drops:
            for j in range(n):
                z[r, j] = z[r, j] if keep[r, j] else F(0.0)
    return False


@jitted
def gradients(s, u, lam, height, alpha, potential, keep, eta, g, of_log_kappa, first, last):
    """Rows first … last − 1: g ← z, s ← ∂L/∂s, u ← ∂L/∂u, as `sfiformer.attention.blocks._gentle`."""
    n, drops = s.shape[1], len(keep) > 0
    exp_s, exp_u = np.empty(n, np.float32), np.empty(n, np.float32)
    for r in range(first, last):
        total_s, total_u = exponentials(s[r], exp_s), exponentials(u[r], exp_u)
        scale, leak, total_spread = scales(exp_s, total_s, total_u, lam[r // height], alpha, potential)
        if drops:
            for j in range(n):
                g[r, j] = g[r, j] if keep[r, j] else F(0.0)
        pulled, total = F(0.0), F(0.0)
        for j in range(n):
            on = exp_s[j] if eta[r] - exp_u[j] * scale > F(0.0) else F(0.0)  # p_j on A
            pulled += on * g[r, j]
            total += on
        mean = pulled / (total + leak)  # ḡ
        pull = F(0.0)  # T
        for j in range(n):
            z = max(eta[r] - exp_u[j] * scale, F(0.0)) * exp_s[j]
            pull += z * (g[r, j] - mean)
        of_log_kappa[r] = pull - mean * leak * eta[r]
        back, shift = pull / total_spread, of_log_kappa[r] / total_u
        for j in range(n):
            above = max(eta[r] - exp_u[j] * scale, F(0.0))
            on = exp_s[j] if above > F(0.0) else F(0.0)
            centred = on * (g[r, j] - mean)
            s[r, j] = centred * above - (exp_s[j] if potential else F(1.0) / exp_s[j]) * back
            u[r, j] = (-centred * scale - shift) * exp_u[j]
            g[r, j] = on * above
        if drops:
            for j in range(n):
                g[r, j] = g[r, j] if keep[r, j] else F(0.0)
    return False


@jitted
def soften(s, keep, first, last):
    """Rows first … last − 1: s ← softmax(s), and what dropout leaves of it."""
    n, drops = s.shape[1], len(keep) > 0
    for r in range(first, last):
        share = F(1.0) / exponentials(s[r], s[r])
        for j in range(n):
            s[r, j] *= share
        if drops:
            for j in range(n):
                s[r, j] = s[r, j] if keep[r, j] else F(0.0)
    return False


@jitted
def soften_gradients(s, keep, g, first, last):
    """Rows first … last − 1: g ← what `soften` makes of s, and s ← ∂L/∂s."""
    n, drops = s.shape[1], len(keep) > 0
    p = np.empty(n, np.float32)
    for r in range(first, last):
        share = F(1.0) / exponentials(s[r], p)
        if drops:
            for j in range(n):
                g[r, j] = g[r, j] if keep[r, j] else F(0.0)
        mean = F(0.0)
        for j in range(n):
            mean += p[j] * g[r, j]
        mean *= share
        for j in range(n):
            s[r, j] = p[j] * share * (g[r, j] - mean)
            g[r, j] = p[j] * share
        if drops:
            for j in range(n):
                g[r, j] = g[r, j] if keep[r, j] else F(0.0)
    return False


@jitted
def dots(a, b, start, head, scale, out):
    """out_ij = scale · a_i·b_j for the nodes i, j of the graph that starts there, four by two; the last count again."""
    n, width = len(out), a.shape[2]
    for i in range(0, n, 4):
        i1, i2, i3 = min(i + 1, n - 1), min(i + 2, n - 1), min(i + 3, n - 1)
        for j in range(0, n, 2):
            j1 = min(j + 1, n - 1)
            s, t, s1, t1 = F(0.0), F(0.0), F(0.0), F(0.0)
            s2, t2, s3, t3 = F(0.0), F(0.0), F(0.0), F(0.0)
            for d in range(width):
                v, w = b[start + j, head, d], b[start + j1, head, d]
                x, x1 = a[start + i, head, d], a[start + i1, head, d]
                x2, x3 = a[start + i2, head, d], a[start + i3, head, d]
                s += x * v
                t += x * w
                s1 += x1 * v
                t1 += x1 * w
                s2 += x2 * v
                t2 += x2 * w
                s3 += x3 * v
                t3 += x3 * w
            out[i3, j1], out[i3, j] = t3 * scale, s3 * scale
            out[i2, j1], out[i2, j] = t2 * scale, s2 * scale
            out[i1, j1], out[i1, j] = t1 * scale, s1 * scale
            out[i, j1], out[i, j] = t * scale, s * scale


@jitted
def mixed(z, v, start, head, scale, out):
    """out_i = scale · Σ_j z_ij v_j, four nodes i and four j at a time; the last i counts again."""
    n, width = len(z), v.shape[2]
    y, y1 = np.empty(width, np.float32), np.empty(width, np.float32)
    y2, y3 = np.empty(width, np.float32), np.empty(width, np.float32)
    for i in range(0, n, 4):
        i1, i2, i3 = min(i + 1, n - 1), min(i + 2, n - 1), min(i + 3, n - 1)
        for d in range(width):
            y[d] = y1[d] = y2[d] = y3[d] = F(0.0)
        for j in range(0, n - 3, 4):
            a, b, c, e = z[i, j], z[i, j + 1], z[i, j + 2], z[i, j + 3]
            a1, b1, c1, e1 = z[i1, j], z[i1, j + 1], z[i1, j + 2], z[i1, j + 3]
            a2, b2, c2, e2 = z[i2, j], z[i2, j + 1], z[i2, j + 2], z[i2, j + 3]
            a3, b3, c3, e3 = z[i3, j], z[i3, j + 1], z[i3, j + 2], z[i3, j + 3]
            for d in range(width):
                v0, v1 = v[start + j, head, d], v[start + j + 1, head, d]
                v2, v3 = v[start + j + 2, head, d], v[start + j + 3, head, d]
                y[d] += a * v0 + b * v1 + c * v2 + e * v3
                y1[d] += a1 * v0 + b1 * v1 + c1 * v2 + e1 * v3
                y2[d] += a2 * v0 + b2 * v1 + c2 * v2 + e2 * v3
                y3[d] += a3 * v0 + b3 * v1 + c3 * v2 + e3 * v3
        for j in range(n // 4 * 4, n):
            a, a1, a2, a3 = z[i, j], z[i1, j], z[i2, j], z[i3, j]
            for d in range(width):
                v0 = v[start + j, head, d]
                y[d] += a * v0
                y1[d] += a1 * v0
                y2[d] += a2 * v0
                y3[d] += a3 * v0
        for d in range(width):
            out[start + i3, head, d], out[start + i2, head, d] = scale * y3[d], scale * y2[d]
            out[start + i1, head, d], out[start + i, head, d] = scale * y1[d], scale * y[d]


@jitted
def mask(keep, place, n):
    """What dropout leaves of n × n flows, from that place on; nothing is dropped where there is no mask."""
    return keep[place : place + n * n].reshape(n, n) if len(keep) > 0 else keep.reshape(0, 0)


@jitted
def attend(
    q, k, v, q_friction, k_friction, places, lam, scale, alpha, potential, keep, eta, out, solved, first, last
):
    """Graphs first … last − 1, whose start, nodes and place in the mask are rows of `places`; not where a row needs a pivot."""
    heads = q.shape[1]
    for graph in range(first, last):
        start, n, place = places[graph]
        s, u, z = np.empty((n, n), np.float32), np.empty((n, n), np.float32), np.empty((n, n), np.float32)
        level = np.empty(n, np.float32)
        solved[graph] = True
        for head in range(heads):
            dots(q, k, start, head, scale, s)
            dots(q_friction, k_friction, start, head, scale, u)
            left = mask(keep, place + head * n * n, n)
            if solve(s, u, lam[graph : graph + 1], n, alpha, potential, left, z, level, 0, n):
                solved[graph] = False
                break
            for i in range(n):
                eta[start + i, head] = level[i]
            mixed(z, v, start, head, F(1.0), out)
    return False


@jitted
def attend_backward(
    q, k, v, q_friction, k_friction, places, lam, scale, alpha, potential, keep, eta, grad_out,
    of_q, of_k, of_v, of_q_friction, of_k_friction, of_log_kappa, first, last,
):  # fmt: skip
    """The gradients of the same, and the sum of ∂L/∂(log κ) over the rows of each graph."""
    heads = q.shape[1]
    for graph in range(first, last):
        start, n, place = places[graph]
        s, u, g = np.empty((n, n), np.float32), np.empty((n, n), np.float32), np.empty((n, n), np.float32)
        level, of_rows = np.empty(n, np.float32), np.empty(n, np.float32)
        of_log_kappa[graph] = F(0.0)
        for head in range(heads):
            dots(q, k, start, head, scale, s)
            dots(q_friction, k_friction, start, head, scale, u)
            dots(grad_out, v, start, head, F(1.0), g)
            for i in range(n):
                level[i] = eta[start + i, head]
            left = mask(keep, place + head * n * n, n)
            gradients(s, u, lam[graph : graph + 1], n, alpha, potential, left, level, g, of_rows, 0, n)
            mixed(g.T, grad_out, start, head, F(1.0), of_v)
            mixed(s, k, start, head, scale, of_q)
            mixed(s.T, q, start, head, scale, of_k)
            mixed(u, k_friction, start, head, scale, of_q_friction)
            mixed(u.T, q_friction, start, head, scale, of_k_friction)
            of_log_kappa[graph] += of_rows.sum()
    return False


@jitted
def attend_densely(q, k, v, places, scale, keep, out, first, last):
    """`attend` without friction."""
    for graph in range(first, last):
        start, n, place = places[graph]
        s = np.empty((n, n), np.float32)
        for head in range(q.shape[1]):
            dots(q, k, start, head, scale, s)
            soften(s, mask(keep, place + head * n * n, n), 0, n)
            mixed(s, v, start, head, F(1.0), out)
    return False


@jitted
def attend_densely_backward(q, k, v, places, scale, keep, grad_out, of_q, of_k, of_v, first, last):
    """The gradients of the same."""
    for graph in range(first, last):
        start, n, place = places[graph]
        s, g = np.empty((n, n), np.float32), np.empty((n, n), np.float32)
        for head in range(q.shape[1]):
            dots(q, k, start, head, scale, s)
            dots(grad_out, v, start, head, F(1.0), g)
            soften_gradients(s, mask(keep, place + head * n * n, n), g, 0, n)
            mixed(g.T, grad_out, start, head, F(1.0), of_v)
            mixed(s, k, start, head, scale, of_q)
            mixed(s.T, q, start, head, scale, of_k)
    return False


def compile_all():
    """Call every loop, of rows and of graphs, on nothing at all."""
    rows, none, one = np.empty((1, 1), np.float32), np.empty((0, 0), np.bool_), np.empty(1, np.float32)
    flows = rows, rows, one, 1, F(1.0), False, none
    solve(*flows, rows, one, 0, 0)
    gradients(*flows, one, rows, one, 0, 0)
    soften(rows, none, 0, 0)
    soften_gradients(rows, none, rows, 0, 0)
    heads, places = np.empty((1, 1, 1), np.float32), np.empty((0, 3), np.int64)
    kept = np.empty(0, np.bool_)
    graphs = *[heads] * 5, places, one, F(1.0), F(1.0), False, kept, rows
    attend(*graphs, heads, kept, 0, 0)
    attend_backward(*graphs, *[heads] * 6, one, 0, 0)
    attend_densely(*[heads] * 3, places, F(1.0), kept, heads, 0, 0)
    attend_densely_backward(*[heads] * 3, places, F(1.0), kept, *[heads] * 4, 0, 0)
