"""Packed inputs, and attention one graph at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sfiformer import sfi_attention
from sfiformer.flow import flows_from_scores

RAGGED = (5, 0, 1, 9, 5, 2, 0, 13)


class Packed(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    q_friction: Tensor
    k_friction: Tensor
    ptr: Tensor

    def graph(self, place: int) -> Packed:
        start, end = self.ptr[place].item(), self.ptr[place + 1].item()
        return Packed(*(x[start:end] for x in self[:5]), torch.tensor([0, end - start]))

    def to(self, dtype: torch.dtype) -> Packed:
        return Packed(*(x.to(dtype) for x in self[:5]), self.ptr)

    def leaves(self) -> Packed:
        return Packed(*(x.detach().clone().requires_grad_() for x in self[:5]), self.ptr)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to yet holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # the switch that PyTorch has for that
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def margins(tensors, ptr, alpha, potential=False) -> Tensor:
    """By how much the u of one key must change for the active set of a row to change: [nodes, heads], at λ* = 1.

    Within rounding a key is active or not by the last bit of its score, and the gradient has a jump there.
    """
    q, k, _, q_friction, k_friction = (x.detach().double() for x in tensors)
    parts = [torch.zeros_like(q[:0, :, 0])]
    for start, end in pairwise(ptr.tolist()):
        for first in range(start, end, 2048):
            rows, keys = slice(first, min(first + 2048, end)), slice(start, end)
            s, u = (
                torch.einsum("ihd,jhd->ihj", a[rows], b[keys]) / a.shape[-1] ** 0.5
                for a, b in ((q, k), (q_friction, k_friction))
            )
            parts.append(_margins(s, u, alpha, potential))
    return torch.cat(parts)


def _margins(s: Tensor, u: Tensor, alpha: float, potential: bool) -> Tensor:
    """Of rows [..., n]. By bisection for η in logarithms, and from the largest active friction, as η is too coarse."""
    n, log_p = s.shape[-1], s.log_softmax(-1)
    log_c = s.logsumexp(-1, keepdim=True) + (-s).logsumexp(-1, keepdim=True)
    taken = u.log_softmax(-1) + (math.log(n) if potential else log_c - math.log(n))  # log κ f
    log_leak = -log_c - (math.inf if potential else math.log(alpha))

    def flow(level):
        """Σ p (level − κ f)₊ + ε level, of the logarithm of a level."""
        through = (log_p + level + (-(taken - level).clamp(max=0).expm1()).log()).exp().sum(-1, keepdim=True)
        return through + (log_leak + level).exp()

    low, high = taken.amin(-1, keepdim=True) - 800, taken.amax(-1, keepdim=True) + 800
    for _ in range(60):
        eta = (low + high) / 2
        short = flow(eta) < 1
        low, high = torch.where(short, eta, low), torch.where(short, high, eta)
    active = taken <= eta + 1e-12
    last = taken.masked_fill(~active, -math.inf).amax(-1, keepdim=True)
    weights = torch.cat([log_p.masked_fill(~active, -math.inf), log_leak], -1)
    log_level = (1 - flow(last)).log() - weights.logsumexp(-1, keepdim=True)  # η less the largest active κ f
    above = (log_level - taken).exp() + (last - taken).expm1()  # η / κ f − 1
    # η follows an active key by its share of the weights, and a row's only key, which never leaves, by all of it.
    leaves = above / (1 - weights.softmax(-1)[..., :-1]).clamp(min=1e-300)
    return torch.where(active, leaves, taken - eta).nan_to_num(0, posinf=math.inf).amin(-1)


def offsets(sizes) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def packed(
    sizes=RAGGED,
    heads: int = 2,
    width: int = 8,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
    seed: int = 0,
) -> Packed:
    """Normal inputs; scores have about the standard deviation ``spread``."""
    generator = torch.Generator().manual_seed(seed)
    nodes = sum(sizes)

    def draw(last: int) -> Tensor:
        return torch.randn(nodes, heads, last, generator=generator, dtype=torch.float64)

    q, k, qf, kf = (draw(width) * spread**0.5 for _ in range(4))
    v = draw(value_width or width)
    return Packed(*(x.to(dtype) for x in (q, k, v, qf, kf)), offsets(sizes))


def one_by_one(inputs: Packed, lam, alpha=0.1, scaling="absolute", scale=None) -> Tensor:
    """What packed attention means: flows of least energy, graph by graph and head by head."""
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    outs = [inputs.v[:0]]
    for graph, (start, end) in enumerate(pairwise(inputs.ptr.tolist())):
        strength = lam[graph] if isinstance(lam, Tensor) and lam.dim() else lam
        out = torch.empty_like(inputs.v[start:end])
        for head in range(inputs.q.shape[1]):
            q, k, v, qf, kf = (x[start:end, head] for x in inputs[:5])
            z = flows_from_scores(
                q @ k.T * scale, qf @ kf.T * scale, lam=strength, alpha=alpha, scaling=scaling
            )
            out[:, head] = z @ v
        outs.append(out)
    return torch.cat(outs)


def attend(inputs: Packed, **arguments) -> Tensor:
    return sfi_attention(*inputs, **arguments)


def other_last_bits(monkeypatch):
    """In Triton's interpreter every product of matrices is off by about a unit in the last place, another time otherwise."""
    from triton.runtime.interpreter import InterpreterBuilder

    generator, exact = np.random.default_rng(0), InterpreterBuilder.create_dot

    def create_dot(self, a, b, total, *args):
        x = exact(self, a, b, total, *args)
        size = np.abs(a.data).astype(np.float32) @ np.abs(b.data).astype(np.float32)
        x.data += (size * generator.uniform(-1e-7, 1e-7, size.shape)).astype(np.float32)
        return x

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
