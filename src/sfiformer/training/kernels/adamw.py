"""The end of a training step on the device, for all parameters at once: the gradient's norm, clipping, AdamW. No atomics.

All tensors are cut into chunks of at most CHUNK numbers, a program or so for each. A row of a table of int64, ROW for a chunk,
says where it lies:

    number of its tensor, place of its first number in the tensor, how many numbers it has,
    addresses of its parameters, first moments, second moments and of the step count, address of its gradient.

All but the last stay the same from step to step. Gradients are new in every step: their addresses are arguments of the first
kernel, which a CUDA graph keeps as they are, and that kernel writes them to the table.
"""

import triton
import triton.language as tl

ROW = tl.constexpr(8)


@triton.jit
def chosen(addresses, number):
    """addresses[number], of a tuple."""
    found = addresses[0]
    for i in tl.static_range(1, len(addresses)):
        found = tl.where(number == i, addresses[i], found)
    return found


@triton.jit
def loaded(address, count, WIDE: tl.constexpr, CHUNK: tl.constexpr):
    """The ``count`` numbers from an address on, and zeros; WIDE: all CHUNK, from a multiple of 16 bytes on, four at a time."""
    pointer = address.to(tl.pointer_type(tl.float32))
    if WIDE:
        return tl.load(tl.multiple_of(pointer, 16) + tl.arange(0, CHUNK))
    else:
        places = tl.arange(0, CHUNK)
        return tl.load(pointer + places, mask=places < count, other=0.0)


@triton.jit
def store(address, values, count, wanted, WIDE: tl.constexpr, CHUNK: tl.constexpr):
    """The counterpart of `loaded`; nothing where it is not ``wanted``."""
    pointer = address.to(tl.pointer_type(tl.float32))
    if WIDE:
        tl.store(tl.multiple_of(pointer, 16) + tl.arange(0, CHUNK), values, mask=wanted)
    else:
        places = tl.arange(0, CHUNK)
        tl.store(pointer + places, values, mask=(places < count) & wanted)


@triton.jit(do_not_specialize=["first", "end", "piece"])
def squares_kernel(table, gradients, steps, squares, first, end, piece, CHUNK: tl.constexpr):
    """Σ g² over some of the chunks from ``first`` to ``end``, in float64: a square may be beyond float32.

    Sets down where the gradients are, and the step counts as they are before the update.
    """
    total = tl.full((), 0.0, tl.float64)
    for chunk in range(first + tl.program_id(0), end, tl.num_programs(0)):
        row = table + chunk * ROW
        count = tl.load(row + 2)
        gradient = chosen(gradients, tl.load(row)) + 4 * tl.load(row + 1)
        tl.store(row + 7, gradient)
        tl.store(steps + chunk, tl.load(tl.load(row + 6).to(tl.pointer_type(tl.float32))))
        if (count == CHUNK) & ((gradient & 15) == 0):
            g = loaded(gradient, count, True, CHUNK)
        else:
            g = loaded(gradient, count, False, CHUNK)
        g = g.to(tl.float64)
        total += tl.sum(g * g, 0)
    tl.store(squares + piece + tl.program_id(0), total)


@triton.jit
def norm_of(squares, parts, PARTS: tl.constexpr):
    """√ Σ squares, in float32."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, parts, PARTS):
        places = start + tl.arange(0, PARTS)
        total += tl.sum(tl.load(squares + places, mask=places < parts, other=0.0), 0)
    return tl.sqrt(total).to(tl.float32)


@triton.jit
def moved(p, g, m, v, factor, decay, rate, spread, eps, BETA1: tl.constexpr, BETA2: tl.constexpr):
    """Parameters and moments after the step: rate = lr / (1 − β₁ᵗ), spread = 1 / √(1 − β₂ᵗ)."""
    g = g * factor
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    p = p - decay * p
    p = p - tl.div_rn(rate * m, tl.sqrt_rn(v) * spread + eps)
    return p, m, v


@triton.jit(do_not_specialize=["losses", "parts"])
def update_kernel(
    table, steps, squares, values, spoilt, lr, max_norm, weight_decay, eps, losses, parts,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOSSES: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """AdamW with the clipped gradient on one chunk; nothing where ``spoilt`` is set, or a loss or the norm is not finite.

    Every program adds the norm's squares up. The first writes it behind the losses, and sets ``spoilt``: whether another
    program sees that already makes no difference to it.
    """
    chunk = tl.program_id(0)
    row = table + chunk * ROW
    start, count, step_at = tl.load(row + 1), tl.load(row + 2), tl.load(row + 6)
    param, gradient = tl.load(row + 3), tl.load(row + 7)
    exp_avg, exp_avg_sq = tl.load(row + 4), tl.load(row + 5)
    wide = (count == CHUNK) & (((param | exp_avg | exp_avg_sq | gradient) & 15) == 0)
    if wide:
        p, g = loaded(param, count, True, CHUNK), loaded(gradient, count, True, CHUNK)
        m, v = loaded(exp_avg, count, True, CHUNK), loaded(exp_avg_sq, count, True, CHUNK)
    else:
        p, g = loaded(param, count, False, CHUNK), loaded(gradient, count, False, CHUNK)
        m, v = loaded(exp_avg, count, False, CHUNK), loaded(exp_avg_sq, count, False, CHUNK)

    norm = norm_of(squares, parts, PARTS)
    places = tl.arange(0, LOSSES)
    seen = tl.load(values + places, mask=places < losses, other=0.0)
    wrong = tl.max(tl.where(tl.abs(seen) < float("inf"), 0, 1), 0)
    healthy = (wrong == 0) & (tl.abs(norm) < float("inf")) & (tl.load(spoilt) == 0.0)
    tl.store(values + losses, norm, mask=chunk == 0)
    tl.store(spoilt, 1.0, mask=(chunk == 0) & (healthy == 0))

    factor = tl.minimum(tl.div_rn(1.0, norm + 1e-6) * max_norm, 1.0)  # rounded as clip_grads_with_norm_ does
    step = tl.load(steps + chunk) + 1
    tl.store(step_at.to(tl.pointer_type(tl.float32)), step, mask=healthy & (start == 0))
    # In float64, since 1 − β₂ᵗ cancels at first.
    t = step.to(tl.float64)
    bias1 = 1 - tl.exp(t * tl.log(tl.full((), BETA1, tl.float64)))
    bias2 = 1 - tl.exp(t * tl.log(tl.full((), BETA2, tl.float64)))
    speed = tl.load(lr)
    rate = (speed.to(tl.float64) / bias1).to(tl.float32)
    spread = (1 / tl.sqrt(bias2)).to(tl.float32)
    p, m, v = moved(p, g, m, v, factor, speed * weight_decay, rate, spread, eps, BETA1, BETA2)
    if wide:
        store(param, p, count, healthy, True, CHUNK)
        store(exp_avg, m, count, healthy, True, CHUNK)
        store(exp_avg_sq, v, count, healthy, True, CHUNK)
    else:
        store(param, p, count, healthy, False, CHUNK)
        store(exp_avg, m, count, healthy, False, CHUNK)
        store(exp_avg_sq, v, count, healthy, False, CHUNK)
