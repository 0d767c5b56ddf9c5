"""How far a run has come, and what came of it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sfiformer.config import TrainerConfig
from sfiformer.errors import UserError
from sfiformer.training.metrics_log import Record


@dataclass
class State:
    """The place in training, sums over the epoch under way, and the records of the epochs before."""

    epoch: int = 0  # whole epochs done
    step: int = 0  # steps done of the next
    loss_sum: float = 0.0  # over its graphs so far, of their batches' losses
    graphs: int = 0
    train_seconds: float = 0.0
    seconds: float = 0.0
    history: list[Record] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Graphs a second."""
        return self.graphs / self.train_seconds

    def finish_epoch(self, record: Record) -> None:
        """Count an epoch as done; the sums start anew."""
        history = [*self.history, record]
        self.__init__(epoch=self.epoch + 1, history=history)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], place: Path) -> "State":
        """Raises UserError, naming the place, where the values are not those of a state."""
        try:
            return cls(**{field.name: values[field.name] for field in fields(cls)})
        except KeyError as error:
            raise UserError(f"{place} is damaged: it has no {error}; start anew in another folder") from None


def best_record(history: Sequence[Record], higher_is_better: bool) -> Record:
    """The first of the epochs with the best validation metric; the last epoch where none has one."""
    defined = [record for record in history if record["val"] is not None and not math.isnan(record["val"])]
    if not defined:
        return history[-1]
    return max(defined, key=lambda record: record["val"] if higher_is_better else -record["val"])


def ended(settings: TrainerConfig, history: Sequence[Record], higher_is_better: bool) -> bool:
    """Whether no epoch is left: all are done, or the last `patience` were not better on the validation split."""
    if len(history) >= settings.epochs:
        return True
    if settings.patience is None or not history:
        return False
    return len(history) - best_record(history, higher_is_better)["epoch"] >= settings.patience


@dataclass(frozen=True)
class Result:
    """What came of a run: the metric at the epoch that was best on the validation split."""

    run: Path
    metric: str
    higher_is_better: bool
    best_epoch: int
    train: float
    val: float | None
    test: float | None
    gap: float | None
    """How much better the training metric (of a subset, where there are many graphs) is than that of the test."""
    zero_share: float | None
    epochs: int
    seconds: float
    parameters: int

    @classmethod
    def of(
        cls, history: Sequence[Record], *, run: Path, metric: str, higher_is_better: bool, parameters: int
    ) -> "Result":
        best = best_record(history, higher_is_better)
        gap = None if best["test"] is None else best["train"] - best["test"]
        return cls(
            run=run,
            metric=metric,
            higher_is_better=higher_is_better,
            best_epoch=best["epoch"],
            **{split: best[split] for split in ("train", "val", "test")},
            gap=gap if gap is None or higher_is_better else -gap,
            zero_share=best["zero_share"],
            epochs=len(history),
            seconds=sum(record["seconds"] for record in history),
            parameters=parameters,
        )

    def to_dict(self) -> dict[str, Any]:
        """As result.json holds it: where the run lies is not part of it, and what is not defined is null."""
        values = {key: value for key, value in asdict(self).items() if key != "run"}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

    def __str__(self) -> str:
        scores = ", ".join(
            f"{split} {value:.4f}"
            for split, value in (("train", self.train), ("val", self.val), ("test", self.test))
            if value is not None
        )
        known = self.val is not None and not math.isnan(self.val)
        epoch = "best" if known else "last"  # where nothing tells which was better
        return (
            f"{self.metric} at the {epoch} epoch ({self.best_epoch} of {self.epochs}): {scores}; {self.run}"
        )
