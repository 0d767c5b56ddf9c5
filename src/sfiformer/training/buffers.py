"""Batches of fixed shapes in one piece of memory, so that a single copy moves all their tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sfiformer.data.batch import GraphBatch

ALIGNED = 256  # bytes; kernels know that what they are given starts at such places


class BatchBuffer:
    """Room for batches like the given ones, and batches that lie there: their values are what `fill` last put there.

    A tensor that comes several times, such as the edges of a batch and of its structure, lies there once.
    """

    def __init__(self, like: Sequence[GraphBatch]) -> None:
        tensors, end = _distinct(like), 0
        places: dict[Any, int] = {}
        for key, tensor in tensors.items():
            places[key], end = end, end + -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        self.memory = torch.zeros(end, dtype=torch.uint8, device=like[0].device)

        def view(tensor: Tensor) -> Tensor:
            start, size = places[_key(tensor)], tensor.numel() * tensor.element_size()
            return self.memory[start : start + size].view(tensor.dtype).view(tensor.shape)

        self.batches = [batch.map(view) for batch in like]
        self._views = [view(tensor) for tensor in tensors.values()]

    def fill(self, batches: Sequence[GraphBatch]) -> None:
        """Take over the values of batches of the same shapes."""
        for view, tensor in zip(self._views, _distinct(batches).values(), strict=True):
            view.copy_(tensor)


def _distinct(batches: Sequence[GraphBatch]) -> dict[Any, Tensor]:
    """The tensors of batches, each once."""
    found: dict[Any, Tensor] = {}
    for batch in batches:
        batch.map(lambda tensor: found.setdefault(_key(tensor), tensor))
    return found


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that are the same."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
