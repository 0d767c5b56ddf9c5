"""Kernels are compiled side by side ahead of the first step, and a run says so where it would seem to stand still."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from importlib.util import find_spec
from threading import Lock, get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfiformer.attention import kernels
from sfiformer.data.batch import GraphBatch
from sfiformer.training.replay import Replay

MESSAGE = "compiling GPU kernels, once for each model on a machine …"


@contextmanager
def announced(say: Callable[[str], None], device: torch.device) -> Iterator[None]:
    """On a GPU, say so once, as soon as Triton has compiled a kernel that it did not find in its cache."""
    if device.type != "cuda" or not kernels.HAS_TRITON:
        yield
        return
    from triton import knobs

    earlier, told, one_at_a_time = knobs.compilation.listener, False, Lock()

    def listen(*, cache_hit: bool, **event: Any) -> None:
        nonlocal told
        with one_at_a_time:
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


Autocast = Callable[[], AbstractContextManager[Any]]


def rehearse(model: nn.Module, firsts: Mapping[str, tuple[Replay, np.ndarray]], autocast: Autocast) -> None:
    """Compile the kernels of the steps ("step") and of evaluations, which first batches would ask for one after the other.

    ``firsts`` are the works that are to be replayed, each with the numbers of the graphs that it begins with. The model and
    its gradients stay as they are.
    """
    # What compiles ahead is no part of Triton's interface. Where it is not there, steps compile as they come.
    if not (kernels.HAS_TRITON and find_spec("triton.runtime._async_compile")):
        return
    model = deepcopy(model)
    for name, (replay, graphs) in firsts.items():
        _rehearse(model.train(name == "step"), replay.example(graphs), autocast)


def _rehearse(model: nn.Module, batch: GraphBatch, autocast: Autocast) -> None:
    """One pass over a batch, with its derivative in training."""
    with compiled_only():
        with torch.set_grad_enabled(model.training), autocast():
            outputs: Tensor = model(batch)
        if model.training:
            outputs.float().square().sum().backward()
            model.zero_grad()


_ONE_AT_A_TIME = Lock()  # of those that replace what launches


@contextmanager
def compiled_only() -> Iterator[None]:
    """Within, this thread's Triton kernels are compiled, many at a time, and none is launched: what they would write is
    whatever lay there.

    Triton hands over to its compiler's threads what the thread of the context asks for, so the backward stays in that thread.
    """
    from triton import AsyncCompileMode, JITFunction
    from triton.runtime._async_compile import active_mode

    here = get_ident()

    def compiled(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launched(self, *args, warmup=warmup or get_ident() == here, **options)

    with _ONE_AT_A_TIME:
        launched = JITFunction.run
        try:
            JITFunction.run = compiled
            with (
                ThreadPoolExecutor(torch.get_num_threads()) as pool,
                AsyncCompileMode(pool),
                torch.autograd.set_multithreading_enabled(False),
            ):
                yield
        finally:
            JITFunction.run = launched
            active_mode.set(None)  # which the mode leaves as it is where a kernel does not compile
