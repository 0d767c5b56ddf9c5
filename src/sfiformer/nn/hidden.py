"""A linear layer behind an activation and dropout, as in the blocks Linear, act, dropout, Linear.

On a GPU one kernel makes all of that from one product to the next, and one its gradient: between products of a small step
every kernel is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sfiformer.attention.dropout import dropped
from sfiformer.attention.kernels import usable
from sfiformer.attention.widths import has_hooks, is_plain, linear, of_ready, taken
from sfiformer.branches import ahead
from sfiformer.operators import operator


def hidden_linear(
    x: Tensor, layer: nn.Module, activation: nn.Module | None, dropout: float, training: bool
) -> Tensor:
    """layer(dropout(act(x))), with the widths of `linear`: [N, …] → [N, width].

    Args:
        x: [N, d], of which the layer takes the first columns.
        activation: None for the identity.
        dropout: probability, in training.
    """
    dropout, name = dropout if training else 0.0, _name(activation)
    known = name is not None or (activation is None and dropout > 0)
    if known and usable(x) and is_plain(layer):
        seed = ahead(x, lambda: torch.randint(1 << 62, (), device=x.device)) if dropout else None
        return of_ready(hidden_rows(x, seed, *taken(x, [layer]), name, dropout), [layer]).flatten(1)
    return linear(dropped(x if activation is None else activation(x), dropout, training), layer)


def _name(activation: nn.Module | None) -> str | None:
    """What the kernels call an activation; None where they have no such."""
    if activation is None or has_hooks(activation):
        return None
    if type(activation) is nn.GELU and activation.approximate == "none":
        return "gelu"
    return "relu" if type(activation) is nn.ReLU else None


@operator("sfiformer::hidden_rows")
def hidden_rows(
    x: Tensor,
    seed: Tensor | None,
    width: int,
    dtype: torch.dtype,
    kept: int,
    activation: str | None,
    dropout: float,
) -> Tensor:
    """What a product takes, in one pass, from what the one before it made:

        out_nc = m_nc act(x_nc)    for c < kept,    out_nc = 1 for c = kept,    0 behind,    m_nc ∈ {0, 1 / (1 − p)}

    p is met to 1/65536. The mask m is drawn from the seed, forward and backward, and never written to memory.

    Args:
        x: [N, at least kept].
        seed: int64 [], on the device; None without dropout.
        width, dtype: of the result.
        activation: "relu", "gelu", or None for the identity.
        dropout: probability p.
    """
    from sfiformer.nn.kernels import hidden as kernels

    return kernels.forward(x, seed, width, dtype, kept, activation, dropout)


@operator("sfiformer::hidden_rows_backward")
def _hidden_rows_backward(
    grad: Tensor, x: Tensor, seed: Tensor | None, kept: int, activation: str | None, dropout: float
) -> Tensor:
    from sfiformer.nn.kernels import hidden as kernels

    return kernels.backward(grad, x, seed, kept, activation, dropout)


@hidden_rows.register_fake
def _(x: Tensor, seed: Tensor | None, width: int, dtype: torch.dtype, *args: Any) -> Tensor:
    return x.new_empty((x.size(0), width), dtype=dtype)


@_hidden_rows_backward.register_fake
def _(grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, seed, _, _, *ctx.options = inputs
    ctx.save_for_backward(x, seed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _hidden_rows_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 6


hidden_rows.register_autograd(_backward, setup_context=_setup_context)
