"""Losses over target rows, some of which may have no label."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor


class Loss(ABC):
    """A weighted mean over the labels present: total / weight.

    Missing labels are -1 (integers) or NaN (floats). Shapes do not depend on which are missing, and a batch
    without a single label has the loss 0. Ranks of a distributed run sum `total` and `weight` (and `counts`)
    over all ranks to have the loss of the global batch.
    """

    @abstractmethod
    def terms(self, outputs: Tensor, target: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(total, weight), both scalars. `counts` are those of the global batch, by default of this one."""

    def counts(self, target: Tensor) -> Tensor | None:
        """What `terms` needs to know of the whole batch: rows of each class, or None."""
        return None

    def __call__(self, outputs: Tensor, target: Tensor, counts: Tensor | None = None) -> Tensor:
        total, weight = self.terms(outputs, target, counts)
        return total / weight.clamp(min=torch.finfo(weight.dtype).tiny)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class CrossEntropy(Loss):
    """Cross-entropy of logits [R, C] with classes [R].

    Weighted, each row counts by its class, w_c = (V - n_c)/V, n_c the rows of class c among the V labelled
    rows of the batch, and the mean is Σ w_y ℓ / Σ w_y. A batch of one class alone has weight 0, hence loss 0.
    """

    def __init__(self, classes: int, weighted: bool = False) -> None:
        self.classes = classes
        self.weighted = weighted

    def counts(self, target: Tensor) -> Tensor | None:
        return class_counts(target, self.classes) if self.weighted else None

    def terms(self, outputs: Tensor, target: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        row_class = target.long().clamp(min=0)  # [R]
        weight = (target >= 0).to(outputs.dtype)
        if self.weighted:
            counts = class_counts(target, self.classes) if counts is None else counts
            weight = weight * _class_weights(counts).to(outputs.dtype)[row_class]
        row_loss = -outputs.log_softmax(-1).gather(-1, row_class[:, None])[:, 0]  # [R]
        return (weight * row_loss).sum(), weight.sum()


class BinaryCrossEntropy(Loss):
    """Cross-entropy of logits, [R] or [R, T], with as many labels 0 and 1: the mean over those present.

    Weighted (one logit a row), each row counts by its class as in `CrossEntropy`, but the mean is over the
    rows: Σ w_y ℓ / V.
    """

    def __init__(self, weighted: bool = False) -> None:
        self.weighted = weighted

    def counts(self, target: Tensor) -> Tensor | None:
        return class_counts(target, 2) if self.weighted else None

    def terms(self, outputs: Tensor, target: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        target = target.reshape(outputs.shape)
        present = present_labels(target)
        label = torch.where(present, target, 0).to(outputs.dtype)
        losses = F.binary_cross_entropy_with_logits(outputs, label, reduction="none")
        weight = present.to(outputs.dtype)
        total_weight = weight.sum()
        if self.weighted:
            counts = class_counts(target, 2) if counts is None else counts
            weight = weight * _class_weights(counts).to(outputs.dtype)[label.long()]
        return (weight * losses).sum(), total_weight


class L1(Loss):
    """Mean absolute error of outputs [R, T] over the targets present."""

    def terms(self, outputs: Tensor, target: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        target = target.reshape(outputs.shape).to(outputs.dtype)
        present = present_labels(target)
        error = (outputs - torch.where(present, target, 0)).abs()
        return torch.where(present, error, 0).sum(), present.sum().to(outputs.dtype)


def present_labels(target: Tensor) -> Tensor:
    """Where there is a label: not NaN in floats, not negative in integers."""
    return ~target.isnan() if target.is_floating_point() else target >= 0


def class_counts(target: Tensor, classes: int) -> Tensor:
    """Rows of each class [C], float; rows without a label are not counted."""
    target = target.reshape(-1)
    present = present_labels(target)
    counts = torch.zeros(classes, device=target.device)
    return counts.index_add_(0, torch.where(present, target, 0).long(), present.to(counts.dtype))


def _class_weights(counts: Tensor) -> Tensor:
    """w_c = (V - n_c)/V; what an absent class would weigh does not matter, as no row has it."""
    rows = counts.sum().clamp(min=1)
    return (rows - counts) / rows
