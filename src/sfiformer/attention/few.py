"""Graphs of few nodes on a CPU: all of them in one call of compiled loops, where spans would take a call for each size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sfiformer.attention import cpu
from sfiformer.attention.dropout import kept_entries
from sfiformer.flow.rows import GENTLE

MOST = 32  # nodes of such a graph; beyond, PyTorch's products are worth their calls
# And, where heads are narrower than this, so are so many scores of graphs of one size, from half as many nodes on.
NARROW, ALIKE = 32, 1 << 16
FEW = GENTLE - 2  # in place of pivots, in rows that were solved here


class Few(NamedTuple):
    """The graphs of a batch that have few nodes, and the settings of their flows, as the loops take them."""

    graphs: Tensor  # their numbers, [g]
    places: np.ndarray  # [g, 3]: where each starts, its nodes n, and where its n × n flows begin in the mask
    lam: np.ndarray  # [g]
    alpha: np.float32
    potential: bool
    scale: np.float32
    keep: np.ndarray  # what dropout leaves of all these flows; empty where it is off
    growth: float  # 1/(1 − p): what is left keeps the mean

    @classmethod
    def of(
        cls,
        ptr: Tensor,
        lam: Tensor,
        q: Tensor,
        scale: float,
        alpha: float,
        potential: bool,
        dropout_p: float,
        seed: int,
    ) -> Few | None:
        """None where there are no such graphs, or no loops for them."""
        if not cpu.usable(
            torch.empty(0, 0, 0, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        ):
            return None
        sizes, heads, limits = ptr.diff(), q.shape[1], torch.finfo(torch.float32)
        strengths = lam.to(torch.float32).clamp(max=limits.max)
        # (At λ = 0 its derivative is another. Nobody need have looked at the offsets.)
        here = (sizes > 0) & (sizes <= MOST) & (strengths > 0) & (ptr[:-1] >= 0) & (ptr[1:] <= len(q))
        if q.shape[2] < NARROW:  # many of one size are worth PyTorch's calls before others are
            alike = sizes.where(here, 0).bincount()[sizes.where(here, 0)] * heads * sizes.square()
            here &= (sizes < MOST // 2) | (alike < ALIKE)
        graphs = here.nonzero().squeeze(-1)
        sizes, strengths = sizes[graphs], strengths[graphs]
        if 8 * int(sizes.sum()) <= len(q):  # the others would pay for copies of all
            return None
        flows = heads * sizes.square()
        ends = flows.cumsum(0)
        keep = kept_entries(int(ends[-1]), dropout_p, seed - 1) if dropout_p else np.empty(0, np.bool_)
        alpha = math.inf if alpha > limits.max else max(alpha, limits.tiny)
        places = torch.stack([ptr[graphs], sizes, ends - flows], dim=1).numpy()
        settings = (strengths.numpy(), np.float32(alpha), potential, np.float32(scale), keep)
        return cls(graphs, places, *settings, 1 / (1 - dropout_p))

    def attend(self, inputs: Sequence[Tensor], out: Tensor, eta: Tensor, pivots: Tensor) -> frozenset[int]:
        """Put their attention, η and the mark `FEW` there; the numbers of those where that is done: no row needs a pivot."""
        arrays = [_array(x, self.growth if place == 2 else 1.0) for place, x in enumerate(inputs)]
        found = out if out.dtype == torch.float32 else torch.zeros_like(out, dtype=torch.float32)
        solved = np.empty(len(self.graphs), np.bool_)
        results = eta[..., 0].numpy(), found.numpy(), solved
        self._loop(cpu.compiled().attend, *arrays, *self._settings, *results)
        if found is not out:
            out.copy_(found)
        pivots.fill_(FEW)  # others have theirs afterwards
        return frozenset(self.graphs[torch.from_numpy(solved)].tolist())

    def solved(self, pivots: Tensor) -> Few:
        """Those that have the mark."""
        which = (pivots[torch.from_numpy(self.places[:, 0]), 0] == FEW).numpy()
        graphs = self.graphs[torch.from_numpy(which)]
        return self._replace(graphs=graphs, places=self.places[which], lam=self.lam[which])

    def differentiate(
        self,
        grad_out: Tensor,
        inputs: Sequence[Tensor],
        eta: Tensor,
        of_inputs: Sequence[Tensor],
        of_lam: Tensor,
    ) -> None:
        """Put their gradients there, those of the inputs and of λ."""
        exact = [
            x if x.dtype == torch.float32 else torch.zeros_like(x, dtype=torch.float32) for x in of_inputs
        ]
        of_log_kappa = torch.empty(len(self.graphs))
        arrays, grad = [_array(x) for x in inputs], _array(grad_out, self.growth)
        found = [x.numpy() for x in (*exact, of_log_kappa)]
        self._loop(
            cpu.compiled().attend_backward,
            *arrays,
            *self._settings,
            eta.contiguous().numpy(),
            grad,
            *found,
        )
        for wanted, x in zip(of_inputs, exact, strict=True):
            if x is not wanted:
                wanted.copy_(x)
        of_lam[self.graphs] = of_log_kappa.to(of_lam.dtype) / torch.from_numpy(self.lam).to(of_lam.dtype)

    @property
    def _settings(self) -> tuple[object, ...]:
        return self.places, self.lam, self.scale, self.alpha, self.potential, self.keep

    def _loop(self, loop: Callable[..., bool], *arguments: Any) -> None:
        """Over all graphs, in shares of about as many scores."""
        if not len(self.places):
            return
        scores = np.cumsum(self.places[:, 1] ** 2)  # of a head
        shares = cpu.how_many(int(scores[-1]) * arguments[0].shape[1])
        between = np.searchsorted(scores, [scores[-1] * share // shares for share in range(1, shares)])
        cpu.in_shares(loop, [0, *between.tolist(), len(scores)], arguments)


def _array(x: Tensor, factor: float = 1.0) -> np.ndarray:
    exact = x.to(torch.float32).contiguous()
    return (exact if factor == 1 else exact * factor).numpy()
