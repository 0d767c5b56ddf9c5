"""From scores to the resistances, frictions and first flows of the paper's iteration, and back, a row a program."""

import triton
import triton.language as tl

STARTS = ("uniform", "constant", "softmax")


@triton.jit
def softmax(x, inside):
    weight = tl.where(inside, tl.exp(x - tl.max(tl.where(inside, x, float("-inf")), 0)), 0)
    return weight / tl.sum(weight, 0)


@triton.jit
def mixed(bits):
    """A permutation of the numbers of 32 bits: that of `sfiformer.hashing`."""
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


@triton.jit(do_not_specialize=["seed", "size", "heads"])
def energy_kernel(
    s, u, sizes, resistance, friction, start, seed, size, heads,
    SCALE: tl.constexpr, START: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """r = softmax(−s), f = softmax(u), and a start of sum 1, over the keys of a row."""
    row = tl.program_id(0).to(tl.int64)
    matrix = row // size
    query, end = row % size, tl.load(sizes + matrix // heads)
    if query >= end:
        return
    keys = tl.arange(0, BLOCK)
    place, inside = row * size + keys, keys < end
    score = tl.load(s + place, mask=inside, other=0.0) * SCALE
    friction_score = tl.load(u + place, mask=inside, other=0.0) * SCALE
    tl.store(resistance + place, softmax(-score, inside), mask=inside)
    tl.store(friction + place, softmax(friction_score, inside), mask=inside)
    if START == 0:
        bits = mixed(mixed(mixed(seed.to(tl.int64) + matrix % heads + 1) + query + 1) + keys + 1)
        z = tl.where(inside, ((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(score.dtype), 0)
        z /= tl.sum(z, 0)
    elif START == 1:
        z = tl.where(inside, 1 / end.to(score.dtype), 0)
    else:
        z = softmax(score, inside)
    tl.store(start + place, z, mask=inside)


@triton.jit(do_not_specialize=["size", "heads"])
def score_kernel(
    resistance, friction, lam, sizes, of_s, of_u, of_lam, size, heads,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In place of gradients of resistances and of thresholds λf those of scores, 0 in padding; and a row's share of λ's."""
    row = tl.program_id(0).to(tl.int64)
    matrix = row // size
    end = tl.load(sizes + matrix // heads)
    keys = tl.arange(0, BLOCK)
    place, inside = row * size + keys, (keys < end) & (row % size < end)
    r = tl.load(resistance + place, mask=inside, other=0.0)
    f = tl.load(friction + place, mask=inside, other=0.0)
    of_r = tl.load(of_s + place, mask=inside, other=0.0)
    of_threshold = tl.load(of_u + place, mask=inside, other=0.0)
    share = tl.sum(f * of_threshold, 0)
    tl.store(of_lam + row, share)
    tl.store(of_s + place, -SCALE * r * (of_r - tl.sum(r * of_r, 0)), mask=keys < size)
    of_threshold = tl.load(lam + matrix // heads) * f * (of_threshold - share)
    tl.store(of_u + place, SCALE * of_threshold, mask=keys < size)


def tile(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 128))}
