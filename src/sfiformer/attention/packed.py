"""Exact sparse-flow attention on packed graphs, in plain PyTorch and, on a CPU, loops: an operator, forward and backward.

Scores are made, solved and forgotten a chunk at a time, so memory is that of one chunk for each thread. For the backward two
numbers a row are kept, η and the pivot of its active set; with them the flows are recomputed without solving (see
`sfiformer.flow.rows`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfiformer.attention import cpu
from sfiformer.attention.blocks import Block, Gradients, flows_and_gradients
from sfiformer.attention.chunks import Chunk, Order, fresh, laid_out
from sfiformer.attention.dropout import kept, kept_entries
from sfiformer.attention.few_flows import FewFlows
from sfiformer.attention.inputs import require_finite, require_values
from sfiformer.attention.spans import Span, for_each_span
from sfiformer.flow.precision import narrowed
from sfiformer.flow.rows import GENTLE, solve
from sfiformer.operators import operator


@operator("sfiformer::packed_attention")
def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    lam: Tensor,
    seed: Tensor,
    alpha: float,
    potential: bool,
    scale: float,
    dropout_p: float,
    max_nodes: int | None,
    check: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [N, heads, width of v], and η and the pivot of each row, [N, heads]; λ is one number a graph."""
    if check:
        require_values(v, ptr, lam, max_nodes)
        require_finite(q=q, k=k, q_friction=q_friction, k_friction=k_friction)
    heads, work = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    inputs = laid_out(q, k, v, q_friction, k_friction)
    whole = (
        fresh(v.shape, v.dtype, ptr, q),
        fresh((*q.shape[:2], 1), work, ptr, q),
        fresh((*q.shape[:2], 1), torch.int64, ptr, q),
    )

    few = FewFlows.of(ptr, lam, q, scale, alpha, potential, dropout_p, int(seed))
    done = frozenset[int]() if few is None else few.attend(inputs, *whole)

    def attend(span: Span) -> None:
        order = Order.of(span.chunks, heads, q.device)
        parts = _gathered(order, inputs, scale)
        parts[2].div_(1 - dropout_p)  # keeps the mean, and is smaller than the flows
        found = [parts[0].new_empty((len(parts[0]), x.shape[2]), dtype=x.dtype) for x in whole]
        for index, chunk in enumerate(span.chunks, span.first):
            blocks = [order.block(chunk, x) for x in parts]
            problem = _problem(chunk, blocks, lam, alpha, potential)
            z, eta, pivot = _flows(problem, dropout_p, int(seed) + index, check)
            for here, rows in zip(found, (z @ blocks[2], eta, pivot), strict=True):
                order.block(chunk, here)[:, chunk.rows] = rows
        for packed, here in zip(whole, found, strict=True):
            order.put(packed, here)

    for_each_span(attend, ptr, q, v, done)
    out, etas, pivots = whole
    return out, etas.squeeze(-1), pivots.squeeze(-1)


