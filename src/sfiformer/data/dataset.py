"""A dataset ready for training: its splits, its task, and what its graphs look like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .schema import Schema
from .source import skipped
from .store import GraphStore
from .task import Task


class Member(NamedTuple):
    """A graph of a split, as the user's file has it."""

    id: str
    """Its own, or its row."""
    row: int | None
    """Its place among all rows of the file, from 0."""
    digest: str
    """The same for graphs that are alike."""


def ids_of(members: Mapping[str, Sequence[Member]]) -> dict[str, list[str]]:
    """What the graphs of each split are called."""
    return {split: [graph.id for graph in graphs] for split, graphs in members.items()}


@dataclass(frozen=True)
class Dataset:
    """The stores of "train", "val" and "test" with the task they pose.

    A split may be absent (a fraction of 0). Labels that are missing, or that belong to another split by a
    node mask, are -1 (integers) or NaN in "y" (graphs, nodes) and "edge_label" (links).
    """

    name: str
    splits: dict[str, GraphStore]
    task: Task
    schema: Schema
    members: dict[str, list[Member]] = field(
        default_factory=dict
    )  # of a user's file: each graph, split by split
    bad: list[tuple[str, str]] = field(default_factory=list)  # rows that were skipped: (place, reason)
    notes: tuple[str, ...] = ()  # what was inferred or left out, a line each

    @property
    def ids(self) -> dict[str, list[str]]:
        """What the user calls the graphs of each split."""
        return ids_of(self.members)

    def describe(self) -> str:
        """What was read and inferred, in a few lines."""
        sizes = ", ".join(f"{name} {len(store)}" for name, store in self.splits.items())
        edge = self.schema.edge.describe() if self.schema.edge else "none"
        lines = [
            f"{self.name}: {sizes} graphs",
            f"task: {self.task.describe()}",
            f"node features: {self.schema.node.describe()}; edge features: {edge}",
            *self.notes,
        ]
        if self.bad:
            lines.append(skipped(self.bad))
        return "\n".join(lines)
