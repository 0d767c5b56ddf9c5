"""Hard-wired adjacency: Ã = D^{-1/2} (A + I) D^{-1/2}."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sfiformer.attention.edges import EdgeOrder, neighbour_sum


class Adjacency(NamedTuple):
    """Ã as weighted edges, self-loops apart: Ã_ij for the edges j → i, and Ã_ii."""

    order: EdgeOrder
    weight: Tensor  # [E] 0 for a self-loop and for all but one of parallel edges
    loop: Tensor  # [N]

    @classmethod
    def of(
        cls,
        edge_index: Tensor,
        nodes: int,
        dtype: torch.dtype | None = None,
        *,
        order: EdgeOrder | None = None,
    ) -> Adjacency:
        """From edges [2, E], source above target, as PyG has them, and their order, where it is known.

        Degrees are in-degrees of A + I; parallel edges count once, and self-loops are replaced by I. No step depends on
        values, so nothing waits for a device.
        """
        if order is None:
            order = EdgeOrder.of(edge_index, nodes)
        # bfloat16 would stop counting at 256.
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        # By source, and of one source by target: parallel edges are neighbours.
        pairs = torch.add(order.target, order.source, alpha=nodes).index_select(0, order.by_source)
        others = order.by_source[1:]
        counts = torch.ones_like(order.source, dtype=dtype)
        counts.index_copy_(0, others, (pairs[1:] != pairs[:-1]).to(dtype))
        counts *= order.source != order.target
        # Whole numbers: exact in any order. (Of index_add_ to a single number PyTorch's compiler fails.)
        degree = counts.new_ones(nodes).scatter_add_(0, order.target, counts)
        root = degree.rsqrt()
        weight = counts * root.index_select(0, order.source) * root.index_select(0, order.target)
        return cls(order, weight, 1 / degree)

    def matmul(self, x: Tensor) -> Tensor:
        """Ã x, [N, d]."""
        return neighbour_sum(x, self.weight, self.loop, *self.order)
