"""The features that all graphs of a dataset share: what a model is built for, and new graphs must fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .record import Record

FeatureKind = Literal["numbers", "categories"]
MOST_CATEGORIES = 1000  # integer features beyond this are read as numbers
TOO_MANY_CATEGORIES = 10_000_000  # of whoever wants them: more weights than memory, if not a mistake


@dataclass(frozen=True)
class Features:
    """The columns of x or edge_attr: real numbers, or categories 0 … sizes[column]-1."""

    width: int
    kind: FeatureKind
    sizes: tuple[int, ...] | None = None  # categories of each column

    def describe(self) -> str:
        if self.sizes is None:
            return f"{self.width} number{'s' * (self.width > 1)}"
        sizes = ", ".join(map(str, self.sizes))
        return f"{self.width} column{'s' * (self.width > 1)} of categories ({sizes})"


@dataclass(frozen=True)
class Schema:
    """Node features, and edge features where there are any."""

    node: Features
    edge: Features | None

    def check(self, record: Record) -> None:
        """Raises ValueError where a graph does not fit."""
        check_widths(
            record, self.node.width, self.edge.width if self.edge else 0, "the model was trained with"
        )
        for name, values, features in (
            ("x", record.x, self.node),
            ("edge_attr", record.edge_attr, self.edge),
        ):
            if features is None or features.sizes is None or values is None or not values.numel():
                continue
            if values.is_floating_point():
                raise ValueError(f"{name} holds real numbers where categories (integers from 0) are expected")
            outside = (values < 0) | (values >= torch.tensor(features.sizes))
            if outside.any():
                row, column = outside.nonzero()[0].tolist()
                raise ValueError(
                    f"{name} is {int(values[row, column])} in row {row}, column {column}, "
                    f"where the categories are 0 to {features.sizes[column] - 1}"
                )


def check_widths(
    record: Record, node: int | None, edge: int | None, others: str = "the other graphs have"
) -> None:
    """Raises ValueError unless x has `node` columns and edge_attr `edge` (0: absent, None: not known yet)."""
    if node not in (None, record.x.shape[1]):
        raise ValueError(f"x has {record.x.shape[1]} columns where {others} {node}")
    width = 0 if record.edge_attr is None else record.edge_attr.shape[1]
    # A graph without edges may leave edge_attr out.
    if edge not in (None, width) and (record.edge_index.shape[1] or width):
        raise ValueError(f"edge_attr has {width} columns where {others} {edge}")


def infer_features(name: str, tables: Sequence[Tensor], kind: FeatureKind | None = None) -> Features:
    """Of tables [rows, width] of one width: integers from 0 upwards are categories, all else is numbers."""
    tables = [table for table in tables if table.numel()]
    width = tables[0].shape[1]
    if any(table.is_floating_point() for table in tables) or min(int(table.min()) for table in tables) < 0:
        if kind == "categories":
            raise ValueError(f"{name} cannot be categories: not all its values are integers from 0 upwards")
        return Features(width, "numbers")
    most = torch.stack([table.amax(0) for table in tables]).amax(0)  # [width]
    if kind == "numbers" or (kind is None and int(most.max()) >= MOST_CATEGORIES):
        return Features(width, "numbers")
    if int(most.max()) >= TOO_MANY_CATEGORIES:
        raise ValueError(
            f"{name} cannot be categories: column {int(most.argmax())} goes up to {int(most.max())}, and each number "
            "from 0 would have weights of its own; number the categories from 0, or read them as numbers"
        )
    return Features(width, "categories", tuple(int(size) + 1 for size in most))


def infer_schema(
    records: Sequence[Record], node: FeatureKind | None = None, edge: FeatureKind | None = None
) -> Schema:
    """The schema of graphs whose widths agree; `node` and `edge` override how integers are read."""
    edge_tables = [record.edge_attr for record in records if record.edge_attr is not None]
    has_edges = any(table.numel() for table in edge_tables)
    return Schema(
        node=infer_features("x", [record.x for record in records], node),
        edge=infer_features("edge_attr", edge_tables, edge) if has_edges else None,
    )
