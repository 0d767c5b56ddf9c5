"""A drop-in for PyG's ``GPSConv`` with sparse-flow attention."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.resolver import activation_resolver, normalization_resolver

from sfiformer.attention import SFiAttention


class SFiGPSConv(nn.Module):
    """The GPS layer with `SFiAttention` in place of softmax attention: message passing beside global attention, then an MLP.

    It takes the arguments of PyG's ``GPSConv`` (but for ``attn_type``) and is called like it, so that a model changes over by
    changing one line. Graphs are not padded, and heads need not divide ``channels``.

    Args:
        channels: width of the node features.
        conv: the local message passing layer, or None.
        heads: number of attention heads, each of full width.
        dropout: of the intermediate features.
        act, act_kwargs: activation of the MLP, by name.
        norm, norm_kwargs: normalisation, by name, or None.
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
        attn_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
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
        for module in (self.conv, self.attn, *self.mlp, *self.norms):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None, **kwargs: Any) -> Tensor:
        """[nodes, channels] → the same. ``batch`` is sorted, as PyG has it; ``kwargs`` go to the message passing layer."""
        ptr = _offsets(batch, x)
        branches = []
        if self.conv is not None:
            local = F.dropout(self.conv(x, edge_index, **kwargs), self.dropout, self.training)
            branches.append(self._norm(0, local + x, batch))
        flowed = F.dropout(self.attn(x, edge_index, ptr), self.dropout, self.training)
        branches.append(self._norm(1, flowed + x, batch))
        out = torch.stack(branches).sum(0)
        return self._norm(2, out + self.mlp(out), batch)

    def _norm(self, place: int, x: Tensor, batch: Tensor | None) -> Tensor:
        norm = self.norms[place]
        return norm(x, batch=batch) if self.norm_by_graph else norm(x)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.channels}, conv={self.conv}, heads={self.heads}, attn={self.attn.extra_repr()})"


def _offsets(batch: Tensor | None, x: Tensor) -> Tensor:
    """Where each graph starts, [graphs + 1], from the graph of each node."""
    if batch is None:
        return torch.tensor([0, len(x)], device=x.device)
    if batch.shape != x.shape[:1]:
        raise ValueError(
            f"batch must name the graph of each of the {len(x)} nodes, got shape {list(batch.shape)}"
        )
    if batch.device.type == "cpu" and bool((batch.diff() < 0).any()):
        raise ValueError("batch must be sorted, as in PyG's Batch: nodes of one graph stand together")
    return torch.cat([batch.new_zeros(1), batch.bincount().cumsum(0)])
