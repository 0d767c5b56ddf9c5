"""The running average of a model's weights: what is measured and kept where `optim.average` says so."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sfiformer.nn.model import SFiFormer


class Average:
    """After step t

        θ̄ ← θ̄ + max(1 − share, 1/t) (θ − θ̄) ,

    the mean of all steps at first, and later of about the last 1/(1 − share). That goes for weights and for the statistics
    of norms; whole numbers are taken over as they are. Nothing waits for a device, so that a captured step can hold it.
    """

    def __init__(self, model: SFiFormer, share: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()  # θ̄
        self.trained, self.share = model, share
        self.steps = torch.zeros((), device=next(model.parameters()).device)
        # What a state holds is the memory of the model itself.
        pairs = list(zip(self.model.state_dict().values(), model.state_dict().values(), strict=True))
        self._means = [pair for pair in pairs if pair[0].is_floating_point()]
        self._numbers = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of one more step into account."""
        self.steps += 1
        means, new = map(list, zip(*self._means, strict=True))
        moves = torch._foreach_sub(new, means)
        torch._foreach_mul_(moves, (1 / self.steps).clamp(min=1 - self.share))
        torch._foreach_add_(means, moves)
        for own, number in self._numbers:
            own.copy_(number)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must have beside the averaged weights."""
        return {"steps": self.steps, "weights": self.trained.state_dict()}

    def resume(self, averaged: Mapping[str, Tensor], steps: Tensor) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(averaged)
        self.steps.copy_(steps)
