"""Normalisation of node (or edge) states, [N, d] → [N, d], each with a gain and a bias per channel."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfiformer.nn.partition import Partition


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation that takes batches of one row or none.

    Such a batch has no variance: it is normalised by the running statistics and leaves them as they are. (A
    batch may well hold no edge at all.)
    """

    def forward(self, x: Tensor, graphs: Partition | None = None) -> Tensor:
        if self.training and x.size(0) < 2:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


class LayerNorm(nn.LayerNorm):
    """Normalisation of each row by its own mean and variance."""

    def forward(self, x: Tensor, graphs: Partition | None = None) -> Tensor:
        return super().forward(x)


class GraphLayerNorm(nn.Module):
    """Normalisation by the mean and variance over all nodes and channels of a graph."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, graphs: Partition) -> Tensor:
        # Half precision would not do for sums over thousands of entries.
        rows = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = rows - graphs.spread(graphs.mean(rows.mean(1, keepdim=True)))  # [N, d]
        variance = graphs.mean(centred.square().mean(1, keepdim=True))  # [G, 1]
        normed = centred * graphs.spread(torch.rsqrt(variance + self.eps))
        return (normed * self.weight + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class NoNorm(nn.Module):
    """The identity."""

    def forward(self, x: Tensor, graphs: Partition | None = None) -> Tensor:
        return x


NORMS: dict[str, type[nn.Module]] = {"batch": BatchNorm, "layer": LayerNorm, "graph": GraphLayerNorm}


def make_norm(kind: str, dim: int) -> nn.Module:
    """The norm that `ModelConfig.norm` names, called as norm(x, partition)."""
    return NoNorm() if kind == "none" else NORMS[kind](dim)
