"""Compiles what a report needs before it is timed: kernels one after the other would take minutes."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch

from batches import LAM, Batch


class Case(NamedTuple):
    """A batch that will be called."""

    sizes: list[int]
    heads: int
    width: int
    dtype: torch.dtype
    on_chip: int | None = None  # nodes of a graph whose rows stay there, if not as usual
    potential: tuple[bool, ...] = (False, True)  # in these scalings


def compile_kernels(cases: Iterable[Case], device: torch.device) -> None:
    """Calls the exact method once for each case and scaling, in processes side by side.

    Triton keeps what it compiles on disk, where this process finds it.
    """
    tf32 = torch.backends.cuda.matmul.allow_tf32
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        calls = [
            pool.submit(_call, case, device, potential, tf32)
            for case in cases
            for potential in case.potential
        ]
        for call in calls:
            call.result()


def _call(case: Case, device: torch.device, potential: bool, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    if case.on_chip is not None:
        from sfiformer.attention.kernels import launch

        launch.MAX_NODES = launch.MAX_FLOAT32 = case.on_chip  # of this process alone
    batch = Batch(case.sizes, case.heads, case.width, device, case.dtype)
    call = batch.sfi(lam=LAM, scaling="potential") if potential else batch.sfi()
    call()
