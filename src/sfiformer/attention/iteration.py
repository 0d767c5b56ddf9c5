"""The paper's iteration on a GPU: each step in one kernel, for all rows of a batch of matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.attention.kernels import usable
from sfiformer.flow import Proximal
from sfiformer.flow.problem import Scaling, Solver, flows_from_scores
from sfiformer.operators import operator

# Where all graphs of a batch are iterated at once, each padded to the largest: how many times as many nodes that may make of
# them, and how many numbers (graphs × heads × queries × keys, for each step and some more) may be kept for the derivative.
MOST_PADDED, MOST_KEPT, MORE = 4, 1 << 30, 8


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
    """`Proximal` by kernels. All steps are done."""

    def __call__(
        self, resistance: Tensor, friction: Tensor, lam: Tensor, alpha: Tensor, mask: Tensor
    ) -> Tensor:
        from sfiformer.attention.kernels.iteration import MAX_SIZE

        shape, size = resistance.shape, resistance.shape[-1]
        if not self.iterations or size > MAX_SIZE:
            return super().__call__(resistance, friction, lam, alpha, mask)
        threshold = torch.where(mask, lam * friction, math.inf)
        start = self.first(resistance, mask)
        rows = (x.contiguous().view(-1, size) for x in (resistance, threshold, start))
        penalty = alpha.expand(*shape[:-1], 1).contiguous().flatten()
        length = self.first_length(alpha, mask).flatten()
        keep = torch.is_grad_enabled() and (resistance.requires_grad or threshold.requires_grad)
        return _iterated(*rows, penalty, length, self.iterations, keep)[0].view(shape)


@operator("sfiformer::iterated")
def _iterated(
    resistance: Tensor,
    threshold: Tensor,
    start: Tensor,
    alpha: Tensor,
    length: Tensor,
    iterations: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The flows, and what the derivative needs of the way to them, where it is to be kept."""
    from sfiformer.attention.kernels import iteration as kernels

    return kernels.iterate(resistance, threshold, alpha, start, length, iterations, keep)


@operator("sfiformer::iterated_backward")
def _iterated_backward(
    grad: Tensor,
    resistance: Tensor,
    threshold: Tensor,
    alpha: Tensor,
    flows: Tensor,
    lengths: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor]:
    from sfiformer.attention.kernels import iteration as kernels

    return kernels.iterate_backward(grad.contiguous(), resistance, threshold, alpha, flows, lengths, sums)


@_iterated.register_fake
def _(
    resistance: Tensor,
    threshold: Tensor,
    start: Tensor,
    alpha: Tensor,
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
    resistance, threshold, _, alpha, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(resistance, threshold, alpha, *output[1:])


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    return *_iterated_backward(grad, *ctx.saved_tensors), *[None] * 5


_iterated.register_autograd(_backward, setup_context=_setup_context)


def in_one_block(q: Tensor, ptr: Tensor, solver: FusedProximal, max_nodes: int | None) -> bool:
    """Whether all graphs are iterated at once: where the size of the largest is known, and most are not much smaller."""
    if max_nodes is None or not q.numel() or max_nodes < 1:
        return False
    nodes = (len(ptr) - 1) * max_nodes
    kept = nodes * max_nodes * q.shape[1] * (solver.iterations + MORE)
    return 0 < nodes <= MOST_PADDED * len(q) and kept <= MOST_KEPT


def iterated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    lam: Tensor,
    alpha: float,
    scaling: Scaling,
    scale: float,
    dropout_p: float,
    solver: FusedProximal,
    check: bool,
    max_nodes: int,
) -> Tensor:
    """Attention by the iteration, of all graphs at once: [N, heads, width of v]. Unless values are checked nothing waits for
    the device."""
    work, heads = torch.promote_types(q.dtype, torch.float32), q.shape[1]
    padding = _Padding(ptr, len(q), max_nodes)
    with torch.autocast(q.device.type, enabled=False):
        qb, kb, vb, qf, kf = (padding.padded(x.to(work)) for x in (q, k, v, q_friction, k_friction))
        links = (padding.real.unsqueeze(1) & padding.real.unsqueeze(2)).unsqueeze(1)
        z = flows_from_scores(
            qb @ kb.mT * scale,
            qf @ kf.mT * scale,
            lam=lam.view(-1, 1, 1),
            alpha=alpha,
            scaling=scaling,
            mask=links.expand(-1, heads, -1, -1),
            solver=solver,
            check=check,
        )  # [graphs, heads, n, n]
        return padding.packed((F.dropout(z, dropout_p) if dropout_p else z) @ vb).to(v.dtype)


class _Padding:
    """Packed nodes as graphs side by side, each of n nodes, and back."""

    def __init__(self, ptr: Tensor, nodes: int, size: int) -> None:
        places = ptr[:-1].unsqueeze(1) + torch.arange(size, device=ptr.device)
        self.real = places < ptr[1:].unsqueeze(1)  # [graphs, n]
        packed = torch.arange(nodes, device=ptr.device)
        graph = torch.searchsorted(ptr[1:], packed, right=True)
        within = graph < len(ptr) - 1  # nodes may stand behind the last graph
        graph = graph.clamp(max=len(ptr) - 2)
        self.owned = within & (packed - ptr[graph] < size)
        # Where a row comes from: places stand for none where `real` and `owned` say so.
        self.of_padded = torch.where(self.real, places, 0).flatten()  # [graphs · n]
        self.of_packed = torch.where(self.owned, graph * size + packed - ptr[graph], 0)  # [N]

    def padded(self, x: Tensor) -> Tensor:
        """[N, heads, width] → [graphs, heads, n, width]."""
        rows = _Rows.apply(x, self.of_padded, self.real.flatten(), self.of_packed, self.owned)
        return rows.view(*self.real.shape, *x.shape[1:]).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """[graphs, heads, n, width] → [N, heads, width]; 0 for a node of no graph."""
        rows = x.transpose(1, 2).flatten(0, 1)
        return _Rows.apply(rows, self.of_packed, self.owned, self.of_padded, self.real.flatten())


class _Rows(torch.autograd.Function):
    """Rows from where ``index`` says, 0 where ``there`` does not hold; of two such that undo each other, so that each is the
    other's derivative, without atomics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, there: Tensor, back: Tensor, there_back: Tensor
    ) -> Tensor:
        ctx.save_for_backward(back, there_back, index, there)
        return torch.where(there[:, None, None], x.index_select(0, index), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Rows.apply(grad, *ctx.saved_tensors), None, None, None, None
