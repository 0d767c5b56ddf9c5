"""Graphs of few nodes on a CPU: all of them in one call of compiled loops, where spans would take a call for each size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sfiformer.attention import cpu
from sfiformer.attention.dropout import kept_entries

MOST = 64  # nodes of such a graph; beyond, PyTorch's products are worth their calls


class Few(NamedTuple):
    """The graphs of a batch that have few nodes, as the loops take them."""

    graphs: np.ndarray  # their numbers, [g]
    places: np.ndarray  # [g, 3]: where each starts, its nodes n, and where its n × n flows begin in the mask
    heads: int
    keep: np.ndarray  # what dropout leaves of all these flows; empty where it is off
    growth: float  # 1/(1 − p): what is left keeps the mean

    @classmethod
    def of(
        cls, ptr: Tensor, q: Tensor, dropout_p: float, seed: int, among: np.ndarray | None = None
    ) -> Few | None:
        """Those of queries [nodes, heads, width], and ``among`` some; None where there are none, or no loops for them."""
        if not cpu.serves(torch.promote_types(q.dtype, torch.float32), q.device):
            return None
        offsets, (nodes, heads, _) = ptr.numpy(), q.shape
        sizes = np.diff(offsets)
        # (Nobody need have looked at the offsets.)
        here = (sizes > 0) & (sizes <= MOST) & (offsets[:-1] >= 0) & (offsets[1:] <= nodes)
        if among is not None:
            here &= among
        graphs = np.flatnonzero(here)
        sizes = sizes[graphs]
        if 8 * int(sizes.sum()) <= nodes:  # the others would pay for copies of all
            return None
        flows = heads * sizes**2
        ends = flows.cumsum()
        keep = kept_entries(int(ends[-1]), dropout_p, seed - 1) if dropout_p else np.empty(0, np.bool_)
        places = np.stack([offsets[graphs], sizes, ends - flows], axis=1)
        return cls(graphs, places, heads, keep, 1 / (1 - dropout_p))

    def where(self, which: np.ndarray) -> Few:
        """Some of them, by a mask."""
        return self._replace(graphs=self.graphs[which], places=self.places[which])

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(self.graphs.tolist())

    def array(self, x: Tensor, *, grown: bool = False) -> np.ndarray:
        """As the loops take it; times 1/(1 − p), if asked for."""
        exact = x.to(torch.float32).contiguous()
        return (exact * self.growth if grown and self.growth != 1 else exact).numpy()

    def loop(self, loop: Callable[..., bool], *arguments: Any) -> None:
        """Over all graphs, in shares of about as many scores."""
        if not len(self.places):
            return
        scores = np.cumsum(self.places[:, 1] ** 2)  # of a head
        shares = cpu.how_many(int(scores[-1]) * self.heads)
        between = np.searchsorted(scores, [scores[-1] * share // shares for share in range(1, shares)])
        cpu.in_shares(loop, [0, *between.tolist(), len(scores)], arguments)


def in_single(x: Tensor) -> Tensor:
    """x, or where it is not in float32 zeros that are, for the loops to write to."""
    return x if x.dtype == torch.float32 else torch.zeros_like(x, dtype=torch.float32)


def put(found: Tensor, x: Tensor) -> None:
    """What was written there into x."""
    if found is not x:
        x.copy_(found)
