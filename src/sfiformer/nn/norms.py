"""Normalisation of node (or edge) states, [N, d] → [N, d], each with a gain and a bias per channel."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfiformer import ranks
from sfiformer.nn.partition import Partition


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation that takes batches of one row or none.

    Such a batch has no variance: it is normalised by the running statistics and leaves them as they are. (A
    batch may well hold no edge at all.) With `across_ranks` (see `ranks.join`) the statistics are those of the
    global batch in training, on any device.
    """

    across_ranks = False

    def forward(self, x: Tensor, graphs: Partition | None = None) -> Tensor:
        if self.training and self.across_ranks:
            return self._over_ranks(x)
        if self.training and x.size(0) < 2:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)

    def _over_ranks(self, x: Tensor) -> Tensor:
        assert isinstance(self.running_mean, Tensor)
        assert isinstance(self.running_var, Tensor)
        assert isinstance(self.num_batches_tracked, Tensor)
        rows = x.to(torch.promote_types(x.dtype, torch.float32))  # [N, d]
        sums = torch.cat([rows.sum(0), rows.new_full((1,), float(rows.size(0)))])
        sums = ranks.summed(sums)  # [d + 1]
        count = sums[-1].detach()
        mean = sums[:-1] / count.clamp(min=1)
        # In two passes: Σx² − (Σx)²/n would cancel where the mean is large beside the deviation.
        variance = ranks.summed((rows - mean).square().sum(0)) / count.clamp(min=1)
        enough = count >= 2  # a tensor, so that a GPU need not be waited for
        with torch.no_grad():
            momentum = (self.momentum or 0.0) * enough
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.add_(momentum * (mean - self.running_mean))
            self.running_var.add_(momentum * (unbiased - self.running_var))
            self.num_batches_tracked.add_(enough)
        mean = torch.where(enough, mean, self.running_mean)
        variance = torch.where(enough, variance, self.running_var)
        normed = (rows - mean) * torch.rsqrt(variance + self.eps)
        return (normed * self.weight + self.bias).to(x.dtype)


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
