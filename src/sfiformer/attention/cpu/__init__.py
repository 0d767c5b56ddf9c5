"""The flow problems of many rows on a CPU with Numba, in compiled loops: each row is solved while it is in the cache.

`sfiformer.flow.rows.solve` and `sfiformer.attention.blocks.flows_and_gradients` are the plain twins, which go over all rows
once for every operation. What is here is for float32 and for rows that need no pivot; where one does, the caller turns to the
twin for all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfiformer.attention.threads import at_once, free

MOST = 1024  # keys of a row: of more, sums in float32 are better made in the cascades of PyTorch
SHARE = 1 << 14  # scores that are worth a thread


def prepare() -> None:
    """Have the loops compiled, if there are any, in this thread: others of a team that wait for Numba cannot be interrupted."""
    compiled()


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are loops for such numbers."""
    return device.type == "cpu" and dtype == torch.float32 and compiled() is not None


def usable(s: Tensor) -> bool:
    """Whether the loops serve scores like these, [b, rows, n]."""
    return s.shape[-1] <= MOST and serves(s.dtype, s.device)


def solve(
    s: Tensor, u: Tensor, lam: Tensor, alpha: float, potential: bool, keep: np.ndarray | None
) -> tuple[Tensor, Tensor] | None:
    """Flows z [b, rows, n] and η p_max [b, rows, 1] of scores s, u [b, rows, n] with λ [b]; None where a row needs a pivot.

    ``keep`` [b · rows · n] says which flows dropout leaves.
    """
    z, eta = torch.empty_like(s), s.new_empty((*s.shape[:2], 1))
    problem = _arguments(s, u, lam, alpha, potential, keep)
    hard = _in_threads(compiled().solve, s, *problem, _rows(z), eta.view(-1).numpy())
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
    of_log_kappa = eta.new_empty(eta.shape)
    problem = _arguments(s, u, lam, alpha, potential, keep)
    etas = eta.reshape(-1).numpy()
    _in_threads(compiled().gradients, s, *problem, etas, _rows(g), of_log_kappa.view(-1).numpy())
    return of_log_kappa


def soften(s: Tensor, keep: np.ndarray | None) -> None:
    """Scores s [b, rows, n] become softmax(s), or what dropout leaves of it."""
    _in_threads(compiled().soften, s, _rows(s), _mask(s, keep))


def soften_gradients(s: Tensor, keep: np.ndarray | None, g: Tensor) -> None:
    """From g = ∂L/∂z, which becomes z, the softmax that dropout leaves, to ∂L/∂s in place of s."""
    _in_threads(compiled().soften_gradients, s, _rows(s), _mask(s, keep), _rows(g))


def normalise(packed: Tensor, normed: int, eps: float) -> tuple[list[Tensor], Tensor]:
    """The first parts of packed [nodes, parts, heads, width] by x / √(mean(x²) + eps), and 1 over the root of all of them.

    Those parts are [nodes, heads, width] each, the others [nodes, normed, heads].
    """
    packed, loop = packed.contiguous(), compiled("heads").normalise
    nodes, _, heads, width = packed.shape
    scales = packed.new_empty(nodes, normed, heads)
    outs = [packed.new_empty(nodes, heads, width) for _ in range(normed)]
    given, ends = (packed.numpy(), np.float32(eps), scales.numpy()), [out.numpy() for out in outs]

    def parts(first: int, last: int) -> bool:
        return any(loop(*given, part, out, first, last) for part, out in enumerate(ends))

    in_shares(parts, _shares(nodes, packed.numel()), ())
    return outs, scales


def normalise_gradients(grads: Sequence[Tensor], packed: Tensor, scales: Tensor, out: Tensor) -> None:
    """Of a loss with respect to those parts of packed, put into these of out [nodes, parts, heads, width]."""
    packed, loop = packed.contiguous(), compiled("heads").normalise_gradients
    given, of_parts = (
        (packed.numpy(), scales.numpy(), out.numpy()),
        [grad.contiguous().numpy() for grad in grads],
    )

    def parts(first: int, last: int) -> bool:
        return any(loop(*given, part, grad, first, last) for part, grad in enumerate(of_parts))

    in_shares(parts, _shares(len(packed), packed.numel()), ())


def _shares(rows: int, numbers: int) -> list[int]:
    """Where each thread's share of so many rows begins, and where the last ends."""
    shares = how_many(numbers)
    return [rows * share // shares for share in range(shares + 1)]


def _arguments(
    s: Tensor, u: Tensor, lam: Tensor, alpha: float, potential: bool, keep: np.ndarray | None
) -> tuple[Any, ...]:
    """As the loops take them."""
    return _rows(s), _rows(u), lam.numpy(), s.shape[1], np.float32(alpha), potential, _mask(s, keep)


def _mask(s: Tensor, keep: np.ndarray | None) -> np.ndarray:
    return np.empty((0, 0), np.bool_) if keep is None else keep.reshape(-1, s.shape[-1])


def _rows(x: Tensor) -> np.ndarray:
    return x.view(-1, x.shape[-1]).numpy()


def _in_threads(loop: Callable[..., bool], s: Tensor, *arguments: Any) -> bool:
    """All rows of scores [b, rows, n], shared among threads; whether any of them says so."""
    return in_shares(loop, _shares(s.shape[0] * s.shape[1], s.numel()), arguments)


def how_many(scores: int) -> int:
    """Threads that so many scores are worth."""
    return max(1, min(free(), scores // SHARE))


def in_shares(loop: Callable[..., bool], bounds: Sequence[int], arguments: Sequence[Any]) -> bool:
    """loop(*arguments, first, last) for each pair of bounds, in a thread of its own; whether any call says so."""
    shares, said = iter(list(pairwise(bounds))), []

    def take() -> None:
        for share in shares:
            said.append(loop(*arguments, *share))

    if len(bounds) > 2:
        at_once(take, len(bounds) - 1)
    else:
        take()
    return any(said)


@cache
def compiled(name: str = "loops") -> Any:
    """The module of that name, which takes a while to import and to compile; None without Numba."""
    try:
        loops = import_module(f"sfiformer.attention.cpu.{name}")
        loops.compile_all()
        return loops
    except ImportError as error:
        if find_spec("numba") is not None:
            warnings.warn(f"Numba is not used, and attention on a CPU is slower: {error}", stacklevel=2)
        return None
