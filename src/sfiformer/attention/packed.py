"""Exact sparse-flow attention on packed graphs, in plain PyTorch: a custom operator, forward and backward.

Scores are made, solved and forgotten a chunk at a time, so memory is that of one chunk. For the backward two numbers a row
are kept, η and the pivot of its active set; with them the flows are recomputed without solving (see `sfiformer.flow.rows`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sfiformer.attention.blocks import Block, flows_and_gradients
from sfiformer.attention.chunks import Chunk, Order, chunks
from sfiformer.attention.dropout import kept
from sfiformer.attention.inputs import require_values
from sfiformer.flow.rows import solve


@torch.library.custom_op("sfiformer::packed_attention", mutates_args=())
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
    heads = q.shape[1]
    all_chunks = list(chunks(ptr, heads))
    order = Order.of(all_chunks, heads, q.device)
    parts = _gathered(order, (q, k, v, q_friction, k_friction), scale)
    parts[2].div_(1 - dropout_p)  # keeps the mean, and is smaller than the flows
    out, etas = torch.empty_like(parts[2]), torch.empty_like(parts[0][:, :1])
    pivots = torch.empty_like(etas, dtype=torch.int64)
    with torch.autocast(q.device.type, enabled=False):
        for index, chunk in enumerate(all_chunks):
            blocks = [chunk.block(x, heads) for x in parts]
            block = _block(chunk, blocks, lam, alpha, potential, check)
            z, eta, pivot = solve(block.rows, block.scales, block.logs)
            if dropout_p:
                z.mul_(kept(z, dropout_p, int(seed) + index))
            for whole, rows in ((out, z @ blocks[2]), (etas, eta), (pivots, pivot)):
                chunk.block(whole, heads)[:, chunk.rows] = rows
    out, etas, pivots = (order.scatter(x, (*q.shape[:2], x.shape[1])) for x in (out, etas, pivots))
    return out.to(v.dtype), etas.squeeze(-1), pivots.squeeze(-1)


@torch.library.custom_op("sfiformer::packed_attention_backward", mutates_args=())
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
    inputs, heads = (q, k, v, q_friction, k_friction), q.shape[1]
    all_chunks = list(chunks(ptr, heads))
    order = Order.of(all_chunks, heads, q.device)
    parts = _gathered(order, inputs, scale)
    etas, pivots, grad_out = (order.gather(x) for x in (etas.unsqueeze(-1), pivots.unsqueeze(-1), grad_out))
    grad_out = grad_out.to(parts[0].dtype).div_(1 - dropout_p)
    grads = [torch.empty_like(x) for x in parts]
    grad_lam = torch.zeros_like(lam)
    with torch.autocast(q.device.type, enabled=False):
        for index, chunk in enumerate(all_chunks):
            blocks, grad_blocks = ([chunk.block(x, heads) for x in whole] for whole in (parts, grads))
            block = _block(chunk, blocks, lam, alpha, potential, check=False)
            eta, pivot, grad = (chunk.block(x, heads)[:, chunk.rows] for x in (etas, pivots, grad_out))
            g = grad @ blocks[2].mT
            if dropout_p:
                mask = kept(g, dropout_p, int(seed) + index)
                g.mul_(mask)
            z, gradients = flows_and_gradients(block, eta, pivot, g)
            if dropout_p:
                z.mul_(mask)

            more = int(chunk.rows.start > 0)  # 0 overwrites: these rows are the first that reach the keys
            grad_blocks[2].baddbmm_(z.mT, grad, beta=more)
            for query, key, grad_scores in ((0, 1, gradients.s), (3, 4, gradients.u)):
                grad_blocks[query][:, chunk.rows].baddbmm_(grad_scores, blocks[key], beta=0, alpha=scale)
                grad_blocks[key].baddbmm_(grad_scores.mT, blocks[query][:, chunk.rows], beta=more)
            at, zero = (x.view(len(chunk.graphs), -1).sum(-1) for x in gradients[2:])
            chunk_lam = lam[chunk.graphs]
            grad_lam[chunk.graphs] += torch.where(chunk_lam > 0, at / chunk_lam, zero).to(lam.dtype)
    of_q, of_k, of_v, of_q_friction, of_k_friction = (
        order.scatter(g, x.shape).to(x.dtype) for g, x in zip(grads, inputs, strict=True)
    )
    return of_q, of_k, of_v, of_q_friction, of_k_friction, grad_lam


@packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    work = torch.promote_types(q.dtype, torch.float32)
    return (
        torch.empty_like(v),
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
    return tuple(torch.empty_like(x) for x in (q, k, v, q_friction, k_friction, lam))


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


def _block(
    chunk: Chunk, parts: list[Tensor], lam: Tensor, alpha: float, potential: bool, check: bool
) -> Block:
    q, k, _, q_friction, k_friction = parts
    s = q[:, chunk.rows] @ k.mT  # [b · heads, rows, n]
    u = q_friction[:, chunk.rows] @ k_friction.mT
    lam = lam[chunk.graphs].to(s.dtype).repeat_interleave(len(s) // len(chunk.graphs)).view(-1, 1, 1)
    return Block.of(s, u, lam, alpha, potential, check)
