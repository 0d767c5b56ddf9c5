"""GCN with edge states: message passing with weights that the degrees give."""

import torch
from torch import Tensor, nn

from sfiformer.attention import Adjacency, EdgeOrder
from sfiformer.attention.edges import segment_sum
from sfiformer.attention.widths import linear
from sfiformer.nn.norms import BatchNorm


class EdgeGCN(nn.Module):
    """Graph convolution (Kipf and Welling, 2017) with edge states, a norm and a residual (Luo et al., 2025), on edges j → i.

        x̂_i = Σ_j Ã_ij (A x_j + C e_ij) + b ,     Ã = D^{-1/2} (A + I) D^{-1/2} ,  e_ii = 0
        x_i ← x_i + dropout(act(BatchNorm(x̂_i)))      (without x_i, for residual=False)

    Edge states stay as they are. Parallel edges count once, and edges from a node to itself not at all: all nodes have one.

    Args:
        dim: width d of nodes and edges.
        dropout, activation, residual: as above.
    """

    def __init__(
        self, dim: int, *, dropout: float = 0.0, activation: str = "relu", residual: bool = True
    ) -> None:
        super().__init__()
        self.dim, self.dropout, self.activation, self.residual = dim, dropout, activation, residual
        self.projection = nn.Linear(
            2 * dim, dim
        )  # A and C, side by side: they are applied to sums, in one product
        self.norm = BatchNorm(dim)

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        edge_index: Tensor,
        distance: Tensor | None = None,
        order: EdgeOrder | None = None,
        real_nodes: Tensor | None = None,
        real_edges: Tensor | None = None,
        adjacency: Adjacency | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [N, d], e [E, d], edge_index [2, E], its order and Ã if known → new x, and e.

        In a padded batch real_nodes says how many of the rows are real (`Partition`).
        """
        if adjacency is None:
            adjacency = Adjacency.of(edge_index, x.size(0), x.dtype, order=order)
        order = adjacency.order
        weighed = e * adjacency.weight.to(e.dtype).unsqueeze(1)
        along = segment_sum(weighed, order.target_ptr, order.target, order.by_target)
        sums = torch.cat([adjacency.matmul(x), along.to(x.dtype)], dim=1)  # [N, 2d]
        x_hat = linear(sums, self.projection)[:, : self.dim]
        old = x if self.residual else None
        return self.norm(
            x_hat, rows=real_nodes, activation=self.activation, dropout=self.dropout, residual=old
        ), e

    def extra_repr(self) -> str:
        return f"{self.dim}, activation={self.activation}, dropout={self.dropout}, residual={self.residual}"
