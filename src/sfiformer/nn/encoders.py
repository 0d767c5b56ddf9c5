"""From the features of a batch to states of width d: node and edge features, positional encodings."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from sfiformer.attention import Adjacency, EdgeOrder
from sfiformer.attention.inputs import graph_sizes
from sfiformer.attention.widths import linear, resized
from sfiformer.branches import Branches
from sfiformer.nn.config import ModelConfig
from sfiformer.nn.deep_set import deep_set, fits
from sfiformer.nn.features import (
    ATOM_VOCABULARY,
    BOND_VOCABULARY,
    ConstantEncoder,
    EmbeddingSum,
    LinearEncoder,
)
from sfiformer.nn.norms import BatchNorm
from sfiformer.nn.partition import Partition, Structure

# Of a batch, by positional encoding.
FIELDS = {
    "lappe": ("lappe_vectors", "lappe_values"),
    "eslappe": ("eslappe_vectors",),
    "rwse": ("rwse",),
}

MAKERS = {
    "lappe": "LapPE",
    "eslappe": "ESLapPE",
    "rwse": "RandomWalkSE",
}  # of those fields, in sfiformer.data


class LapPE(nn.Module):
    """DeepSet over Laplacian eigenpairs: Σ_k φ(v_k, λ_k), φ = Linear(2, 2d), ReLU, Linear(2d, d), ReLU.

    An eigenvector is defined up to its sign, so in training each one of each graph is flipped at random.
    Eigenpairs that a small graph does not have are NaN and left out of the sum.
    """

    def __init__(self, dim: int, *, sign_flip: bool = True) -> None:
        super().__init__()
        self.dim, self.sign_flip = dim, sign_flip
        self.phi = nn.Sequential(nn.Linear(2, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim), nn.ReLU())

    def forward(self, vectors: Tensor, values: Tensor, graphs: Partition) -> Tensor:
        """vectors [N, k], values [G, k] → [N, dim]."""
        flips = torch.randint_like(values, 2) if self.training and self.sign_flip else None  # [G, k], 0 or 1
        if fits(self.phi, vectors, values):
            return deep_set(vectors, values, flips, graphs.batch, self.phi)
        signs = torch.ones_like(values) if flips is None else 2 * flips - 1
        pairs = graphs.spread(torch.stack([signs, values], dim=-1))  # [N, k, 2]
        pairs[..., 0].mul_(vectors)
        absent = pairs.isnan().any(-1, keepdim=True)  # [N, k, 1]
        pairs = pairs.masked_fill(absent, 0.0).to(_dtype(self.phi))
        return self._phi(pairs.flatten(0, 1)).view(*vectors.shape, self.dim).masked_fill(absent, 0.0).sum(1)

    def _phi(self, pairs: Tensor) -> Tensor:
        first, activation, last, _ = self.phi
        return activation(resized(linear(activation(linear(pairs, first)), last), self.dim))

    def extra_repr(self) -> str:
        return f"{self.dim}, sign_flip={self.sign_flip}"


class RWSE(nn.Module):
    """Probabilities p that a walk is back after 1, 2, … k steps: Linear(BatchNorm(p)).

    As they are, those of many steps are small and nearly the same in all nodes.
    """

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.norm = BatchNorm(size)
        self.projection = LinearEncoder(size, dim, "rwse")

    def forward(self, probabilities: Tensor, graphs: Partition) -> Tensor:
        """[N, k] → [N, dim]."""
        return self.projection(self.norm(probabilities.to(_dtype(self.norm)), graphs))


class FeatureEncoder(nn.Module):
    """Node and edge features and positional encodings of a batch, as states of width d.

    Returns x [N, d], e [E, d] (None where local message passing does not look at edges), and the structure
    that all layers share.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dim, self.pe, self.pe_size = config.dim, config.pe, config.pe_size
        mixed = config.attention in ("sfi", "dfi") and config.adjacency
        self.needs_adjacency = mixed or config.attention == "adjacency"
        pe_dim = config.pe_dim if config.pe in ("lappe", "rwse") else 0
        self.node = _feature_encoder(config, "node", config.dim - pe_dim)
        self.edge = _feature_encoder(config, "edge", config.dim) if config.uses_edges else None
        if config.pe == "lappe":
            self.position: nn.Module = LapPE(pe_dim, sign_flip=config.sign_flip)
        elif config.pe == "rwse":
            self.position = RWSE(config.pe_size, pe_dim)
        elif config.pe == "eslappe":
            self.position = LinearEncoder(config.pe_size, config.dim, "eslappe_vectors")

    def forward(
        self, batch: Any, structure: Structure | None = None
    ) -> tuple[Tensor, Tensor | None, Structure]:
        structure = self.structure(batch) if structure is None else structure
        graphs = structure.graphs
        branches = Branches("encoding", batch.edge_index)  # edges and positions beside nodes
        with branches.next(getattr(batch, "edge_attr", None), structure.hot.get("edge_attr")):
            e = self._edge_states(batch, structure.hot)
        fields = [getattr(batch, field, None) for field in FIELDS.get(self.pe, ())]
        with branches.next(*fields, graphs.batch, graphs.ptr, graphs.real_nodes):
            position = self._position(batch, graphs)
        x = self._features(self.node, batch, "x", batch.num_nodes, structure.hot)
        branches.join(e, position)
        if position is None:
            return x, e, structure
        if self.pe != "eslappe":
            return torch.cat([x, position], dim=1), e, structure
        assert structure.order is not None
        difference = structure.order.at_source(position) - structure.order.at_target(position)  # [E, d]
        distance = (difference * difference).sum(-1, keepdim=True)  # the gradient of a square is dear
        return x, e, structure._replace(distance=distance)

    def structure(self, batch: Any) -> Structure:
        """All that layers share about a batch's graphs, but for distances, which take weights: as it is there, or made."""
        made = getattr(batch, "structure", None)
        if isinstance(made, Structure):  # a PyG Data may have anything by this name
            return made
        edge_index, nodes, dtype = batch.edge_index, batch.num_nodes, _dtype(self.node)
        graphs = Partition.of(batch, nodes, edge_index.device)
        order = EdgeOrder.of(edge_index, nodes, by_target=getattr(batch, "edges_by_target", False))
        return Structure(
            edge_index,
            graphs,
            adjacency=Adjacency.of(edge_index, nodes, dtype, order=order) if self.needs_adjacency else None,
            order=order,
            real_edges=getattr(batch, "real_edges", None),
            sizes=graph_sizes(graphs.ptr, dtype),
            hot=self._hot(batch),
        )

    def _hot(self, batch: Any) -> dict[str, Tensor]:
        found = {}
        for field, encoder in (("x", self.node), ("edge_attr", self.edge)):
            features = getattr(batch, field, None)
            if isinstance(encoder, EmbeddingSum) and features is not None:
                found[field] = encoder.hot(features)
        return {field: hot for field, hot in found.items() if hot is not None}

    def _edge_states(self, batch: Any, hot: dict[str, Tensor]) -> Tensor | None:
        if self.edge is None:
            return None
        return self._features(self.edge, batch, "edge_attr", batch.edge_index.size(1), hot)

    def _position(self, batch: Any, graphs: Partition) -> Tensor | None:
        """The positional encodings of the nodes, [N, pe_dim or d]."""
        if self.pe == "none":
            return None
        fields = [self._encoding(batch, field) for field in FIELDS[self.pe]]
        return self.position(*fields) if self.pe == "eslappe" else self.position(*fields, graphs)

    def _features(
        self, encoder: nn.Module, batch: Any, field: str, count: int, hot: dict[str, Tensor]
    ) -> Tensor:
        if isinstance(encoder, ConstantEncoder):
            return encoder(count)
        features = getattr(batch, field, None)
        if features is None and count == 0:  # graphs without edges need not have edge_attr
            return torch.zeros(0, self.dim, device=batch.edge_index.device)
        if features is None:
            raise ValueError(f"the batch has no {field!r}, but the model has {encoder} for it")
        return encoder(features, hot[field]) if field in hot else encoder(features)

    def _encoding(self, batch: Any, field: str) -> Tensor:
        values = getattr(batch, field, None)
        if values is None:
            raise ValueError(
                f"the batch has no field {field!r}, which pe: {self.pe} needs: add it to each graph before they are batched, "
                f"AddEncodings([{MAKERS[self.pe]}({self.pe_size})])(data) of sfiformer.data, or choose pe: none"
            )
        if values.dim() != 2 or values.size(1) != self.pe_size:
            raise ValueError(f"{field} has shape {list(values.shape)}; the model has pe_size: {self.pe_size}")
        return values

    def extra_repr(self) -> str:
        return f"{self.dim}, pe={self.pe}"


def _feature_encoder(config: ModelConfig, kind: Literal["node", "edge"], dim: int) -> nn.Module:
    field = "x" if kind == "node" else "edge_attr"
    encoder = getattr(config, f"{kind}_encoder")
    if encoder == "constant":
        return ConstantEncoder(dim)
    if encoder in ("atom", "bond"):
        return EmbeddingSum(ATOM_VOCABULARY if encoder == "atom" else BOND_VOCABULARY, dim, field)
    missing = f"{kind}_encoder"
    if encoder is not None:
        missing = f"{kind}_features" if encoder == "linear" else f"{kind}_categories"
        sizes = getattr(config, missing)
        if sizes is not None:
            return (LinearEncoder if encoder == "linear" else EmbeddingSum)(sizes, dim, field)
    raise ValueError(f"{missing} is not set: give it, or fill it in from the data with ModelConfig.fitted")


def _dtype(module: nn.Module) -> torch.dtype:
    """Of a module's parameters; a quantised one and a replica have none."""
    first = next(module.parameters(), None)
    return torch.get_default_dtype() if first is None else first.dtype
