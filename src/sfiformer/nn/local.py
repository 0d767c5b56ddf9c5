"""Local message passing of a GPS layer: GatedGCN, GCN with edges, or one of PyG's convolutions behind the same call."""

from torch import Tensor, nn

from sfiformer.attention import EdgeOrder
from sfiformer.attention.dropout import dropped
from sfiformer.nn.config import ModelConfig
from sfiformer.nn.edge_gcn import EdgeGCN
from sfiformer.nn.gated_gcn import ACTIVATIONS, GatedGCN


class PyGLocal(nn.Module):
    """x ← x + dropout(conv(x)), with a convolution of `torch_geometric.nn`; edge states stay as they are.

    With residual=False x is not added.
    """

    def __init__(
        self, kind: str, dim: int, *, heads: int, dropout: float, activation: str, residual: bool = True
    ) -> None:
        super().__init__()
        from torch_geometric import nn as pyg  # slow to import, and the layers of our own do not need it

        def mlp() -> nn.Module:
            return nn.Sequential(nn.Linear(dim, dim), ACTIVATIONS[activation](), nn.Linear(dim, dim))

        if kind == "gcn":
            self.conv = pyg.GCNConv(dim, dim)
        elif kind == "gin":
            self.conv = pyg.GINConv(mlp())
        elif kind == "gine":
            self.conv = pyg.GINEConv(mlp())
        elif kind == "gat":
            # Heads are averaged, so that any d goes with any number of heads.
            self.conv = pyg.GATConv(dim, dim, heads, concat=False, edge_dim=dim)
        elif kind == "sage":
            self.conv = pyg.SAGEConv(dim, dim)
        else:
            raise ValueError(f"there is no local message passing {kind!r}")
        self.sees_edges = kind in ("gine", "gat")
        self.dropout, self.residual = dropout, residual

    def forward(
        self,
        x: Tensor,
        e: Tensor | None,
        edge_index: Tensor,
        distance: Tensor | None = None,
        order: EdgeOrder | None = None,
        real_nodes: Tensor | None = None,
        real_edges: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        update = self.conv(x, edge_index, e) if self.sees_edges else self.conv(x, edge_index)
        update = dropped(update, self.dropout, self.training)
        return x + update if self.residual else update, e


def make_local(config: ModelConfig, *, last: bool) -> nn.Module:
    """The local part of one layer; `last` says that no layer will read the edge states after it."""
    if config.local == "gatedgcn":
        return GatedGCN(
            config.dim,
            dropout=config.dropout,
            activation=config.activation,
            residual=config.residual,
            pe_gate=config.pe == "eslappe",
            update_edges=not last,
        )
    if config.local == "edge-gcn":
        return EdgeGCN(
            config.dim, dropout=config.dropout, activation=config.activation, residual=config.residual
        )
    return PyGLocal(
        config.local,
        config.dim,
        heads=config.heads,
        dropout=config.dropout,
        activation=config.activation,
        residual=config.residual,
    )