@operator("sfiformer::packed_attention_backward")
def packed_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    lam: Tensor,
    seed: Tensor,
    etas: Tensor,
    pivots: Tensor,
    alpha: float,
    potential: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, q_friction, k_friction and lam, by the closed form of `sfiformer.flow.exact`."""
    inputs, heads = laid_out(q, k, v, q_friction, k_friction), q.shape[1]
    rows_of = laid_out(etas.unsqueeze(-1), pivots.unsqueeze(-1), grad_out)
    of_inputs = [fresh(x.shape, x.dtype, ptr, q) for x in inputs]
    grad_lam = torch.zeros_like(lam)
    few, done = FewFlows.of(ptr, lam, q, scale, alpha, potential, dropout_p, int(seed)), frozenset[int]()
    if few is not None:
        solved = few.solved(pivots)
        solved.differentiate(grad_out, inputs, etas, of_inputs, grad_lam)
        done = solved.few.numbers

    def attend(span: Span) -> None:
        order = Order.of(span.chunks, heads, q.device)
        parts = _gathered(order, inputs, scale)
        eta_here, pivot_here, grad_here = (order.gather(x) for x in rows_of)
        grad_here = grad_here.to(parts[0].dtype).div_(1 - dropout_p)
        grads = [torch.empty_like(x) for x in parts]
        for index, chunk in enumerate(span.chunks, span.first):
            blocks, grad_blocks = ([order.block(chunk, x) for x in whole] for whole in (parts, grads))
            problem = _problem(chunk, blocks, lam, alpha, potential)
            eta, pivot, grad = (
                order.block(chunk, x)[:, chunk.rows] for x in (eta_here, pivot_here, grad_here)
            )
            g = grad @ blocks[2].mT
            z, gradients = _flows_again(problem, eta, pivot, g, dropout_p, int(seed) + index)
            more = int(chunk.rows.start > 0)  # 0 overwrites: these rows are the first that reach the keys
            grad_blocks[2].baddbmm_(z.mT, grad, beta=more)
            for query, key, grad_scores in ((0, 1, gradients.s), (3, 4, gradients.u)):
                grad_blocks[query][:, chunk.rows].baddbmm_(grad_scores, blocks[key], beta=0, alpha=scale)
                grad_blocks[key].baddbmm_(grad_scores.mT, blocks[query][:, chunk.rows], beta=more)
            at, zero = (x.view(len(chunk.graphs), -1).sum(-1) for x in gradients[2:])
            chunk_lam = lam[chunk.graphs]
            grad_lam[chunk.graphs] += torch.where(chunk_lam > 0, at / chunk_lam, zero).to(lam.dtype)
        for packed, here in zip(of_inputs, grads, strict=True):
            order.put(packed, narrowed(here, packed.dtype))

    for_each_span(attend, ptr, q, v, done)
    of_q, of_k, of_v, of_q_friction, of_k_friction = of_inputs
    return of_q, of_k, of_v, of_q_friction, of_k_friction, grad_lam


@packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    work = torch.promote_types(q.dtype, torch.float32)
    return (
        v.new_empty(v.shape),
        q.new_empty(q.shape[:2], dtype=work),
        q.new_empty(q.shape[:2], dtype=torch.int64),
    )


@packed_attention_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    lam: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    return *(x.new_empty(x.shape) for x in (q, k, v, q_friction, k_friction)), torch.empty_like(lam)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, alpha, potential, scale, dropout_p, _, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.options = (alpha, potential, scale, dropout_p)


def _backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *of_inputs, of_lam = packed_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *of_inputs, None, of_lam, *[None] * 7


packed_attention.register_autograd(_backward, setup_context=_setup_context)


def _gathered(order: Order, inputs: tuple[Tensor, ...], scale: float) -> list[Tensor]:
    """q, k, v, q̃ and k̃ by chunk, [N · heads, width]; queries are scaled."""
    work = torch.promote_types(inputs[0].dtype, torch.float32)
    parts = [order.gather(x).to(work) for x in inputs]
    for query in (0, 3):
        parts[query].mul_(scale)
    return parts


LOOPED = GENTLE - 1  # in place of pivots, in rows that the loops for a CPU have solved


class _Problem(NamedTuple):
    """Scores s, u [b · heads, rows, n] and the settings of their flows."""

    s: Tensor
    u: Tensor
    lam: Tensor  # [b · heads]
    alpha: float
    potential: bool

    def block(self, check: bool) -> Block:
        s, u, lam, alpha, potential = self
        return Block.of(s, u, lam.view(-1, 1, 1), alpha, potential, check)


def _problem(chunk: Chunk, parts: list[Tensor], lam: Tensor, alpha: float, potential: bool) -> _Problem:
    q, k, _, q_friction, k_friction = parts
    s = q[:, chunk.rows] @ k.mT
    u = q_friction[:, chunk.rows] @ k_friction.mT
    kind = torch.finfo(s.dtype)  # in which λ and α stay numbers, whatever they were in float64
    lam = lam[chunk.graphs].to(s.dtype).clamp_(max=kind.max).repeat_interleave(len(s) // len(chunk.graphs))
    alpha = math.inf if alpha > kind.max else max(alpha, kind.tiny)
    return _Problem(s, u, lam, alpha, potential)


def _flows(problem: _Problem, dropout_p: float, seed: int, check: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Flows after dropout, η and pivots."""
    if cpu.usable(problem.s):
        keep = kept_entries(problem.s.numel(), dropout_p, seed) if dropout_p else None
        solved = cpu.solve(*problem, keep)
        if solved is not None:
            return *solved, torch.full_like(solved[1], LOOPED, dtype=torch.int64)
    block = problem.block(check)
    z, eta, pivot = solve(block.rows, block.scales, block.logs)
    if dropout_p:
        z.mul_(kept(z, dropout_p, seed))
    return z, eta, pivot


def _flows_again(
    problem: _Problem, eta: Tensor, pivot: Tensor, g: Tensor, dropout_p: float, seed: int
) -> tuple[Tensor, Gradients]:
    """The same flows, and the gradients that g, of what dropout left of them, leads to."""
    looped = bool((pivot == LOOPED).all())
    if looped and bool((problem.lam > 0).all()):
        keep = kept_entries(g.numel(), dropout_p, seed) if dropout_p else None
        of_log_kappa = cpu.gradients(*problem, keep, eta, g)
        return g, Gradients(problem.s, problem.u, of_log_kappa, torch.zeros_like(of_log_kappa))
    if dropout_p:
        mask = kept(g, dropout_p, seed)
        g.mul_(mask)
    z, gradients = flows_and_gradients(problem.block(check=False), eta, pivot.clamp(min=GENTLE), g)
    if dropout_p:
        z.mul_(mask)
    return z, gradients
