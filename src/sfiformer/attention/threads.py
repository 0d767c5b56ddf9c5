"""Work of ours on a CPU, on the threads that PyTorch itself computes with.

Those are OpenMP's. After an operator they keep their cores busy for milliseconds with waiting for the next one, in which other
threads gain nothing. What PyTorch is to compute in the midst of such work is left to the one thread that asks for it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

import torch

Piece = TypeVar("Piece")

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PROCESS = os.getpid()


# What a piece costs, in scores, for which PyTorch keeps all its threads busy as well as pieces side by side do.
LARGE = 1 << 19


def side_by_side(
    work: Callable[[Piece], None],
    pieces: Iterable[Piece],
    device: torch.device,
    cost: Callable[[Piece], int] = lambda piece: 1,
) -> None:
    """work(piece) for every piece; on a CPU with several threads each takes one after the other, the costly ones first.

    A large piece that would keep one thread at work long after the others are done is worked on ahead of them, by all.
    """
    pieces, threads = list(pieces), free()
    if device.type != "cpu" or min(threads, len(pieces)) < 2 or _openmp(os.getpid()) is None:
        for piece in pieces:
            work(piece)
        return
    pieces.sort(key=cost, reverse=True)
    total, ahead = sum(map(cost, pieces)), 0
    for piece in pieces:
        if cost(piece) < LARGE or cost(piece) * threads <= 1.5 * total:
            break
        work(piece)
        total, ahead = total - cost(piece), ahead + 1
    left = iter(pieces[ahead:])

    def take() -> None:
        try:
            for piece in left:
                work(piece)
        except BaseException:
            for _ in left:  # the others need not begin what is left
                pass
            raise

    if ahead < len(pieces):
        at_once(torch.inference_mode()(take), min(threads, len(pieces) - ahead))


def free() -> int:
    """How many threads work can be shared among: one, in the midst of such work."""
    openmp = _openmp(os.getpid())
    return 1 if openmp is not None and openmp.omp_in_parallel() else torch.get_num_threads()


def at_once(work: Callable[[], None], threads: int) -> None:
    """work() in so many threads: PyTorch's, or others where it does not say how to reach them."""
    errors: list[BaseException] = []
    whole: list[int] = []  # threads that came to the end of it
    openmp = _openmp(os.getpid())

    def careful(_: Any = None) -> None:
        try:
            with _alone(openmp):
                work()
            whole.append(get_ident())
        except BaseException as error:  # which ctypes would print and forget
            errors.append(error)

    if openmp is not None:
        openmp.GOMP_parallel(_WORK(careful), None, ctypes.c_uint(threads), ctypes.c_uint(0))
    else:
        others = [_pool(os.getpid()).submit(careful) for _ in range(threads - 1)]
        careful()
        wait(others)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback knows of them, and would keep all that there is here
    if get_ident() not in whole:  # a signal came just before this thread could be careful
        raise KeyboardInterrupt


@contextmanager
def _alone(openmp: Any | None) -> Iterator[None]:
    """Products in this thread are made by it alone. MKL goes by a setting of each thread's, and would else ask for others,
    which it is not given; two runs then need not agree to the bit."""
    if openmp is None or not hasattr(openmp, "MKL_Set_Num_Threads_Local"):
        yield
        return
    before = openmp.MKL_Set_Num_Threads_Local(1)
    try:
        yield
    finally:
        openmp.MKL_Set_Num_Threads_Local(before)


@cache
def _openmp(process: int) -> Any | None:
    """The library that PyTorch computes with, where that is GNU's OpenMP or has its interface.

    None in a process that was forked: its threads did not come along.
    """
    for path in Path(torch.__file__).with_name("lib").glob("libtorch_cpu.*"):
        library = ctypes.CDLL(str(path))
        if process == _PROCESS and hasattr(library, "GOMP_parallel"):
            return library
    return None


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "attention")
