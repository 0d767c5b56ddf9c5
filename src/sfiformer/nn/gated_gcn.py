"""GatedGCN: message passing with a gate per edge and channel."""

from torch import Tensor, nn

from sfiformer.attention import EdgeOrder
from sfiformer.attention.widths import by_parts, linear
from sfiformer.nn.distance_gate import distance_gate
from sfiformer.nn.gated_sum import gated_sum
from sfiformer.nn.norms import BatchNorm

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


class GatedGCN(nn.Module):
    """Residual gated graph convolution (Bresson and Laurent, 2017) on edges j → i.

        ê_ij = D x_i + E x_j + C e_ij            η_ij = sigmoid(ê_ij) · g(‖p_i − p_j‖²)
        x̂_i  = A x_i + Σ_j η_ij ⊙ B x_j / (Σ_j η_ij + 1e-6)
        x_i ← x_i + dropout(act(BatchNorm(x̂_i)))     e_ij ← e_ij + dropout(act(BatchNorm(ê_ij)))

    With residual=False x_i and e_ij are not added. With `pe_gate`, g is an MLP 1 → d → 1 with a sigmoid at the end, and p
    the ESLapPE encodings (Wang et al., 2022); without it g = 1.

    Args:
        dim: width d of nodes and edges.
        dropout, activation, residual: as above.
        pe_gate: whether messages are gated by distances of positional encodings.
        update_edges: False leaves e as it is, for a last layer. Its edge norm, which the paper's parameter
            count includes, is then there but frozen: nothing would give it a gradient.
    """

    def __init__(
        self,
        dim: int,
        *,
        dropout: float = 0.0,
        activation: str = "relu",
        residual: bool = True,
        pe_gate: bool = False,
        update_edges: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.dropout, self.activation = dim, dropout, activation
        self.residual, self.update_edges = residual, update_edges
        # A, D, B, E side by side: one product in place of four.
        self.node_projection = nn.Linear(dim, 4 * dim)
        self.edge_projection = nn.Linear(dim, dim)  # C
        self.node_norm = BatchNorm(dim)
        self.edge_norm = BatchNorm(dim).requires_grad_(update_edges)
        self.pe_gate = (
            nn.Sequential(nn.Linear(1, dim), ACTIVATIONS[activation](), nn.Linear(dim, 1), nn.Sigmoid())
            if pe_gate
            else None
        )

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
        """x [N, d], e [E, d], edge_index [2, E], distance [E, 1] = ‖p_i − p_j‖², its order if known → new x, new e.

        In a padded batch real_nodes and real_edges say how many of the rows are real (`Partition`).
        """
        if order is None:
            order = EdgeOrder.of(edge_index, x.size(0))
        pe_gate = None
        if self.pe_gate is not None:
            if distance is None:
                raise ValueError("a layer with pe_gate needs the distances of positional encodings")
            pe_gate = distance_gate(distance, self.pe_gate, self.activation)  # [E, 1]
        nodes = by_parts(x, [self.node_projection], 4).flatten(1)
        edges = linear(e, self.edge_projection)
        x_hat, e_hat = (part[:, : self.dim] for part in gated_sum(nodes, edges, pe_gate, order))
        x = self._update(x, self.node_norm, x_hat, real_nodes)
        if self.update_edges:
            e = self._update(e, self.edge_norm, e_hat, real_edges)
        return x, e

    def _update(self, old: Tensor, norm: BatchNorm, update: Tensor, rows: Tensor | None) -> Tensor:
        residual = old if self.residual else None
        return norm(update, rows=rows, activation=self.activation, dropout=self.dropout, residual=residual)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, activation={self.activation}, dropout={self.dropout}, residual={self.residual}, "
            f"update_edges={self.update_edges}"
        )
