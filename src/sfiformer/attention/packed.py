"""Exact sparse-flow attention on packed graphs, in plain PyTorch: a custom operator, forward and backward.

Scores are made, solved and forgotten a chunk at a time, so memory is that of one chunk. For the backward one number a row is
kept, the pivot of its active set; with it the flows are recomputed without solving (see `sfiformer.flow.rows`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfiformer.attention.chunks import Chunk, chunks
from sfiformer.flow.exact import saturate
from sfiformer.flow.rows import Flows, Rows, evaluate, is_plain, log_sum, solve


class Options(NamedTuple):
    """What a call fixes for all its chunks."""

    alpha: float
    potential: bool  # friction relative to the row's potential, hard constraint
    scale: float  # of the scores
    dropout_p: float
    seed: int
    check: bool


class Block(NamedTuple):
    """The scores of a chunk, [b · heads, rows, n], and the scalings of its flow problems, float64 [b · heads, rows, 1]."""

    rows: Rows
    log_friction: Tensor  # log κ / λ, less the normaliser of u
    log_lam: Tensor
    log_eps: Tensor

    @property
    def log_kappa(self) -> Tensor:
        return self.log_lam + self.log_friction


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
    check: bool,
) -> tuple[Tensor, Tensor]:
    """Attention [N, heads, width of v] and the pivots [N, heads]; λ is one number a graph."""
    options = Options(alpha, potential, scale, dropout_p, int(seed), check)
    out, pivots = torch.zeros_like(v), ptr.new_zeros(q.shape[:2])
    work = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        for index, chunk in enumerate(chunks(ptr, q.shape[1])):
            nodes = chunk.nodes(q.device)
            parts = [chunk.gather(x, nodes, work) for x in (q, k, v, q_friction, k_friction)]
            block = _scores(chunk, parts, lam, options)
            pivot, flows = solve(block.rows, block.log_kappa, block.log_eps)
            z = flows.z
            if dropout_p:
                z = z.mul_(_kept(z, options, index))
            _write(chunk, nodes, z @ parts[2], out)
            _write(chunk, nodes, pivot, pivots.unsqueeze(-1))
    return out, pivots


@packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), q.new_empty(q.shape[:2], dtype=torch.int64)


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
    pivots: Tensor,
    alpha: float,
    potential: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, q_friction, k_friction and lam, by the closed form of `sfiformer.flow.exact`."""
    options = Options(alpha, potential, scale, dropout_p, int(seed), check=False)
    inputs = (q, k, v, q_friction, k_friction)
    work = torch.promote_types(q.dtype, torch.float32)
    grads = [torch.zeros_like(x, dtype=work) for x in inputs]
    grad_lam = torch.zeros_like(lam)
    with torch.autocast(q.device.type, enabled=False):
        for index, chunk in enumerate(chunks(ptr, q.shape[1])):
            nodes = chunk.nodes(q.device)
            parts = [chunk.gather(x, nodes, work) for x in inputs]
            block = _scores(chunk, parts, lam, options)
            pivot = chunk.gather(pivots.unsqueeze(-1), nodes, torch.int64)[:, chunk.rows]
            grad = chunk.gather(grad_out, nodes, work)[:, chunk.rows]
            kept = _kept(block.rows.s, options, index) if dropout_p else None
            z, grad_s, grad_u, grad_log_kappa, grad_zero = _chunk_gradients(
                block, pivot, grad, parts[2], kept, potential
            )
            by_graph = grad_log_kappa.view(len(chunk.graphs), -1).sum(-1)
            chunk_lam = lam[chunk.graphs]
            grad_lam[chunk.graphs] += torch.where(
                chunk_lam > 0, by_graph / chunk_lam, grad_zero.view(len(chunk.graphs), -1).sum(-1)
            ).to(lam.dtype)
            for query, key, grad_score in ((0, 1, grad_s), (3, 4, grad_u)):
                grad_score.mul_(scale)
                _write(chunk, nodes, grad_score @ parts[key], grads[query])
                _add(chunk, nodes, grad_score.mT @ parts[query][:, chunk.rows], grads[key])
            _add(chunk, nodes, z.mT @ grad, grads[2])
    return (*(g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)), grad_lam)  # type: ignore[return-value]


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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, alpha, potential, scale, dropout_p, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = (alpha, potential, scale, dropout_p)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, q_friction, k_friction, lam, *rest = packed_attention_backward(
        grad_out, *ctx.saved_tensors, *ctx.options
    )
    del rest
    return q, k, v, q_friction, k_friction, None, lam, None, None, None, None, None, None


packed_attention.register_autograd(_backward, setup_context=_setup_context)


