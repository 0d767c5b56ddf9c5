"""Work side by side on a GPU, where a CUDA graph is captured: parts of a step that need not wait for one another.

Graphs of this size fill no GPU. In a captured step, what runs on a stream of its own is a parallel branch of the CUDA graph,
and so is its backward, which autograd runs on the same stream. Outside a capture the host is the limit, and all runs in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made", bound="Tensor | tuple[Any, ...]")


class Branches:
    """Branches of a kind off the stream that is current now, and their end.

    Tensors that pass from one stream to another are named at both places: their memory must not be used again before both
    streams are done with them.
    """

    def __init__(self, kind: str, like: Tensor) -> None:
        self.trunk = torch.cuda.current_stream(like.device) if _capturing(like) else None
        self.kind = kind
        self.used: list[torch.cuda.Stream] = []

    def next(self, *inputs: Tensor | None) -> AbstractContextManager[Any]:
        """A context for the work of one more branch, on tensors of the trunk."""
        if self.trunk is None:
            return nullcontext()
        side = _stream(self.kind, len(self.used), self.trunk.device)
        side.wait_stream(self.trunk)
        self.used.append(side)
        _shared(side, inputs)
        return torch.cuda.stream(side)

    def join(self, *outputs: Tensor | None) -> None:
        """Wait for all branches, which made these tensors."""
        if self.trunk is None:
            return
        for side in self.used:
            self.trunk.wait_stream(side)
        _shared(self.trunk, outputs)


_running_ahead: ContextVar[torch.cuda.Stream | None] = ContextVar("running_ahead", default=None)


def running_ahead(like: Tensor) -> AbstractContextManager[Any]:
    """A context for layers one after the other, in which what is made `ahead` waits for nothing but its beginning."""
    return _opened(like.device) if _capturing(like) else nullcontext()


@contextmanager
def _opened(device: torch.device) -> Iterator[None]:
    side = _stream("ahead", 0, device)
    side.wait_stream(torch.cuda.current_stream(device))
    token = _running_ahead.set(side)
    try:
        yield
    finally:
        _running_ahead.reset(token)


def stream_ahead(like: Tensor) -> torch.cuda.Stream | None:
    """The stream of what is made `ahead`, if there is one."""
    return _running_ahead.get() if _capturing(like) else None


def ahead(
    like: Tensor, work: Callable[[], Made], *weights: Tensor, uses: tuple[Tensor | None, ...] = ()
) -> Made:
    """What ``work`` makes of weights, of random numbers and of what there was before the layers, but of nothing that they make.

    In a captured step (`running_ahead`) that is on a stream of its own, and so is its backward: weights are made ready, and
    their gradients put in place, while the layers compute. Otherwise it is made when it is asked for, and so it is where
    weights are no parameters, since something on the way may have made them. ``uses`` are tensors from before the layers.
    """
    side = stream_ahead(like)
    if side is None or not all(isinstance(weight, torch.nn.Parameter) for weight in weights):
        return work()
    trunk = torch.cuda.current_stream(like.device)
    _shared(side, uses)
    with torch.cuda.stream(side):
        made = work()
    trunk.wait_stream(side)
    _shared(trunk, tuple(x for x in (made if isinstance(made, tuple) else (made,)) if isinstance(x, Tensor)))
    return made


def _capturing(like: Tensor) -> bool:
    """Whether a CUDA graph is being captured; the compiler cannot follow the question, and makes no branches."""
    compiling = torch.compiler.is_compiling()
    return like.is_cuda and not compiling and torch.cuda.is_current_stream_capturing()


def _shared(stream: torch.cuda.Stream, tensors: tuple[Tensor | None, ...]) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)


@cache
def _stream(kind: str, number: int, device: torch.device) -> torch.cuda.Stream:
    """The same for all branches of a kind: memory that a stream gave back is used again by that stream alone."""
    return torch.cuda.Stream(device)
