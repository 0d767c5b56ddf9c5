"""Dense attention on packed graphs on a CPU: an operator, forward and backward, as `sfiformer.attention.packed` is for flows.

Scores are made, softened and forgotten a chunk at a time, in the backward again: memory is that of one chunk for each thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfiformer.attention import cpu
from sfiformer.attention.chunks import Order, fresh, laid_out
from sfiformer.attention.dropout import kept, kept_entries
from sfiformer.attention.few import Few, in_single, put
from sfiformer.attention.inputs import require_finite, require_ptr
from sfiformer.attention.spans import Span, for_each_span
from sfiformer.flow.precision import narrowed
from sfiformer.operators import operator


@operator("sfiformer::dense_attention")
def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor,
    seed: Tensor,
    scale: float,
    dropout_p: float,
    max_nodes: int | None,
    check: bool,
) -> Tensor:
    """Σ_j softmax_j(q_i·k_j · scale) v_j, [N, heads, width of v]."""
    if check:
        require_ptr(ptr, len(q), max_nodes)
        require_finite(q=q, k=k, v=v)
    inputs, out = laid_out(q, k, v), fresh(v.shape, v.dtype, ptr, v)
    few, done = Few.of(ptr, q, dropout_p, int(seed)), frozenset[int]()
    if few is not None:
        _attend_to_few(few, inputs, scale, out)
        done = few.numbers

    def attend(span: Span) -> None:
        order = Order.of(span.chunks, q.shape[1], q.device)
        parts = _gathered(order, inputs, scale)
        parts[2].div_(1 - dropout_p)  # keeps the mean
        found = torch.empty_like(parts[2])
        for index, chunk in enumerate(span.chunks, span.first):
            query, key, value = (order.block(chunk, x) for x in parts)
            z = _flows(query[:, chunk.rows] @ key.mT, dropout_p, int(seed) + index)
            order.block(chunk, found)[:, chunk.rows] = z @ value
        order.put(out, found)

    for_each_span(attend, ptr, q, v, done)
    return out


@operator("sfiformer::dense_attention_backward")
def dense_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ptr: Tensor,
    seed: Tensor,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: with p = softmax(s) and g = ∂L/∂p, ∂L/∂s_j = p_j (g_j − Σ_i p_i g_i)."""
    given = laid_out(q, k, v, grad_out)
    of_inputs = (
        fresh(q.shape, q.dtype, ptr, q),
        fresh(k.shape, k.dtype, ptr, k),
        fresh(v.shape, v.dtype, ptr, v),
    )
    few, done = Few.of(ptr, q, dropout_p, int(seed)), frozenset[int]()
    if few is not None:
        _differentiate_few(few, given, scale, of_inputs)
        done = few.numbers

    def attend(span: Span) -> None:
        order = Order.of(span.chunks, q.shape[1], q.device)
        parts = _gathered(order, given, scale)
        parts[3].div_(1 - dropout_p)
        grads = [torch.empty_like(x) for x in parts[:3]]
        for index, chunk in enumerate(span.chunks, span.first):
            query, key, value, grad = (order.block(chunk, x) for x in parts)
            of_query, of_key, of_value = (order.block(chunk, x) for x in grads)
            query, grad = query[:, chunk.rows], grad[:, chunk.rows]
            z, of_scores = _flows_again(query @ key.mT, grad @ value.mT, dropout_p, int(seed) + index)
            more = int(chunk.rows.start > 0)  # 0 overwrites: these rows are the first that reach the keys
            of_value.baddbmm_(z.mT, grad, beta=more)
            of_key.baddbmm_(of_scores.mT, query, beta=more)
            of_query[:, chunk.rows].baddbmm_(of_scores, key, beta=0, alpha=scale)
        for packed, here in zip(of_inputs, grads, strict=True):
            order.put(packed, narrowed(here, packed.dtype))

    for_each_span(attend, ptr, q, v, done)
    return of_inputs


def _attend_to_few(few: Few, inputs: Sequence[Tensor], scale: float, out: Tensor) -> None:
    """Put what graphs of few nodes attend to there."""
    q, k, v = inputs
    arrays, found = [few.array(q), few.array(k), few.array(v, grown=True)], in_single(out)
    loop = cpu.compiled().attend_densely
    few.loop(loop, *arrays, few.places, np.float32(scale), few.keep, found.numpy())
    put(found, out)


def _differentiate_few(few: Few, given: Sequence[Tensor], scale: float, of_inputs: Sequence[Tensor]) -> None:
    """Put their gradients there."""
    *inputs, grad_out = given
    arrays, found = [few.array(x) for x in inputs], [in_single(x) for x in of_inputs]
    settings = few.places, np.float32(scale), few.keep, few.array(grad_out, grown=True)
    few.loop(cpu.compiled().attend_densely_backward, *arrays, *settings, *(x.numpy() for x in found))
    for here, x in zip(found, of_inputs, strict=True):
        put(narrowed(here, x.dtype), x)


def _gathered(order: Order, inputs: tuple[Tensor, ...], scale: float) -> list[Tensor]:
    """Queries, scaled, and others by chunk, [M · heads, width] each."""
    work = torch.promote_types(inputs[0].dtype, torch.float32)
    parts = [order.gather(x).to(work) for x in inputs]
    parts[0].mul_(scale)
    return parts


def _flows(s: Tensor, dropout_p: float, seed: int) -> Tensor:
    """What dropout leaves of softmax(s); in place of s where it can be."""
    if cpu.usable(s):
        cpu.soften(s, kept_entries(s.numel(), dropout_p, seed) if dropout_p else None)
        return s
    z = s.softmax(-1)
    return z.mul_(kept(z, dropout_p, seed)) if dropout_p else z


def _flows_again(s: Tensor, g: Tensor, dropout_p: float, seed: int) -> tuple[Tensor, Tensor]:
    """The same, and ∂L/∂s from g, the gradient of what dropout left of it; in place of g and s where they can be."""
    if cpu.usable(s):
        cpu.soften_gradients(s, kept_entries(s.numel(), dropout_p, seed) if dropout_p else None, g)
        return g, s
    z = p = s.softmax(-1)
    if dropout_p:
        mask = kept(p, dropout_p, seed)
        z, g = p * mask, g.mul_(mask)
    return z, g.sub_((p * g).sum(-1, keepdim=True)).mul_(p)


@dense_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    return v.new_empty(v.shape)


@dense_attention_backward.register_fake
def _(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, scale, dropout_p, _, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = (scale, dropout_p)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return *dense_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options), *[None] * 6


dense_attention.register_autograd(_backward, setup_context=_setup_context)
