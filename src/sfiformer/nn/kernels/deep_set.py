"""LapPE's Σ_k relu(W relu(U (s v, λ) + b) + c) fused over the eigenpairs of a node: one kernel forward, two backward
(`sfiformer.nn.deep_set`).

A program owns tiles of ROWS nodes and goes through their pairs one by one, with all of these and all parameters on chip; what
is between the layers is made anew for the backward. Sums over nodes are made in at most PIECES pieces, in float32, and put
together in one order: there are no atomics, and two runs agree to the bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfiformer.nn.kernels.row_tiles import PIECES, activated, slope, sum_pieces

ROWS, WARPS = 32, 4


@triton.jit
def load_pairs(vectors, values, flips, graph, nodes, size, PAIRS: tl.constexpr, K: tl.constexpr):
    """(s v, λ) of all pairs of each node, 0 where there is none, and 1 where there is one: [ROWS, K] each."""
    pairs = tl.arange(0, K)[None, :]
    graphs = tl.load(graph + nodes, mask=nodes < size, other=0)
    inside = (nodes < size)[:, None] & (pairs < PAIRS)
    a = tl.load(vectors + nodes[:, None] * PAIRS + pairs, mask=inside, other=0.0)
    b = tl.load(values + graphs[:, None] * PAIRS + pairs, mask=inside, other=0.0)
    if flips is not None:
        a *= 2 * tl.load(flips + graphs[:, None] * PAIRS + pairs, mask=inside, other=0.0) - 1
    there = inside & (a == a) & (b == b)
    return tl.where(there, a, 0.0), tl.where(there, b, 0.0), tl.where(there, 1.0, 0.0)


@triton.jit
def column(x, pair, K: tl.constexpr):
    """[ROWS, K] → [ROWS], one pair of each node."""
    return tl.sum(tl.where(tl.arange(0, K)[None, :] == pair, x, 0.0), 1)


@triton.jit
def load_parameters(
    first_weight, first_bias, last_weight, last_bias, DIM: tl.constexpr, D: tl.constexpr, H: tl.constexpr
):
    """The columns of U [H], b [H], W [D, H] and c [D], zeros behind the real ones."""
    hidden, out = tl.arange(0, H), tl.arange(0, D)
    real = hidden < 2 * DIM
    inside = (out < DIM)[:, None] & real[None, :]
    return (
        tl.load(first_weight + 2 * hidden, mask=real, other=0.0),
        tl.load(first_weight + 2 * hidden + 1, mask=real, other=0.0),
        tl.load(first_bias + hidden, mask=real, other=0.0),
        tl.load(last_weight + out[:, None] * (2 * DIM) + hidden[None, :], mask=inside, other=0.0),
        tl.load(last_bias + out, mask=out < DIM, other=0.0),
    )


@triton.jit
def before_relu(a, b, parameters):
    """U (a, b) + b, [ROWS, H], and W relu(that) + c, [ROWS, D]."""
    of_vector, of_value, shift, weight, last_shift = parameters
    h = a[:, None] * of_vector[None, :] + b[:, None] * of_value[None, :] + shift[None, :]
    y = tl.dot(activated(h, "relu"), tl.trans(weight), input_precision="tf32x3") + last_shift[None, :]
    return h, y


@triton.jit(do_not_specialize=["size"])
def forward_kernel(
    vectors, values, flips, graph, first_weight, first_bias, last_weight, last_bias, result, size,
    PAIRS: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """The sums of one tile of nodes."""
    parameters = load_parameters(first_weight, first_bias, last_weight, last_bias, DIM, D, H)
    nodes = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a, b, there = load_pairs(vectors, values, flips, graph, nodes, size, PAIRS, K)
    total = tl.zeros([ROWS, D], tl.float32)
    for pair in range(PAIRS):
        _, y = before_relu(column(a, pair, K), column(b, pair, K), parameters)
        total += tl.where(column(there, pair, K)[:, None] > 0, activated(y, "relu"), 0.0)
    columns = tl.arange(0, D)
    inside = (nodes < size)[:, None] & (columns < DIM)[None, :]
    tl.store(result + nodes[:, None] * DIM + columns[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["size"])
def backward_kernel(
    grad, vectors, values, flips, graph, first_weight, first_bias, last_weight, last_bias, sums, size,
    PAIRS: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Over one piece of the nodes, with g the gradient of their sums, ∂L/∂y = g ⊙ relu'(y) and ∂L/∂h = Wᵀ ∂L/∂y ⊙ relu'(h):
    Σ ∂L/∂h (s v, λ)ᵀ, Σ ∂L/∂h, Σ ∂L/∂y relu(h)ᵀ and Σ ∂L/∂y."""
    parameters = load_parameters(first_weight, first_bias, last_weight, last_bias, DIM, D, H)
    weight = parameters[3]
    hidden, columns = tl.arange(0, H), tl.arange(0, D)
    # Each place of a tile adds up its own nodes; warps wait for one another once, at the end.
    of_vector = tl.zeros([ROWS, H], tl.float32)
    of_value = tl.zeros([ROWS, H], tl.float32)
    of_shift = tl.zeros([ROWS, H], tl.float32)
    of_last_shift = tl.zeros([ROWS, D], tl.float32)
    of_weight = tl.zeros([D, H], tl.float32)
    for start in range(tl.program_id(0) * ROWS, size, tl.num_programs(0) * ROWS):
        nodes = (tl.full((), 0, tl.int64) + start) + tl.arange(0, ROWS)
        inside = (nodes < size)[:, None] & (columns < DIM)[None, :]
        g = tl.load(grad + nodes[:, None] * DIM + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        vector, value, there = load_pairs(vectors, values, flips, graph, nodes, size, PAIRS, K)
        for pair in range(PAIRS):
            a, b = column(vector, pair, K), column(value, pair, K)
            h, y = before_relu(a, b, parameters)
            of_y = tl.where(column(there, pair, K)[:, None] > 0, g * slope(y, "relu"), 0.0)
            of_h = tl.dot(of_y, weight, input_precision="tf32x3") * slope(h, "relu")
            of_vector += of_h * a[:, None]
            of_value += of_h * b[:, None]
            of_shift += of_h
            of_last_shift += of_y
            of_weight = tl.dot(tl.trans(of_y), activated(h, "relu"), of_weight, input_precision="tf32x3")
    real = hidden < 2 * DIM
    sums += tl.program_id(0) * (6 * DIM + 2 * DIM * DIM + DIM)
    tl.store(sums + 2 * hidden, tl.sum(of_vector, 0), mask=real)
    tl.store(sums + 2 * hidden + 1, tl.sum(of_value, 0), mask=real)
    tl.store(sums + 4 * DIM + hidden, tl.sum(of_shift, 0), mask=real)
    at = sums + 6 * DIM + columns[:, None] * (2 * DIM) + hidden[None, :]
    tl.store(at, of_weight, mask=(columns < DIM)[:, None] & real[None, :])
    tl.store(sums + 6 * DIM + 2 * DIM * DIM + columns, tl.sum(of_last_shift, 0), mask=columns < DIM)


def forward(
    vectors: Tensor, values: Tensor, flips: Tensor | None, graph: Tensor, *parameters: Tensor
) -> Tensor:
    """[N, d] in float32; the parameters are U, b, W and c."""
    (size, pairs), dim = vectors.shape, parameters[-1].numel()
    result = vectors.new_empty((size, dim), dtype=torch.float32)
    if size:
        forward_kernel[(triton.cdiv(size, ROWS),)](
            *_inputs(vectors, values, flips, graph), *parameters, result, size, pairs, *_tile(pairs, dim), num_warps=WARPS
        )  # fmt: skip
    return result


def backward(
    grad: Tensor, vectors: Tensor, values: Tensor, flips: Tensor | None, graph: Tensor, *parameters: Tensor
) -> Tensor:
    """The gradients of the parameters one behind the other."""
    (size, pairs), dim = vectors.shape, parameters[-1].numel()
    programs = max(1, min(PIECES, triton.cdiv(size, ROWS)))
    sums = grad.new_empty((programs, 7 * dim + 2 * dim * dim), dtype=torch.float32)
    backward_kernel[(programs,)](
        grad.contiguous(), *_inputs(vectors, values, flips, graph), *parameters, sums, size, pairs, *_tile(pairs, dim),
        num_warps=WARPS,
    )  # fmt: skip
    return sum_pieces(sums)


def _inputs(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _tile(pairs: int, dim: int) -> tuple[int, int, int, int, int]:
    """What the pairs are padded to, d, rows, and what d and 2d are padded to: a product takes no less than 16."""
    wide, hidden = (max(16, triton.next_power_of_2(size)) for size in (dim, 2 * dim))
    return triton.next_power_of_2(pairs), dim, ROWS, wide, hidden
