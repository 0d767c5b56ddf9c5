"""Packed inputs, and attention one graph at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

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


def margins(tensors, ptr, alpha) -> Tensor:
    """How far the threshold μ of each row is from the nearest friction λ f, relative to μ: [nodes, heads], λ = 1/n.

    At a margin within rounding a key is active or not by the last bit of its score, and the gradient has a jump there.
    """
    q, k, _, q_friction, k_friction = (x.detach().double() for x in tensors)
    parts = []
    for start, end in pairwise(ptr.tolist()):
        if start == end:
            continue
        here = slice(start, end)
        s, u = (
            torch.einsum("ihd,jhd->ihj", a[here], b[here]) / a.shape[-1] ** 0.5
            for a, b in ((q, k), (q_friction, k_friction))
        )
        r, cost = (-s).softmax(-1), u.softmax(-1) / (end - start)
        low = torch.zeros_like(s[..., :1])
        high = low + 2
        for _ in range(100):
            mu = (low + high) / 2
            short = ((mu - cost).relu() / r).sum(-1, keepdim=True) + mu / alpha < 1
            low, high = torch.where(short, mu, low), torch.where(short, high, mu)
        parts.append(((mu - cost).abs() / mu).amin(-1))
    return torch.cat(parts)


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
