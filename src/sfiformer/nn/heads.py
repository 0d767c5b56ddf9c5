"""From node states to predictions: for nodes, for graphs, for links."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfiformer.attention.widths import resized
from sfiformer.nn.config import ModelConfig
from sfiformer.nn.gated_gcn import ACTIVATIONS
from sfiformer.nn.hidden import hidden_linear
from sfiformer.nn.partition import Partition


class MLP(nn.Module):
    """(dropout, Linear(d, d), activation, L2 norm) × (layers − 1), dropout, Linear(d, outputs)."""

    def __init__(
        self, dim: int, outputs: int, layers: int, *, activation: str, dropout: float, l2norm: bool
    ) -> None:
        super().__init__()
        self.outputs, self.dropout, self.l2norm = outputs, dropout, l2norm
        self.hidden = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers - 1))
        self.activation = ACTIVATIONS[activation]()
        self.out = nn.Linear(dim, outputs)

    def forward(self, x: Tensor) -> Tensor:
        # At widths that the device likes: the columns behind a layer's own are 0, and stay so.
        for place, layer in enumerate([*self.hidden, self.out]):
            activation = self.activation if place else None  # of what the layer before made
            if activation is not None and self.l2norm:
                x, activation = F.normalize(activation(x), dim=-1), None
            x = hidden_linear(x, layer, activation, self.dropout, self.training)
        return resized(x, self.outputs)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, l2norm={self.l2norm}"


class NodeHead(nn.Module):
    """A prediction for each node: [N, d] → [N, outputs]."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor, graphs: Partition, batch: Any) -> Tensor:
        return self.mlp(x)


class GraphHead(nn.Module):
    """A prediction for each graph from its pooled nodes: [N, d] → [G, outputs].

    Three layers with dropout and GELU and without the L2 norm are the head of the Peptides models.
    """

    def __init__(self, mlp: MLP, pooling: str = "mean") -> None:
        super().__init__()
        self.mlp, self.pooling = mlp, pooling

    def forward(self, x: Tensor, graphs: Partition, batch: Any) -> Tensor:
        pooled = graphs.mean(x) if self.pooling == "mean" else graphs.sum(x)
        # Of half precision it is in float32, which autocast casts; a model that is itself in half precision does not.
        return self.mlp(pooled if torch.is_autocast_enabled(x.device.type) else pooled.to(x.dtype))

    def extra_repr(self) -> str:
        return f"pooling={self.pooling}"


class LinkHead(nn.Module):
    """A score for each pair in `batch.edge_label_index` [2, L]: the dot product of its ends → [L, 1]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, dim)

    def embed(self, x: Tensor) -> Tensor:
        """The rows whose dot products are the scores: [N, d] → [N, d]."""
        return self.projection(x)

    def forward(self, x: Tensor, graphs: Partition, batch: Any) -> Tensor:
        pairs = getattr(batch, "edge_label_index", None)
        if pairs is None:
            raise ValueError(
                "the batch has no field 'edge_label_index', the pairs of nodes that a link head scores; "
                "for all pairs use SFiFormer.embed"
            )
        z = self.embed(x)
        head, tail = z.index_select(0, pairs[0]), z.index_select(0, pairs[1])  # [L, d]
        return (head * tail).sum(-1, keepdim=True)


def make_head(config: ModelConfig) -> NodeHead | GraphHead | LinkHead:
    """The head that `config.head` names."""
    if config.head == "link":
        return LinkHead(config.dim)
    assert config.outputs is not None
    mlp = MLP(
        config.dim,
        config.outputs,
        config.head_layers,
        activation=config.head_activation,
        dropout=config.head_dropout,
        l2norm=config.head_l2norm,
    )
    return NodeHead(mlp) if config.head == "node" else GraphHead(mlp, config.pooling)
