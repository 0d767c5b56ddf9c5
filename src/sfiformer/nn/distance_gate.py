"""The gate of GatedGCN's messages by distances of positional encodings, as an operator with a derivative by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sfiformer.attention.kernels import usable
from sfiformer.operators import operator


def distance_gate(distance: Tensor, mlp: nn.Sequential, activation: str) -> Tensor:
    """g of GatedGCN for each squared distance t of positional encodings, with v, b [d], w [d] and c the parameters of the MLP:

        h = v t + b            g(t) = sigmoid(w · act(h) + c)

    On a GPU with Triton and float32 parameters this is one kernel forward and two backward, in float32 under autocast too, and
    nothing of size [E, d] is written to memory; otherwise it is the MLP itself. Two runs agree to the bit.

    Args:
        distance: t, [E, 1].
        mlp: Linear(1, d), act, Linear(d, 1), Sigmoid.
        activation: what act is, "relu" or "gelu".

    Returns:
        g [E, 1].
    """
    parameters = list(mlp.parameters())
    if usable(distance) and all(parameter.dtype == torch.float32 for parameter in parameters):
        return _distance_gate(distance, *parameters, activation)
    return mlp(distance)


@operator("sfiformer::distance_gate")
def _distance_gate(
    distance: Tensor,
    first_weight: Tensor,
    first_bias: Tensor,
    last_weight: Tensor,
    last_bias: Tensor,
    activation: str,
) -> Tensor:
    from sfiformer.nn.kernels import distance_gate as kernels

    return kernels.forward(distance, first_weight, first_bias, last_weight, last_bias, activation)


@operator("sfiformer::distance_gate_backward")
def _distance_gate_backward(
    of_gate: Tensor,
    gate: Tensor,
    distance: Tensor,
    first_weight: Tensor,
    first_bias: Tensor,
    last_weight: Tensor,
    activation: str,
    of_distance: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the distance (empty unless ``of_distance``), and of v, b, w and c one behind the other, [3 d + 1]."""
    from sfiformer.nn.kernels import distance_gate as kernels

    return kernels.backward(
        of_gate, gate, distance, first_weight, first_bias, last_weight, activation, of_distance
    )


@_distance_gate.register_fake
def _(distance: Tensor, *args: Any) -> Tensor:
    return distance.new_empty(distance.shape, dtype=torch.float32)


@_distance_gate_backward.register_fake
def _(
    of_gate: Tensor, gate: Tensor, distance: Tensor, first_weight: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    *_, of_distance = args
    shape = distance.shape if of_distance else (0,)
    return distance.new_empty(shape), first_weight.new_empty(3 * first_weight.size(0) + 1)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    distance, first_weight, first_bias, last_weight, _, ctx.activation = inputs
    ctx.save_for_backward(output, distance, first_weight, first_bias, last_weight)


def _backward(ctx: Any, of_gate: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[0]
    of_distance, of_parameters = _distance_gate_backward(of_gate, *ctx.saved_tensors, ctx.activation, needed)
    d = of_parameters.size(0) // 3
    of_first, of_bias, of_last, of_last_bias = of_parameters.split([d, d, d, 1])
    return (
        of_distance if needed else None,
        of_first.unsqueeze(1),
        of_bias,
        of_last.unsqueeze(0),
        of_last_bias,
        None,
    )


_distance_gate.register_autograd(_backward, setup_context=_setup_context)
