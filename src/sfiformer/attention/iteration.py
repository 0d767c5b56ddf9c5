"""The paper's iteration on a GPU: each step in one kernel, for all rows of a batch of matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfiformer.attention.kernels import usable
from sfiformer.flow import Proximal
from sfiformer.flow.problem import Solver
from sfiformer.operators import operator


def fused_iteration(solver: Solver, like: Tensor) -> Solver:
    """The solver; the iteration by kernels where they serve, which has a first derivative alone.

    A subclass of `Proximal` may start or go on otherwise, and stays what it is.
    """
    method = Proximal() if solver == "proximal" else solver
    if type(method) is not Proximal or method.tolerance or not usable(like):
        return solver
    return FusedProximal(method.iterations, 0.0, method.start, method.seed)


@dataclass(frozen=True)
class FusedProximal(Proximal):
    """`Proximal` by kernels. All steps are done; to learn α they are plain."""

    def __call__(
        self, resistance: Tensor, friction: Tensor, lam: Tensor, alpha: Tensor, mask: Tensor
    ) -> Tensor:
        from sfiformer.attention.kernels.iteration import MAX_SIZE

        shape, size = resistance.shape, resistance.shape[-1]
        learnt = alpha.requires_grad and torch.is_grad_enabled()
        if not self.iterations or size > MAX_SIZE or learnt:
            return super().__call__(resistance, friction, lam, alpha, mask)
        threshold = torch.where(mask, lam * friction, math.inf)
        start = self.first(resistance, mask)
        rows = (x.contiguous().view(-1, size) for x in (resistance, threshold, start))
        penalty = alpha.expand(*shape[:-1], 1).contiguous().flatten()
        length = self.first_length(alpha, mask).flatten()
        ends = torch.where(mask, torch.arange(1, size + 1, dtype=torch.int32, device=mask.device), 0).amax(-1)
        keep = torch.is_grad_enabled() and (resistance.requires_grad or threshold.requires_grad)
        return _iterated(*rows, penalty, ends.flatten(), length, self.iterations, keep)[0].view(shape)


@operator("sfiformer::iterated")
def _iterated(
    resistance: Tensor,
    threshold: Tensor,
    start: Tensor,
    alpha: Tensor,
    ends: Tensor,
    length: Tensor,
    iterations: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The flows, and what the derivative needs of the way to them, where it is to be kept."""
    from sfiformer.attention.kernels import iteration as kernels

    return kernels.iterate(resistance, threshold, alpha, ends, start, length, iterations, keep)


@operator("sfiformer::iterated_backward")
def _iterated_backward(
    grad: Tensor,
    resistance: Tensor,
    threshold: Tensor,
    alpha: Tensor,
    ends: Tensor,
    flows: Tensor,
    lengths: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor]:
    from sfiformer.attention.kernels import iteration as kernels

    return kernels.iterate_backward(
        grad.contiguous(), resistance, threshold, alpha, ends, flows, lengths, sums
    )


@_iterated.register_fake
def _(
    resistance: Tensor,
    threshold: Tensor,
    start: Tensor,
    alpha: Tensor,
    ends: Tensor,
    length: Tensor,
    iterations: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, size = start.shape
    flows = start.new_empty((iterations + 1 if keep else 2, rows, size))
    return (
        torch.empty_like(start),
        flows,
        start.new_empty((iterations, len(length))),
        start.new_empty((iterations, 2, rows)),
    )


@_iterated_backward.register_fake
def _(grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    resistance, threshold, _, alpha, ends, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(resistance, threshold, alpha, ends, *output[1:])


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    return *_iterated_backward(grad, *ctx.saved_tensors), *[None] * 6


_iterated.register_autograd(_backward, setup_context=_setup_context)
