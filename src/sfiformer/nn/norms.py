"""Normalisation of node (or edge) states, [N, d] → [N, d], each with a gain and a bias per channel."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfiformer import ranks
from sfiformer.attention.dropout import dropped
from sfiformer.attention.kernels import usable
from sfiformer.nn.partition import Partition

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation that takes padded batches, and batches of one row or none.

    A batch without a variance, of one row or none, is normalised by the running statistics and leaves them as
    they are. (A batch may well hold no edge at all.) With `across_ranks` (see `ranks.join`) the statistics are
    those of the global batch in training, on any device.

    Where a batch is padded, its real rows come first, and their number is a tensor on the device. In training
    nothing of a padding row is looked at: it is no part of the statistics, comes out as 0, and what gradient
    reaches it is dropped.
    """

    across_ranks = False

    def forward(
        self,
        x: Tensor,
        graphs: Partition | None = None,
        *,
        rows: Tensor | None = None,
        update: Tensor | None = None,
        activation: str | None = None,
        dropout: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + dropout(act(norm(x))), or residual + act(norm(x + dropout(update))).

        One operator on a GPU in training, so that no part of it is written to memory on the way.

        Args:
            x: [N, d].
            graphs: of the nodes that are the rows of x.
            rows: int64 [], the number of real rows; by default that of `graphs`, and all without.
            update, residual: [N, d].
            activation: a key of `FUNCTIONS`, or None.
            dropout: probability, of the update where there is one.
        """
        if rows is None and graphs is not None:
            rows = graphs.real_nodes
        if self.training and self._has_kernel(x):
            from sfiformer.nn.kernels.batch_norm import fused_batch_norm

            return fused_batch_norm(
                x,
                self.weight,
                self.bias,
                *self._running(),
                rows=rows,
                update=update,
                activation=activation,
                dropout=dropout,
                residual=residual,
                momentum=self.momentum or 0.0,
                eps=self.eps,
            )
        if update is not None:
            x = x + dropped(update, dropout, self.training)
        x = self._normalise(x, rows)
        if activation is not None:
            x = FUNCTIONS[activation](x)
        if update is None:
            x = dropped(x, dropout, self.training)
        return x if residual is None else residual + x

    def _has_kernel(self, x: Tensor) -> bool:
        """The kernels are for parameters in float32, and for one rank."""
        return usable(x) and self.weight.dtype == torch.float32 and not self.across_ranks

    def _running(self) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(self.running_mean, Tensor)
        assert isinstance(self.running_var, Tensor)
        assert isinstance(self.num_batches_tracked, Tensor)
        return self.running_mean, self.running_var, self.num_batches_tracked

    def _normalise(self, x: Tensor, rows: Tensor | None) -> Tensor:
        if torch.promote_types(x.dtype, self.weight.dtype) != self.weight.dtype:
            x = x.to(self.weight.dtype)  # PyTorch takes no parameters narrower than x
        if self.training and (self.across_ranks or rows is not None):
            return self._over_real_rows(x, rows)
        if self.training and x.size(0) < 2:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)

    def _over_real_rows(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """By the statistics of the real rows, of all ranks where `across_ranks` is set."""
        running_mean, running_var, batches = self._running()
        summed = ranks.summed if self.across_ranks else _as_it_is
        real = (
            None if rows is None else (torch.arange(x.size(0), device=x.device) < rows).unsqueeze(1)
        )  # [N, 1]
        values = _masked(x.to(torch.promote_types(x.dtype, torch.float32)), real)  # [N, d]
        own = values.new_full((1,), float(x.size(0))) if rows is None else rows.reshape(1).to(values.dtype)
        sums = summed(torch.cat([values.sum(0), own]))  # [d + 1]
        count = sums[-1].detach()
        mean = sums[:-1] / count.clamp(min=1)
        # In two passes: Σx² − (Σx)²/n would cancel where the mean is large beside the deviation.
        variance = summed(_masked(values - mean, real).square().sum(0)) / count.clamp(min=1)
        enough = count >= 2  # a tensor, so that a GPU need not be waited for
        with torch.no_grad():
            momentum = (self.momentum or 0.0) * enough
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_mean.add_(momentum * (mean - running_mean))
            running_var.add_(momentum * (unbiased - running_var))
            batches.add_(enough)
        mean = torch.where(enough, mean, running_mean)
        variance = torch.where(enough, variance, running_var)
        normed = (values - mean) * torch.rsqrt(variance + self.eps)
        return _masked(normed * self.weight + self.bias, real).to(x.dtype)


def _masked(x: Tensor, real: Tensor | None) -> Tensor:
    return x if real is None else torch.where(real, x, 0)


def _as_it_is(x: Tensor) -> Tensor:
    return x


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


def add_and_norm(
    norm: nn.Module,
    x: Tensor | None,
    update: Tensor,
    graphs: Partition,
    *,
    dropout: float,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + norm(x + dropout(update)), with dropout where the norm is in training. Without x: of the update alone."""
    if isinstance(norm, BatchNorm) and x is not None:
        return norm(x, graphs, update=update, dropout=dropout, residual=residual)
    update = dropped(update, dropout, norm.training)
    x = norm(update if x is None else x + update, graphs)
    return x if residual is None else residual + x