def _scores(chunk: Chunk, parts: list[Tensor], lam: Tensor, options: Options) -> Block:
    """Scores and scalings of one chunk. Absolute: κ = λC, ε = 1/(αC), log C = lse(s) + lse(−s). Potential: κ = λ*n, ε = 0."""
    q, k, _, q_friction, k_friction = parts
    s = (q[:, chunk.rows] * options.scale) @ k.mT  # [b · heads, rows, n]
    u = (q_friction[:, chunk.rows] * options.scale) @ k_friction.mT
    rows = Rows.of(s, u)
    low = s.amin(-1, keepdim=True)
    if options.check:
        _require_finite(low + rows.s_max, rows.u_min + rows.u_max)
    log_lam = lam[chunk.graphs].double().log()
    log_lam = log_lam.repeat_interleave(len(s) // len(chunk.graphs)).view(-1, 1, 1).expand_as(rows.lse_s)
    log_sum_u = log_sum(rows.exp_u, rows.u_max)
    if options.potential:
        return Block(
            rows, math.log(chunk.size) - log_sum_u, log_lam, torch.full_like(rows.lse_s, -math.inf)
        )
    log_c = rows.lse_s + log_sum((low - s).exp_(), -low)
    return Block(rows, log_c - log_sum_u, log_lam, -math.log(options.alpha) - log_c)


def _chunk_gradients(
    block: Block, pivot: Tensor, grad_out: Tensor, v: Tensor, kept: Tensor | None, potential: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """z (with dropout), ∂L/∂s, ∂L/∂u [b · heads, rows, n]; ∂L/∂log κ a row, and ∂L/∂λ a row where λ = 0."""
    rows, dtype = block.rows, grad_out.dtype
    flows = evaluate(rows, pivot, block.log_kappa, block.log_eps, stable=False)
    plain = bool(is_plain(flows).all())
    if not plain:  # some rows range too widely: all of the chunk in float64 and logarithms
        rows = Rows(*(field.double() for field in rows))
        flows = evaluate(rows, pivot, block.log_kappa, block.log_eps, stable=True)
    dry = flows.level <= 0
    z = flows.z
    if dry.any():
        z.mul_(~dry)
        flows.weight.mul_(~dry)
    g = grad_out @ v.mT
    if kept is not None:
        g.mul_(kept)
    g = g.to(z.dtype)

    share = flows.weight / flows.total
    g_top = g.gather(-1, share.argmax(-1, keepdim=True))
    centred = g.sub_(g_top)
    offset = (share * centred).sum(-1, keepdim=True) - flows.leak / flows.total * g_top
    mean = g_top + offset
    centred.sub_(offset)
    pull = (centred * z).sum(-1, keepdim=True)
    grad_log_kappa = pull - mean * (1 - z.sum(-1, keepdim=True))
    grad_log_kappa.masked_fill_(dry, 0)

    gated = _gated(rows, flows, block.log_kappa, plain)
    grad_u = gated.mul_(centred).neg_()
    friction = rows.exp_u / rows.exp_u.sum(-1, keepdim=True)
    grad_u.addcmul_(friction, grad_log_kappa, value=-1)
    grad_s = centred * z
    if potential:
        grad_s.addcmul_(rows.exp_s / rows.exp_s.sum(-1, keepdim=True), pull, value=-1)
    else:
        resistance = (rows.s.amin(-1, keepdim=True) - rows.s).exp_()
        grad_s.addcmul_(resistance.div_(resistance.sum(-1, keepdim=True)), pull, value=-1)
    at_zero = torch.zeros_like(grad_log_kappa)
    if bool(block.log_lam.isneginf().any()):
        per_lam = (block.log_friction + rows.u + rows.s - rows.lse_s).clamp_(max=700).exp_()
        at_zero = -(per_lam * centred).sum(-1, keepdim=True)
    if kept is not None:
        z = z * kept
    return z.to(dtype), saturate(grad_s, dtype), saturate(grad_u, dtype), grad_log_kappa, at_zero


def _gated(rows: Rows, flows: Flows, log_kappa: Tensor, plain: bool) -> Tensor:
    """κ f_j p_j on A: what friction takes from each flow, η p_j − z_j."""
    if plain:
        eta = flows.log_scale.exp().to(flows.level.dtype) + flows.level
        return (flows.weight * eta).sub_(flows.z)
    exponent = (log_kappa + rows.u + rows.s - rows.lse_s).clamp_(max=700)
    return exponent.exp_().mul_(flows.weight > 0)


def _kept(like: Tensor, options: Options, index: int) -> Tensor:
    """Dropout's mask for one chunk, scaled to keep the mean: the same in forward and backward."""
    generator = torch.Generator(like.device).manual_seed((options.seed + index) % (1 << 62))
    keep = torch.rand(like.shape, generator=generator, device=like.device) >= options.dropout_p
    return keep.to(like.dtype).div_(1 - options.dropout_p)


def _write(chunk: Chunk, nodes: Tensor | slice, block: Tensor, packed: Tensor) -> None:
    """The rows of a chunk into their places."""
    if chunk.rows == slice(0, chunk.size):
        chunk.scatter(block, nodes, packed)
    else:  # one large graph
        start = chunk.starts[0]
        packed[start + chunk.rows.start : start + chunk.rows.stop] = block.transpose(0, 1).to(packed.dtype)


def _add(chunk: Chunk, nodes: Tensor | slice, block: Tensor, packed: Tensor) -> None:
    """What the rows of a chunk add to all nodes of their graphs."""
    if isinstance(nodes, slice):
        packed[nodes] += block.transpose(0, 1)
    else:
        chunk.scatter(block, nodes, packed)


def _require_finite(s: Tensor, u: Tensor) -> None:
    for name, argument, row in (("s", "q and k", s), ("u", "q_friction and k_friction", u)):
        if not bool(row.isfinite().all()):
            raise ValueError(
                f"the scores {name} of {argument} must be finite, but some are not: look for NaN, inf or very large numbers there"
            )
