"""Metrics over target rows, some of which may have no label; exact over batches and over ranks.

Each is a torchmetrics `Metric` with a `name` and `higher_is_better`: `update(outputs, target)` takes a
model's raw outputs, `compute()` gives the value as a float, `reset()` starts anew.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassRecall
from torchmetrics.wrappers.abstract import WrapperMetric

from .losses import present_labels

NAN = float("nan")
TOGETHER = 1 << 21  # scores that are ranked at a time


class ClassMetric(WrapperMetric):
    """A metric of predicted classes, from logits [R, C], or [R] or [R, 1] for two classes.

    A score that has one value a class is averaged over the classes in `over` (None: all) for which it is
    defined.
    """

    higher_is_better = True

    def __init__(self, name: str, score: Metric, over: Sequence[int] | None = None) -> None:
        super().__init__()
        self.name = name
        self.score = score
        self.over = None if over is None else list(over)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        one_logit = outputs.ndim == 1 or outputs.shape[-1] == 1
        predicted = (outputs.reshape(-1) > 0).long() if one_logit else outputs.argmax(-1)
        target = target.reshape(-1)
        self.score.update(predicted, torch.where(present_labels(target), target, -1).long())

    def compute(self) -> float:
        values = self.score.compute().reshape(-1)
        return float(values[self.over].nanmean() if self.over is not None else values.nanmean())

    def reset(self) -> None:
        super().reset()
        self.score.reset()


def accuracy(classes: int) -> ClassMetric:
    """The share of rows whose class is right."""
    return ClassMetric(
        "accuracy", MulticlassAccuracy(classes, average="micro", ignore_index=-1, validate_args=False)
    )


def mean_recall(classes: int) -> ClassMetric:
    """The share of a class's rows that are found, averaged over the classes that have rows."""
    score = MulticlassRecall(classes, average="none", ignore_index=-1, validate_args=False, zero_division=NAN)
    return ClassMetric("mean_recall", score)


def macro_f1(classes: int, over: Sequence[int] | None = None) -> ClassMetric:
    """F1 averaged over the classes (those in `over`) that are predicted or present among the labels."""
    score = MulticlassF1Score(
        classes, average="none", ignore_index=-1, validate_args=False, zero_division=NAN
    )
    return ClassMetric("macro_f1", score, over)


class RankingMetric(Metric):
    """A score of one binary target, averaged over the targets that have both classes among their labels.

    Outputs [R, T] (or [R]) and labels of as many entries are kept until `compute`. A score is that of
    the ranking as `_ranking` gives it.
    """

    higher_is_better = True
    full_state_update = False
    scores: list[Tensor]
    labels: list[Tensor]

    def __init__(self, name: str, targets: int, score: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.name = name
        self.targets = targets
        self.score = score
        # Flat, because a rank that saw no batch joins with a flat empty tensor.
        self.add_state("scores", default=[], dist_reduce_fx="cat")
        self.add_state("labels", default=[], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, target: Tensor) -> None:
        target = target.reshape(outputs.shape)
        self.scores.append(outputs.detach().reshape(-1).float())
        self.labels.append(torch.where(present_labels(target), target, -1).reshape(-1).float())

    def compute(self) -> float:
        # Targets first: along neighbours in memory a GPU adds up in parallel, across them in turn.
        scores = _joined(self.scores).view(-1, self.targets).T.contiguous()
        labels = _joined(self.labels).view(-1, self.targets).T.contiguous()
        together = max(1, TOGETHER // max(1, scores.size(1)))
        values = [
            self._values(*some) for some in zip(scores.split(together), labels.split(together), strict=True)
        ]
        defined = torch.cat(values)
        return float(defined.mean()) if len(defined) else NAN

    def _values(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Of some targets: of those that have both classes."""
        hits, misses = _ranking(scores, labels)
        both = (hits[:, -1] > 0) & (misses[:, -1] > 0)
        return self.score(hits[both], misses[both])


def average_precision(targets: int = 1) -> RankingMetric:
    """Σ (recall step)·precision down the ranking; equal scores are one step."""
    return RankingMetric("ap", targets, _average_precision)


def roc_auc(targets: int = 1) -> RankingMetric:
    """The chance that a positive scores above a negative, ties counting half."""
    return RankingMetric("roc_auc", targets, _roc_auc)


class MAE(Metric):
    """Mean absolute error over the targets present; `scale` [T] is what a unit of each of T outputs is worth.

    One target's is in its own units. Those of several would be that of the one with the largest: where they were brought
    to one scale the errors of outputs are averaged as they are, in standard deviations of each, the "relative_mae".
    """

    higher_is_better = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, scale: Sequence[float] | None = None, targets: int = 1) -> None:
        super().__init__()
        self.relative = scale is not None and len(scale) > 1
        self.name = "relative_mae" if self.relative else "mae"
        self.scale = [1.0] * targets if scale is None else [float(unit) for unit in scale]
        for name, dtype in (("total", torch.float64), ("count", torch.int64)):
            self.add_state(name, default=torch.zeros(len(self.scale), dtype=dtype), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, target: Tensor) -> None:
        target = target.reshape(outputs.shape)
        present = present_labels(target)
        error = torch.where(present, (outputs.detach().double() - target.double()).abs(), 0)
        targets = len(self.scale)
        self.total += error.reshape(-1, targets).sum(0) * error.new_tensor(self.scale)
        self.count += present.reshape(-1, targets).sum(0)

    def compute(self) -> float:
        total = self.total / self.total.new_tensor(self.scale) if self.relative else self.total
        return float(total.sum() / self.count.sum())

    def by_target(self) -> list[float]:
        """Of each target alone, in its own units; NaN where it is nowhere present."""
        return (self.total / self.count).tolist()


def _joined(parts: list[Tensor] | Tensor) -> Tensor:
    """A list state is one tensor already once ranks were joined."""
    return parts if isinstance(parts, Tensor) else torch.cat(parts) if parts else torch.zeros(0)


def _ranking(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How many positives and how many negatives of each target there are down to each score, [T, R + 1] from none to all.

    From scores [T, R] and labels 1, 0 or −1, which is none. Equal scores are one step: all have what is down to the last.
    """
    scores, order = scores.sort(descending=True)
    labels = labels.gather(1, order)
    places = torch.arange(scores.size(1), device=scores.device).expand(scores.shape)
    ends = torch.cat([scores[:, :-1] != scores[:, 1:], torch.ones_like(scores[:, :1], dtype=torch.bool)], 1)
    # The last place with the same score.
    last = torch.where(ends, places, scores.size(1)).flip(1).cummin(1).values.flip(1)
    down_to = ((labels == kind).double().cumsum(1).gather(1, last) for kind in (1, 0))
    hits, misses = (F.pad(count, (1, 0)) for count in down_to)
    return hits, misses


def _average_precision(hits: Tensor, misses: Tensor) -> Tensor:
    precision = hits[:, 1:] / (hits + misses)[:, 1:].clamp(min=1)  # none yet where those above have no label
    return (hits.diff() * precision).sum(1) / hits[:, -1]


def _roc_auc(hits: Tensor, misses: Tensor) -> Tensor:
    return torch.trapezoid(hits, misses) / (hits[:, -1] * misses[:, -1])
