"""Batches of fixed shapes in one piece of memory, so that a single copy moves all their tensors, and many shapes share it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sfiformer.data.batch import GraphBatch

ALIGNED = 256  # bytes; kernels know that what they are given starts at such places


def room(batches: Sequence[GraphBatch]) -> int:
    """Bytes of a `BatchBuffer` for such batches."""
    return sum(_size(tensor) for tensor in _distinct(batches).values())


class BatchBuffer:
    """Batches like the given ones that lie in some memory, uint8 [≥ `room`]: their values are what `fill` last put there.

    A tensor that comes several times, such as the edges of a batch and of its structure, lies there once.
    """

    def __init__(self, like: Sequence[GraphBatch], memory: Tensor) -> None:
        tensors, end = _distinct(like), 0
        places: dict[Any, int] = {}
        for key, tensor in tensors.items():
            places[key], end = end, end + _size(tensor)
        self.memory = memory[:end]

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


def _size(tensor: Tensor) -> int:
    """Its bytes, up to where the next one may start."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that are the same."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
