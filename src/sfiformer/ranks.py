"""Sums over the processes (ranks) of a distributed run; with one process, each is what it is.

The loss of a distributed run is that of the global batch, L = Σ_r L_r, with L_r what rank r adds to it. Sums
here are differentiable in that sense: of S = Σ_r x_r every rank uses a copy, so that ∂L/∂x_r = Σ_r' ∂L_r'/∂S,
again a sum over the ranks.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def count() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's own number, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def summed(x: Tensor) -> Tensor:
    """Σ_r x_r, differentiable; all ranks must call it, in the same order."""
    return _Sum.apply(x) if count() > 1 else x


def largest(x: Tensor) -> Tensor:
    """max_r x_r, entry by entry; without a gradient."""
    if count() > 1:
        x = x.detach().clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its sum over the ranks, in one exchange; one that a rank lacks counts as 0."""
    if count() == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.flatten() for parameter in trained if parameter.grad is not None])
    dist.all_reduce(flat)
    for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = part.view_as(parameter)


def join(model: nn.Module) -> None:
    """Let the modules that look at a whole batch (`across_ranks`) look at the global one from now on."""
    for module in model.modules():
        if hasattr(module, "across_ranks"):
            module.across_ranks = True  # type: ignore[assignment]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total
