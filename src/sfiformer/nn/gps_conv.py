"""A drop-in for PyG's ``GPSConv`` with sparse-flow attention."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.resolver import activation_resolver, normalization_resolver
from torch_geometric.typing import Adj
from torch_geometric.utils import is_sparse, to_edge_index

from sfiformer.attention import SFiAttention
from sfiformer.nn.partition import require_sorted
from sfiformer.operators import operator
from sfiformer.resetting import reset


class SFiGPSConv(nn.Module):
    """The GPS layer with `SFiAttention` in place of softmax attention: message passing beside global attention, then an MLP.

    It takes the arguments of PyG's ``GPSConv`` and is called like it, so that a model changes over by changing one line. Graphs
    are not padded, and heads need not divide ``channels``: each has the full width, and so more parameters, unless
    ``attn_kwargs={"head_width": …}`` says otherwise.

    Args:
        channels: width of the node features.
        conv: the local message passing layer, or None.
        heads: number of attention heads.
        dropout: of the intermediate features.
        act, act_kwargs: activation of the MLP, by name.
        norm, norm_kwargs: normalisation, by name, or None.
        attn_type: ``"multihead"``, the one that sparse flows replace.
        attn_kwargs: arguments of `SFiAttention`, for example ``{"mode": "dfi"}``, ``{"lam": 2.0}`` or ``{"dropout": 0.5}``.
    """

    def __init__(
        self,
        channels: int,
        conv: nn.Module | None,
        heads: int = 1,
        dropout: float = 0.0,
        act: str = "relu",
        act_kwargs: dict[str, Any] | None = None,
        norm: str | None = "batch_norm",
        norm_kwargs: dict[str, Any] | None = None,
        attn_type: str = "multihead",
        attn_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if attn_type != "multihead":
            raise ValueError(
                f"attn_type must be 'multihead', got {attn_type!r}: what the attention is like is said by attn_kwargs, for "
                "example {'mode': 'dfi'} for softmax attention; for others keep PyG's GPSConv"
            )
        self.channels, self.conv, self.heads, self.dropout = channels, conv, heads, dropout
        self.attn = SFiAttention(channels, heads, **(attn_kwargs or {}))
        self.mlp = nn.Sequential(
            nn.Linear(channels, 2 * channels),
            activation_resolver(act, **(act_kwargs or {})),
            nn.Dropout(dropout),
            nn.Linear(2 * channels, channels),
            nn.Dropout(dropout),
        )
        self.norms = nn.ModuleList(
            normalization_resolver(norm, channels, **(norm_kwargs or {})) or nn.Identity() for _ in range(3)
        )
        self.norm_by_graph = "batch" in inspect.signature(self.norms[0].forward).parameters

    def reset_parameters(self) -> None:
        for module in self.children():
            reset(module)

    def forward(self, x: Tensor, edge_index: Adj, batch: Tensor | None = None, **kwargs: Any) -> Tensor:
        """[nodes, channels] → the same.

        Args:
            x: node features.
            edge_index: edges [2, E], source above target; or, as PyG has it, a sparse matrix with a row for each target.
            batch: the graph of each node, sorted, as PyG has it (looked at on a CPU).
            kwargs: of the message passing layer.
        """
        ptr = _offsets(batch, x)
        branches = []
        if self.conv is not None:
            local = F.dropout(self.conv(x, edge_index, **kwargs), self.dropout, self.training)
            branches.append(self._norm(0, local + x, batch))
        edges = _edges(edge_index) if self.attn.adjacency else x.new_empty((2, 0), dtype=torch.long)
        flowed = F.dropout(self.attn(x, edges, ptr), self.dropout, self.training)
        branches.append(self._norm(1, flowed + x, batch))
        out = torch.stack(branches).sum(0)
        return self._norm(2, out + self.mlp(out), batch)

    def _norm(self, place: int, x: Tensor, batch: Tensor | None) -> Tensor:
        norm = self.norms[place]
        return norm(x, batch=batch) if self.norm_by_graph else norm(x)

    def __repr__(self) -> str:
        attn = f"{type(self.attn).__name__}({self.attn.extra_repr()})"
        return f"{type(self).__name__}({self.channels}, conv={self.conv}, attn={attn})"


def _edges(edge_index: Adj | None) -> Tensor:
    """Edges [2, E], source above target, also of a sparse matrix, whose rows are the targets."""
    if edge_index is None:
        raise ValueError(
            "the attention's hard-wired adjacency needs edge_index; attn_kwargs={'adjacency': False} has none"
        )
    return to_edge_index(edge_index)[0].flip(0) if is_sparse(edge_index) else edge_index


def _offsets(batch: Tensor | None, x: Tensor) -> Tensor:
    """Where each graph starts, [graphs + 1], from the graph of each node."""
    if batch is None:
        return torch.tensor([0, x.size(0)], device=x.device)
    if batch.shape != x.shape[:1]:
        raise ValueError(
            f"batch must name the graph of each of the {len(x)} nodes, got shape {list(batch.shape)}"
        )
    return _starts(batch)


@operator("sfiformer::starts")
def _starts(batch: Tensor) -> Tensor:
    """The same of one graph at least, as an operator: the compiler cannot know how many there are, and need not."""
    require_sorted(batch)
    sizes = batch.bincount(minlength=1)
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


@_starts.register_fake
def _(batch: Tensor) -> Tensor:
    return batch.new_empty(torch.library.get_ctx().new_dynamic_size(min=2), dtype=torch.int64)
