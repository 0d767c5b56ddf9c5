"""What a dataset asks of a model: the level and kind of its targets, and how to read the outputs back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["graph", "node", "link"]
Kind = Literal["classification", "binary", "multilabel", "regression", "ranking"]


def listed(names: Sequence[str]) -> str:
    """The first few of the names, in a line."""
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


@dataclass(frozen=True)
class Task:
    """The targets of a dataset.

    level: one target row per graph, per node, or per link (a pair of nodes of one graph).
    kind: what a target row is:
        "classification"  one integer class in 0 … outputs-1, -1 where the label is missing
        "binary"          0 or 1 under one logit, NaN (or -1 in integer labels) where missing
        "multilabel"      `outputs` independent zeros and ones, NaN where missing
        "regression"      `outputs` real numbers, NaN where missing
        "ranking"         links only: the true tails are to be ranked above all other nodes
    outputs: numbers the model emits per target row.
    class_names: the name of each class ("classification", and "binary" as (negative, positive)).
    target_names: the name of each of the `outputs` columns ("multilabel", "regression", "binary").
    columns: the columns of a table that the targets were read from, by which another table is read.
    target_mean, target_std: what a regression was standardised with; stored targets are (y - mean) / std.
    """

    level: Level
    kind: Kind
    outputs: int
    class_names: tuple[str, ...] | None = None
    target_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    target_mean: tuple[float, ...] | None = None
    target_std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        # Lists are what JSON and YAML give back; a frozen value holds tuples.
        for name in ("class_names", "target_names", "columns", "target_mean", "target_std"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        if self.level not in get_args(Level):
            raise ValueError(f"Task.level is {self.level!r}; choose one of {', '.join(get_args(Level))}")
        if self.kind not in get_args(Kind):
            raise ValueError(f"Task.kind is {self.kind!r}; choose one of {', '.join(get_args(Kind))}")
        if self.outputs < 1:
            raise ValueError(f"Task.outputs is {self.outputs}; a task has at least one output")
        if self.kind in ("binary", "ranking") and self.outputs != 1:
            raise ValueError(f"a {self.kind} task has one output, not {self.outputs}")
        if self.kind == "ranking" and self.level != "link":
            raise ValueError(f"a ranking task ranks links, not {self.level}s: set level='link'")
        if (self.target_mean is None) != (self.target_std is None):
            raise ValueError("Task.target_mean and Task.target_std come together: give both or neither")
        classes = 2 if self.kind == "binary" else self.outputs
        for name, wanted in (
            ("class_names", classes),
            ("target_names", self.outputs),
            ("target_mean", self.outputs),
            ("target_std", self.outputs),
        ):
            value = getattr(self, name)
            if value is not None and len(value) != wanted:
                raise ValueError(f"Task.{name} has {len(value)} entries; this {self.kind} task has {wanted}")

    def describe(self) -> str:
        """The task in a few words, such as "graph classification, 3 classes (a, b, c)"."""

        def among(names: tuple[str, ...] | None) -> str:
            return "" if names is None else f" ({listed(names)})"

        if self.kind == "classification":
            return f"{self.level} classification, {self.outputs} classes{among(self.class_names)}"
        if self.kind == "binary":
            return f"{self.level} binary classification{among(self.class_names or self.target_names)}"
        if self.kind == "ranking":
            return f"{self.level} ranking"
        targets = f"{self.outputs} target{'s' * (self.outputs > 1)}{among(self.target_names)}"
        return f"{self.level} {self.kind}, {targets}"
