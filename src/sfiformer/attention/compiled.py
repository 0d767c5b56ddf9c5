"""The flow problems of many rows in compiled loops, on a CPU with Numba: each row is solved while it is in the cache.

`sfiformer.flow.rows.solve` and `sfiformer.attention.blocks.flows_and_gradients` are the plain twins, which go over all rows
once for every operation. What is here is for float32 and for rows that need no pivot (`GENTLE`); where one does, the caller
turns to the twin for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

HAS_NUMBA = find_spec("numba") is not None


def usable(x: Tensor) -> bool:
    """Whether the loops serve this tensor."""
    return HAS_NUMBA and x.device.type == "cpu" and x.dtype == torch.float32


def solve(
    s: Tensor, u: Tensor, lam: Tensor, alpha: float, potential: bool, keep: np.ndarray | None
) -> tuple[Tensor, Tensor] | None:
    """Flows z [b, rows, n] and η p_max [b, rows, 1] of scores s, u [b, rows, n] with λ [b]; None where a row needs a pivot.

    ``keep`` [b, rows, n] says which flows dropout leaves.
    """
    z, eta = torch.empty_like(s), s.new_empty((*s.shape[:2], 1))
    rows = (_rows(s), _rows(u), lam.numpy(), s.shape[1], np.float32(alpha), potential, _bytes(keep, s))
    hard = _in_threads(_loops().solve, len(s) * s.shape[1], *rows, _rows(z), eta.view(-1).numpy())
    return None if hard else (z, eta)


def gradients(
    s: Tensor,
    u: Tensor,
    lam: Tensor,
    alpha: float,
    potential: bool,
    keep: np.ndarray | None,
    eta: Tensor,
    g: Tensor,
) -> Tensor:
    """From g = ∂L/∂z, which becomes z, to ∂L/∂s and ∂L/∂u in place of s and u; ∂L/∂(log κ) [b, rows, 1]."""
    of_log_kappa = torch.empty_like(eta)
    rows = (_rows(s), _rows(u), lam.numpy(), s.shape[1], np.float32(alpha), potential, _bytes(keep, s))
    etas = eta.reshape(-1).numpy()
    _in_threads(_loops().gradients, len(s) * s.shape[1], *rows, etas, _rows(g), of_log_kappa.view(-1).numpy())
    return of_log_kappa


def _rows(x: Tensor) -> np.ndarray:
    return x.view(-1, x.shape[-1]).numpy()


def _bytes(keep: np.ndarray | None, like: Tensor) -> np.ndarray:
    """As the loops take it: [rows, n], or nothing."""
    return np.empty((0, 0), np.bool_) if keep is None else keep.reshape(-1, like.shape[-1])


def _in_threads(loop: Callable[..., int], rows: int, *arguments: Any) -> int:
    """Each thread of PyTorch's number has its share of the rows; the sum of what the loops return."""
    threads = max(1, min(torch.get_num_threads(), rows // 64))
    bounds = [rows * part // threads for part in range(threads + 1)]
    others = [
        _pool(os.getpid(), threads).submit(loop, *arguments, first, last)
        for first, last in pairwise(bounds[1:])
    ]
    return loop(*arguments, 0, bounds[1]) + sum(other.result() for other in others)


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Of a process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads, "rows")


@cache
def _loops() -> Any:
    from sfiformer.attention import loops  # Numba takes a while to import

    return loops
