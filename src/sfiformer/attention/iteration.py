"""The paper's iteration on a GPU: each step in one kernel, for all graphs and heads of a block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfiformer.attention.kernels import MAX_KEYS, usable
from sfiformer.flow import Proximal
from sfiformer.flow.problem import Scaling, Solver
from sfiformer.hashing import MASK
from sfiformer.operators import operator


def fused_iteration(solver: Solver, like: Tensor) -> Solver:
    """The solver; the iteration by kernels where they serve, which has a first derivative alone.

    A subclass of `Proximal` may start or go on otherwise, and stays what it is.
    """
    method = Proximal() if solver == "proximal" else solver
    if type(method) is not Proximal or method.tolerance or not method.iterations or not usable(like):
        return solver
    return FusedProximal(method.iterations, 0.0, method.start, method.seed)


@dataclass(frozen=True)
class FusedProximal(Proximal):
    """`Proximal` by kernels, from scores to flows. All steps are done."""

    def serves(
        self, size: int, alpha: float | Tensor, scale: float | Tensor, scaling: Scaling, check: bool
    ) -> bool:
        """Whether the kernels do all that is asked for: they know α and the scale beforehand, and look at no value."""
        known = not isinstance(alpha, Tensor) and math.isfinite(alpha) and not isinstance(scale, Tensor)
        return known and scaling == "absolute" and not check and 0 < size <= MAX_KEYS

    def of_scores(
        self, s: Tensor, u: Tensor, lam: Tensor, sizes: Tensor, *, alpha: float, scale: float
    ) -> Tensor:
        """Flows [graphs, heads, n, n] of scores that are to be multiplied by ``scale``; λ and the nodes are of each graph."""
        keep = torch.is_grad_enabled() and any(x.requires_grad for x in (s, u, lam))
        given = s.contiguous(), u.contiguous(), lam.to(s.dtype), sizes.to(torch.int32)
        return _iterated(*given, alpha, scale, self.iterations, self.start, self.seed & MASK, keep)[0]


@operator("sfiformer::iterated")
def _iterated(
    s: Tensor,
    u: Tensor,
    lam: Tensor,
    sizes: Tensor,
    alpha: float,
    scale: float,
    iterations: int,
    start: str,
    seed: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The flows, and what the derivative needs of the way to them, where it is to be kept."""
    from sfiformer.attention.kernels import iteration as kernels

    return kernels.iterate(s, u, lam, sizes, alpha, scale, iterations, start, seed, keep)


@operator("sfiformer::iterated_backward")
def _iterated_backward(
    grad: Tensor,
    z: Tensor,
    resistance: Tensor,
    friction: Tensor,
    flows: Tensor,
    lengths: Tensor,
    sums: Tensor,
    lam: Tensor,
    sizes: Tensor,
    alpha: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from sfiformer.attention.kernels import iteration as kernels

    kept = (z, resistance, friction, flows, lengths, sums)
    return kernels.iterate_backward(grad.contiguous(), *kept, lam, sizes, alpha, scale)


@_iterated.register_fake
def _(s: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    iterations, _, _, keep = rest[-4:]
    graphs, heads, size, _ = s.shape
    return (
        torch.empty_like(s),
        torch.empty_like(s),
        torch.empty_like(s),
        s.new_empty((iterations if keep else min(iterations, 2), *s.shape)),
        s.new_empty((iterations, graphs * heads)),
        s.new_empty((iterations, 2, graphs * heads * size)),
    )


@_iterated_backward.register_fake
def _(grad: Tensor, z: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(grad), grad.new_empty(grad.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, lam, sizes, alpha, scale, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, lam, sizes)
    ctx.constants = alpha, scale


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    return *_iterated_backward(grad, *ctx.saved_tensors, *ctx.constants), *[None] * 7


_iterated.register_autograd(_backward, setup_context=_setup_context)
