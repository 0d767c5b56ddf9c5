"""LapPE's sum over eigenpairs as an operator with a derivative by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sfiformer.attention.kernels import usable
from sfiformer.attention.widths import has_hooks, is_plain
from sfiformer.operators import operator

MAX_DIM = 64  # what a kernel keeps on chip


def fits(phi: nn.Sequential, *data: Tensor) -> bool:
    """Whether `deep_set` is there for this φ and these eigenpairs: plain float32 layers, constant data, a GPU with Triton."""
    first, *relus, last = phi[0], phi[1], phi[3], phi[2]
    if (
        not is_plain(first)
        or not is_plain(last)
        or any(type(x) is not nn.ReLU or has_hooks(x) for x in relus)
    ):
        return False
    d = last.out_features
    shapes = first.weight.shape == (2 * d, 2) and last.weight.shape == (d, 2 * d)
    single = all(x.dtype == torch.float32 for x in (first.weight, last.weight, *data))
    return shapes and single and d <= MAX_DIM and usable(data[0]) and not any(x.requires_grad for x in data)


def deep_set(
    vectors: Tensor, values: Tensor, flips: Tensor | None, graph: Tensor, phi: nn.Sequential
) -> Tensor:
    """Σ_k φ(s_gk v_ik, λ_gk) over the eigenpairs that node i of graph g has, with U, b, W and c the parameters of φ:

        h = relu(U (s v, λ) + b)            φ = relu(W h + c)

    One kernel forward and two backward, in float32 under autocast too; nothing of size [N, k, d] is written to memory. Two runs
    agree to the bit.

    Args:
        vectors: v, [N, k]; NaN where a graph has no such pair.
        values: λ, [G, k], likewise.
        flips: r, [G, k], 0 or 1 for a sign s of 2 r − 1; None for signs of 1.
        graph: g of each node, [N].
        phi: Linear(2, 2d), ReLU, Linear(2d, d), ReLU.

    Returns:
        [N, d] in float32.
    """
    return _deep_set(vectors, values, flips, graph, *phi.parameters())


@operator("sfiformer::deep_set")
def _deep_set(
    vectors: Tensor,
    values: Tensor,
    flips: Tensor | None,
    graph: Tensor,
    first_weight: Tensor,
    first_bias: Tensor,
    last_weight: Tensor,
    last_bias: Tensor,
) -> Tensor:
    from sfiformer.nn.kernels import deep_set as kernels

    return kernels.forward(vectors, values, flips, graph, first_weight, first_bias, last_weight, last_bias)


@operator("sfiformer::deep_set_backward")
def _deep_set_backward(
    grad: Tensor,
    vectors: Tensor,
    values: Tensor,
    flips: Tensor | None,
    graph: Tensor,
    first_weight: Tensor,
    first_bias: Tensor,
    last_weight: Tensor,
    last_bias: Tensor,
) -> Tensor:
    """Gradients of U, b, W and c one behind the other, [2 h + h + d h + d] with h = 2d."""
    from sfiformer.nn.kernels import deep_set as kernels

    return kernels.backward(
        grad, vectors, values, flips, graph, first_weight, first_bias, last_weight, last_bias
    )


@_deep_set.register_fake
def _(vectors: Tensor, *args: Any) -> Tensor:
    return vectors.new_empty((vectors.size(0), args[-1].size(0)), dtype=torch.float32)


@_deep_set_backward.register_fake
def _(grad: Tensor, *args: Any) -> Tensor:
    return grad.new_empty(sum(parameter.numel() for parameter in args[-4:]), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    parameters = ctx.saved_tensors[-4:]
    parts = _deep_set_backward(grad, *ctx.saved_tensors).split([x.numel() for x in parameters])
    return None, None, None, None, *(part.view_as(x) for part, x in zip(parts, parameters, strict=True))


_deep_set.register_autograd(_backward, setup_context=_setup_context)
