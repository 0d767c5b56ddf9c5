"""Flows with friction in graphs of few nodes, as `sfiformer.attention.few` takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sfiformer.attention import cpu
from sfiformer.attention.few import Few, in_single, put
from sfiformer.flow.precision import narrowed
from sfiformer.flow.rows import GENTLE

FEW = GENTLE - 2  # in place of pivots, in rows that were solved here


class FewFlows(NamedTuple):
    """Such graphs, and the settings of their flows."""

    few: Few
    lam: np.ndarray  # [g]
    scale: np.float32
    alpha: np.float32
    potential: bool

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
    ) -> FewFlows | None:
        if not lam.is_cpu:  # the loops are a CPU's, and it alone can read λ without waiting
            return None
        limits = torch.finfo(torch.float32)
        strengths = lam.to(torch.float32).clamp(max=limits.max).numpy()
        few = Few.of(ptr, q, dropout_p, seed, strengths > 0)  # at λ = 0 its derivative is another
        if few is None:
            return None
        alpha = math.inf if alpha > limits.max else max(alpha, limits.tiny)
        return cls(few, strengths[few.graphs], np.float32(scale), np.float32(alpha), potential)

    def attend(self, inputs: Sequence[Tensor], out: Tensor, eta: Tensor, pivots: Tensor) -> frozenset[int]:
        """Put their attention, η and the mark `FEW` there; the numbers of those where that is done: no row needs a pivot."""
        arrays = [self.few.array(x, grown=place == 2) for place, x in enumerate(inputs)]
        found, solved = in_single(out), np.empty(len(self.lam), np.bool_)
        results = eta[..., 0].numpy(), found.numpy(), solved
        self.few.loop(cpu.compiled().attend, *arrays, *self._settings, *results)
        put(found, out)
        pivots.fill_(FEW)  # others have theirs afterwards
        return self.few.where(solved).numbers

    def solved(self, pivots: Tensor) -> FewFlows:
        """Those that have the mark."""
        which = pivots[:, 0].numpy()[self.few.places[:, 0]] == FEW
        return self._replace(few=self.few.where(which), lam=self.lam[which])

    def differentiate(
        self,
        grad_out: Tensor,
        inputs: Sequence[Tensor],
        eta: Tensor,
        of_inputs: Sequence[Tensor],
        of_lam: Tensor,
    ) -> None:
        """Put their gradients there, those of the inputs and of λ."""
        found = [in_single(x) for x in of_inputs]
        of_log_kappa = np.empty(len(self.lam), np.float32)
        given = [self.few.array(x) for x in inputs]
        known = eta.contiguous().numpy(), self.few.array(grad_out, grown=True)
        results = [*(x.numpy() for x in found), of_log_kappa]
        self.few.loop(cpu.compiled().attend_backward, *given, *self._settings, *known, *results)
        for here, x in zip(found, of_inputs, strict=True):
            put(narrowed(here, x.dtype), x)
        of_lam[torch.from_numpy(self.few.graphs)] = torch.from_numpy(of_log_kappa / self.lam).to(of_lam.dtype)

    @property
    def _settings(self) -> tuple[object, ...]:
        return self.few.places, self.lam, self.scale, self.alpha, self.potential, self.few.keep
