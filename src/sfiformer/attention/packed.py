"""Exact sparse-flow attention on packed graphs, in plain PyTorch: a custom operator, forward and backward.

Scores are made, solved and forgotten a chunk at a time, so memory is that of one chunk. For the backward two numbers a row
are kept, η and the pivot of its active set; with them the flows are recomputed without solving (see `sfiformer.flow.rows`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfiformer.attention.blocks import Block, flows_and_gradients
from sfiformer.attention.chunks import Chunk, chunks
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
    work = torch.promote_types(q.dtype, torch.float32)
    out, etas, pivots = torch.zeros_like(v), q.new_zeros(q.shape[:2], dtype=work), ptr.new_zeros(q.shape[:2])
    with torch.autocast(q.device.type, enabled=False):
        for index, chunk in enumerate(chunks(ptr, q.shape[1])):
            nodes = chunk.nodes(q.device)
            parts = [chunk.gather(x, nodes, work) for x in (q, k, v, q_friction, k_friction)]
            block = _block(chunk, parts, lam, alpha, potential, scale, check)
            z, eta, pivot = solve(block.rows, block.log_kappa, block.log_eps)
            values = parts[2]
            if dropout_p:
                z.mul_(_kept(z, dropout_p, int(seed) + index))
                values = values / (1 - dropout_p)  # keeps the mean, and is smaller than the flows
            chunk.write(z @ values, nodes, out)
            chunk.write(eta, nodes, etas.unsqueeze(-1))
            chunk.write(pivot, nodes, pivots.unsqueeze(-1))
    return out, etas, pivots


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
    inputs = (q, k, v, q_friction, k_friction)
    work = torch.promote_types(q.dtype, torch.float32)
    grads = [torch.zeros_like(x, dtype=work) for x in inputs]
    grad_lam = torch.zeros_like(lam)
    with torch.autocast(q.device.type, enabled=False):
        for index, chunk in enumerate(chunks(ptr, q.shape[1])):
            nodes = chunk.nodes(q.device)
            parts = [chunk.gather(x, nodes, work) for x in inputs]
            block = _block(chunk, parts, lam, alpha, potential, scale, check=False)
            eta, pivot = (
                chunk.gather(x.unsqueeze(-1), nodes, x.dtype)[:, chunk.rows] for x in (etas, pivots)
            )
            grad = chunk.gather(grad_out, nodes, work)[:, chunk.rows]
            if dropout_p:
                grad = grad / (1 - dropout_p)
            g = grad @ parts[2].mT
            if dropout_p:
                kept = _kept(g, dropout_p, int(seed) + index)
                g.mul_(kept)
            z, gradients = flows_and_gradients(block, eta, pivot, g)
            if dropout_p:
                z.mul_(kept)

            chunk.add(z.mT @ grad, nodes, grads[2])
            for query, key, grad_scores in ((0, 1, gradients.s), (3, 4, gradients.u)):
                chunk.write(grad_scores @ (parts[key] * scale), nodes, grads[query])
                chunk.add(grad_scores.mT @ (parts[query][:, chunk.rows] * scale), nodes, grads[key])
            at, zero = (x.view(len(chunk.graphs), -1).sum(-1) for x in gradients[2:])
            chunk_lam = lam[chunk.graphs]
            grad_lam[chunk.graphs] += torch.where(chunk_lam > 0, at / chunk_lam, zero).to(lam.dtype)
    of_q, of_k, of_v, of_q_friction, of_k_friction = (
        g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)
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


def _block(
    chunk: Chunk, parts: list[Tensor], lam: Tensor, alpha: float, potential: bool, scale: float, check: bool
) -> Block:
    q, k, _, q_friction, k_friction = parts
    s = (q[:, chunk.rows] * scale) @ k.mT  # [b · heads, rows, n]
    u = (q_friction[:, chunk.rows] * scale) @ k_friction.mT
    log_lam = lam[chunk.graphs].double().log()
    log_lam = log_lam.repeat_interleave(len(s) // len(chunk.graphs)).view(-1, 1, 1)
    return Block.of(s, u, log_lam, alpha, potential, check)


def _kept(like: Tensor, dropout_p: float, seed: int) -> Tensor:
    """Dropout's mask for one chunk, 0 and 1: the same in forward and backward."""
    seed %= 1 << 62
    if like.device.type != "cpu":
        generator = torch.Generator(like.device).manual_seed(seed)
        keep = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
        return keep.ge_(dropout_p)
    # A flow takes 16 random bits: p is met to 1/65536, at a quarter of the time that torch.rand takes.
    bits = np.random.SFC64(seed).random_raw(-(-like.numel() // 4)).view(np.int16)[: like.numel()]
    keep = torch.from_numpy(bits).view(like.shape).to(like.dtype)
    return keep.ge_(round(dropout_p * 2**16) - 2**15)
