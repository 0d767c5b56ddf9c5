"""Says that kernels are being compiled, where a run would seem to stand still."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sfiformer.attention import kernels

MESSAGE = "compiling GPU kernels: half a minute to two, once for each model on a machine …"


@contextmanager
def announced(say: Callable[[str], None], device: torch.device) -> Iterator[None]:
    """On a GPU, say so once, as soon as Triton has compiled a kernel that it did not find in its cache."""
    if device.type != "cuda" or not kernels.HAS_TRITON:
        yield
        return
    from triton import knobs

    earlier, told = knobs.compilation.listener, False

    def listen(*, cache_hit: bool, **event: Any) -> None:
        nonlocal told
        if not (cache_hit or told):
            told = True
            say(MESSAGE)
        if earlier is not None:
            earlier(cache_hit=cache_hit, **event)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = earlier
