"""GCN with edges: message passing by sums of rectified messages."""

from torch import Tensor, nn
from torch.nn import functional as F

from sfiformer.attention import EdgeOrder
from sfiformer.attention.edges import segment_sum
from sfiformer.attention.widths import linear, resized
from sfiformer.nn.norms import BatchNorm


class EdgeGCN(nn.Module):
    """Graph convolution with edge states, the layer of GCN+ (Luo, Shi and Wu, 2025), on edges j → i.

        x̂_i = Σ_j relu(A x_j + b + e_ij)
        x_i ← x_i + dropout(act(BatchNorm(x̂_i)))      (without x_i, for residual=False)

    These are the sums that GCN+ was run with, but for b, which it adds to the sum, where the norm removes it; the formula in
    its paper has degrees and a node's own term, and no rectifier. Edge states stay as they are.

    Args:
        dim: width d of nodes and edges.
        dropout, activation, residual: as above.
    """

    def __init__(
        self, dim: int, *, dropout: float = 0.0, activation: str = "relu", residual: bool = True
    ) -> None:
        super().__init__()
        self.dim, self.dropout, self.activation, self.residual = dim, dropout, activation, residual
        self.projection = nn.Linear(dim, dim)  # A and b
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
    ) -> tuple[Tensor, Tensor]:
        """x [N, d], e [E, d], edge_index [2, E], its order if known → new x, and e.

        In a padded batch real_nodes says how many of the rows are real (`Partition`).
        """
        if order is None:
            order = EdgeOrder.of(edge_index, x.size(0))
        sent = resized(linear(x, self.projection), self.dim)
        messages = F.relu(order.at_source(sent) + e.to(sent.dtype))  # [E, d]
        x_hat = segment_sum(messages, order.target_ptr, order.target, order.by_target)
        old = x if self.residual else None
        x = self.norm(x_hat, rows=real_nodes, activation=self.activation, dropout=self.dropout, residual=old)
        return x, e

    def extra_repr(self) -> str:
        return f"{self.dim}, activation={self.activation}, dropout={self.dropout}, residual={self.residual}"
