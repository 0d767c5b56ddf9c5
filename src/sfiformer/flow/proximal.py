"""The paper's iteration: proximal gradient steps of Barzilai–Borwein length, corrected and made definite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sfiformer.hashing import MASK, mixed, uniform


@dataclass(frozen=True)
class Proximal:
    """Minimises ½ Σ r z² + λ Σ f |z| + (α/2)(Σ z − 1)² step by step; autograd runs back through the steps.

        Y = Z − t (R∘Z + α (Z1 − 1) 1ᵀ) ,    Z ← sign(Y) max(|Y| − t λ F, 0) ,    t ← ⟨ΔZ, Δ∇⟩ / ‖Δ∇‖² ,

    from t = 1/(1 + α n), with one step length for each matrix of rows (a graph and head), never across a batch. As printed
    in the paper the threshold and the step length are wrong; in this form the iteration is right and still slow: it is kept
    for comparison.
    """

    iterations: int = 10
    """Steps at most."""
    tolerance: float = 0.0
    """Stop when no matrix moved by more than this, relative to its size; 0: always do all the steps."""
    start: Literal["uniform", "constant", "softmax"] = "uniform"
    """First Z: seeded uniform numbers with rows normalised to sum 1 (a number depends on its head, row and column alone,
    not on how many of them there are); 1/n; or the flows without friction, softmax(s)."""
    seed: int = 0
    """Of the uniform start."""

    def __post_init__(self) -> None:
        if self.iterations < 0:
            raise ValueError(f"iterations must not be negative, got {self.iterations}")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must not be negative, got {self.tolerance}")
        if self.start not in ("uniform", "constant", "softmax"):
            raise ValueError(f"start must be 'uniform', 'constant' or 'softmax', got {self.start!r}")

    def first(self, resistance: Tensor, mask: Tensor) -> Tensor:
        """The start of the iteration, rows of sum 1 over the keys that the mask leaves, [..., n]."""
        if self.start == "uniform":
            z = _uniform(resistance, self.seed)
        else:
            z = torch.ones_like(resistance) if self.start == "constant" else 1 / resistance.detach()
        z = torch.where(mask, z, 0)
        return z / z.sum(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)

    def first_length(self, alpha: Tensor, mask: Tensor) -> Tensor:
        """t of the first step for each matrix, [..., 1, 1]."""
        count = mask.sum(-1, keepdim=True).amax(_matrix(mask), keepdim=True)
        return (1 / (1 + alpha * count)).expand_as(count)

    def __call__(
        self, resistance: Tensor, friction: Tensor, lam: Tensor, alpha: Tensor, mask: Tensor
    ) -> Tensor:
        """Flows [..., n]; the last two dimensions are one matrix. Masked keys carry none."""
        matrix = _matrix(resistance)
        threshold = torch.where(mask, lam * friction, 0)

        def gradient(z: Tensor) -> Tensor:
            return torch.where(mask, resistance * z + alpha * (z.sum(-1, keepdim=True) - 1), 0)

        z = self.first(resistance, mask)
        slope = gradient(z)
        step = self.first_length(alpha, mask)
        for _ in range(self.iterations):
            y = z - step * slope
            moved = torch.relu(y - step * threshold) - torch.relu(-y - step * threshold)
            new_slope = gradient(moved)
            change, bend = moved - z, new_slope - slope
            curvature = (bend * bend).sum(matrix, keepdim=True)
            along = (change * bend).sum(matrix, keepdim=True)
            usable = (curvature > 0) & (along > 0)
            step = torch.where(usable, along / torch.where(usable, curvature, 1), step)
            z, slope = moved, new_slope
            if self.tolerance and bool(
                (change.norm(dim=matrix) <= self.tolerance * z.norm(dim=matrix)).all()
            ):
                break
        return z


def _matrix(x: Tensor) -> tuple[int, ...]:
    """The dimensions of one matrix of rows, or of a single row."""
    return (-2, -1) if x.dim() > 1 else (-1,)


def _uniform(like: Tensor, seed: int) -> Tensor:
    """Numbers between 0 and 1 for the last three dimensions of ``like``, by their places."""
    bits = torch.full((), seed & MASK, dtype=torch.int64, device=like.device)
    for size in like.shape[-3:]:
        bits = mixed(bits.unsqueeze(-1) + torch.arange(1, size + 1, device=like.device))
    return uniform(bits).to(like.dtype).expand_as(like)
