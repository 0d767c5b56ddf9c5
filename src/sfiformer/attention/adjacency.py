"""Hard-wired adjacency: Ã = D^{-1/2} (A + I) D^{-1/2}."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Adjacency(NamedTuple):
    """Ã as weighted edges, self-loops apart: Ã_ij for the edges j → i, and Ã_ii."""

    source: Tensor  # [E]
    target: Tensor  # [E]
    weight: Tensor  # [E] 0 for a self-loop and for all but one of parallel edges
    loop: Tensor  # [N]

    @classmethod
    def of(cls, edge_index: Tensor, nodes: int, dtype: torch.dtype | None = None) -> Adjacency:
        """From edges [2, E], source above target, as PyG has them.

        Degrees are in-degrees of A + I; parallel edges count once, and self-loops are replaced by I. No step depends on
        values, so nothing waits for a device.
        """
        key, order = (edge_index[1] * nodes + edge_index[0]).sort()
        source, target = edge_index[0].index_select(0, order), edge_index[1].index_select(0, order)
        first = torch.ones_like(key, dtype=torch.bool)
        first[1:] = key[1:] != key[:-1]
        counts = (first & (source != target)).to(dtype or torch.get_default_dtype())
        degree = counts.new_ones(nodes).index_add(0, target, counts)
        root = degree.rsqrt()
        weight = counts * root.index_select(0, source) * root.index_select(0, target)
        return cls(source, target, weight, 1 / degree)

    def matmul(self, x: Tensor) -> Tensor:
        """Ã x, [N, d]."""
        messages = x.index_select(0, self.source) * self.weight.to(x.dtype).unsqueeze(-1)
        return (x * self.loop.to(x.dtype).unsqueeze(-1)).index_add(0, self.target, messages)
