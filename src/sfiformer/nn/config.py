"""The settings of a model."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from sfiformer.schema import require_choices

Level = Literal["graph", "node", "link"]


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes an `SFiFormer`. Keys that may be None are settled by the data: see `fitted`.

    The paper's models and baselines are settings of this one model:

    | model | settings |
    |---|---|
    | SFi-Former | attention: sfi |
    | SFi-Former, SP only | attention: sfi, adjacency: false |
    | SFi-Former, Ã only | attention: adjacency |
    | DFi-Former | attention: dfi |
    | GPS+Transformer | attention: softmax, head_width: narrow |
    | GatedGCN, GCN, GIN, GAT, GraphSAGE | attention: none, local: gatedgcn, gcn or edge-gcn, gin or gine, gat, sage |
    | GCN+ (Luo et al., 2025) | attention: none, local: edge-gcn, norm: none, residual: false, feed_forward: false |
    """

    layers: int = 4
    """Number of GPS layers."""
    dim: int = 64
    """Width d of node and edge states."""
    dropout: float = 0.1
    """Dropout after message passing, after attention and in the feed-forward block."""
    activation: Literal["relu", "gelu"] = "relu"
    """Activation of GatedGCN and of the feed-forward block."""
    norm: Literal["batch", "layer", "graph", "none"] = "batch"
    """The three norms of a GPS layer: over the batch, a node, or a graph (all its nodes and channels)."""
    residual: bool = True
    """Add the states that a layer is given to what message passing and attention make of them."""
    feed_forward: bool = True
    """End a layer with a feed-forward block and its norm."""

    local: Literal["gatedgcn", "edge-gcn", "gcn", "gin", "gine", "gat", "sage", "none"] = "gatedgcn"
    """Local message passing; gatedgcn, edge-gcn, gine and gat see edge features."""

    attention: Literal["sfi", "dfi", "softmax", "adjacency", "none"] = "sfi"
    """Global attention: sparse flows, dense flows, softmax without the adjacency term, or Ã alone."""
    heads: int = 4
    """Attention heads H."""
    head_width: Literal["full", "narrow"] = "full"
    """Width of a head: the paper's full d, or ⌈d/H⌉."""
    adjacency: bool = True
    """Add the adjacency term, (Ã + γZ)/(1 + γ), to sfi and dfi attention."""
    friction: Literal["learned", "tied"] = "learned"
    """Frictions from projections of their own, or tied to the scores (f ∝ exp(−s), no extra parameters)."""
    lam: float = 1.0
    """λ*, the strength of friction."""
    lam_scaling: Literal["potential", "graph", "largest"] = "potential"
    """λ relative to the dense potential (hard constraint), λ*/n of each graph, or λ*/N* of the largest (the paper's)."""
    alpha: float = 0.1
    """Strength α of the penalty on Σz ≠ 1 under lam_scaling: graph and largest; .inf is the constraint itself."""
    qk_norm: bool = True
    """Scale queries and keys of sfi and dfi attention to unit root mean square, which bounds the scores."""
    attention_dropout: float = 0.0
    """Dropout on the flows Z."""
    attention_gain: float = 1.0
    """Where the gain of the norm on the output of sfi, dfi and adjacency attention starts; with 0 layers start without it."""
    solver: Literal["exact", "proximal"] = "exact"
    """How flows are solved for: exactly, or by the paper's iteration."""
    proximal_iterations: int = 10
    """Steps of that iteration, for solver: proximal."""

    node_encoder: Literal["linear", "atom", "categories", "constant"] | None = None
    """Node features: numbers, OGB's nine of an atom, other categories, or none (one embedding for all)."""
    node_features: int | None = None
    """Columns of `x`, for node_encoder: linear."""
    node_categories: tuple[int, ...] | None = None
    """Categories in each column of `x`, for node_encoder: categories."""
    edge_encoder: Literal["linear", "bond", "categories", "constant"] | None = None
    """Edge features: numbers, OGB's three of a bond, other categories, or none (one embedding for all)."""
    edge_features: int | None = None
    """Columns of `edge_attr`, for edge_encoder: linear."""
    edge_categories: tuple[int, ...] | None = None
    """Categories in each column of `edge_attr`, for edge_encoder: categories."""
    pe: Literal["lappe", "eslappe", "rwse", "none"] = "none"
    """Positional encoding. LapPE and RWSE join the node features; ESLapPE gates the messages of GatedGCN."""
    pe_size: int = 10
    """Eigenvectors (lappe, eslappe) or steps of the walk (rwse) in the data."""
    pe_dim: int = 16
    """Width of the encoded LapPE or RWSE, taken out of `dim`."""
    sign_flip: bool = True
    """Flip the signs of LapPE's eigenvectors at random in training."""

    head: Level | None = None
    """What the model predicts for: graphs, nodes or links."""
    outputs: int | None = None
    """Numbers predicted for each graph, node or link."""
    pooling: Literal["mean", "add"] = "mean"
    """How a graph head pools the nodes."""
    head_layers: int = 2
    """Linear layers of a graph or node head."""
    head_activation: Literal["relu", "gelu"] = "relu"
    """Activation between them."""
    head_dropout: float = 0.0
    """Dropout before each of them."""
    head_l2norm: bool = True
    """Scale the hidden rows of the head to unit length, as the reference implementation does."""

    def __post_init__(self) -> None:
        require_choices(self)
        for key in ("layers", "dim", "heads", "head_layers", "pe_size", "pe_dim", "proximal_iterations"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 1")
        for key in ("node_features", "edge_features", "outputs"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(
                    f"{key} is {getattr(self, key)}; it must be at least 1, or null to fill it in from data"
                )
        for key in ("dropout", "attention_dropout", "head_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be in [0, 1)")
        if not (self.lam >= 0 and math.isfinite(self.lam)):
            raise ValueError(f"lam is {self.lam}; it must be finite and not negative")
        if not math.isfinite(self.attention_gain):
            raise ValueError(f"attention_gain is {self.attention_gain}; it must be finite")
        if not self.alpha > 0:
            raise ValueError(f"alpha is {self.alpha}; it must be positive (.inf for the hard constraint)")
        if self.solver == "proximal" and self.attention == "sfi":
            if self.lam_scaling == "potential":
                raise ValueError(
                    "solver: proximal has only a soft constraint; with it set lam_scaling to graph or largest (the paper's)"
                )
            if math.isinf(self.alpha):
                raise ValueError(
                    "solver: proximal has only a soft constraint; with it set alpha to a finite number"
                )
        if not self.feed_forward and self.local == self.attention == "none":
            raise ValueError(
                "feed_forward is false and local and attention are none: nothing is left of a layer"
            )
        if self.pe in ("lappe", "rwse") and self.pe_dim >= self.dim:
            raise ValueError(
                f"model.pe_dim is {self.pe_dim}; it is taken out of model.dim and must be less than {self.dim}"
            )
        if self.pe == "eslappe" and self.local != "gatedgcn":
            raise ValueError(
                f"pe: eslappe gates the messages of GatedGCN; with local: {self.local} choose another pe"
            )
        if self.head == "link" and self.outputs not in (None, 1):
            raise ValueError(f"outputs is {self.outputs}; a link head gives one score a link")

    @property
    def head_dim(self) -> int:
        """The width of a head, as a number."""
        return self.dim if self.head_width == "full" else -(-self.dim // self.heads)

    @property
    def uses_edges(self) -> bool:
        """Whether edge features reach the model at all."""
        return self.local in ("gatedgcn", "edge-gcn", "gine", "gat")

    def fitted(
        self,
        *,
        level: Level,
        outputs: int,
        node_features: int,
        edge_features: int,
        node_categories: tuple[int, ...] | None = None,
        edge_categories: tuple[int, ...] | None = None,
    ) -> "ModelConfig":
        """Settle what is None from the data, and check the rest against it.

        Args:
            level, outputs: what the task predicts for, and how many numbers.
            node_features, edge_features: columns of `x` and `edge_attr`, 0 where there are none.
            node_categories, edge_categories: categories in each of those columns, where they hold categories.
        """
        settled: dict[str, Any] = {}
        for key, found in (("head", level), ("outputs", outputs)):
            if getattr(self, key) not in (None, found):
                raise ValueError(f"{key} is {getattr(self, key)}, but the data ask for {found}")
            settled[key] = found
        for kind, width, sizes in (
            ("node", node_features, node_categories),
            ("edge", edge_features, edge_categories),
        ):
            default = "constant" if not width else "linear" if sizes is None else "categories"
            encoder = getattr(self, f"{kind}_encoder") or default
            if encoder == "linear":
                needed = getattr(self, f"{kind}_features") or max(width, 1)
                settled[f"{kind}_features"] = width
            elif encoder == "categories":
                sizes = getattr(self, f"{kind}_categories") or sizes
                if sizes is None:
                    raise ValueError(f"{kind}_encoder: categories, but the data have numbers; choose linear")
                needed = len(sizes)
                settled[f"{kind}_categories"] = sizes
            else:
                needed = {"atom": 9, "bond": 3, "constant": width}[encoder]
            if needed != width:
                raise ValueError(
                    f"{kind}_encoder: {encoder} expects {needed} columns, but the data have {width}"
                )
            settled[f"{kind}_encoder"] = encoder
        return replace(self, **settled)
