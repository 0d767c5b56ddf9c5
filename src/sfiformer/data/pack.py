"""Checked graphs as one store."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .infer import encode, label_rows
from .record import Record
from .schema import Schema
from .store import GraphStore
from .task import Level, Task


def pack(
    records: Sequence[Record], schema: Schema, task: Task | None = None, mask: str | None = None
) -> GraphStore:
    """The graphs of `records`, end to end, with their labels when `task` is given.

    `mask` names the split whose node mask the labels are limited to; the others become missing.
    """
    node: dict[str, Tensor] = {"x": _table([record.x for record in records], schema.node.kind)}
    edge: dict[str, Tensor] = {}
    graph: dict[str, Tensor] = {}
    link: dict[str, Tensor] = {}
    link_ptr = None
    if schema.edge is not None:
        empty = torch.zeros(0, schema.edge.width, dtype=torch.int64)
        tables = [empty if record.edge_attr is None else record.edge_attr for record in records]
        edge["edge_attr"] = _table(tables, schema.edge.kind)
    of_links = task is not None and task.level == "link"
    if of_links or any(record.links is not None for record in records):
        none = torch.zeros(0, 2, dtype=torch.int64)
        links = [none if record.links is None else record.links for record in records]
        link_ptr, link["edge_label_index"] = _offsets(links), torch.cat(links)
    if task is not None:
        labels = [_masked(encode(record, task), record, mask) for record in records]
        fields, name = {"graph": (graph, "y"), "node": (node, "y"), "link": (link, "edge_label")}[task.level]
        fields[name] = torch.cat(labels)
    return GraphStore(
        node_ptr=_offsets([record.x for record in records]),
        edge_ptr=_offsets([record.edge_index.T for record in records]),
        edge_index=torch.cat([record.edge_index for record in records], dim=1),
        node=node,
        edge=edge,
        graph=graph,
        link_ptr=link_ptr,
        link=link,
    )


def masked_labels(record: Record, level: Level, mask: str | None) -> np.ndarray | None:
    """The labels as given [rows, T], of the nodes in the named mask only (None: of all)."""
    table = label_rows(record, level)
    return table if table is None or mask is None else table[record.masks[mask].numpy()]


def has_labels(store: GraphStore, task: Task) -> bool:
    """Whether any graph, node or link has a label; of a ranking, whether there is a true link."""
    fields = {"graph": store.graph, "node": store.node, "link": store.link}[task.level]
    labels = fields.get("edge_label" if task.level == "link" else "y")
    if labels is None:  # links without are true links, to be ranked
        return task.kind == "ranking" and store.link_ptr is not None and int(store.link_ptr[-1]) > 0
    if task.kind == "ranking":
        return bool((labels == 1).any())
    return bool((~labels.isnan() if labels.is_floating_point() else labels >= 0).any())


def _masked(labels: Tensor, record: Record, mask: str | None) -> Tensor:
    if mask is None:
        return labels
    inside = record.masks[mask].reshape(-1, *[1] * (labels.ndim - 1))
    return torch.where(inside, labels, float("nan") if labels.is_floating_point() else -1)


def _table(tables: list[Tensor], kind: str) -> Tensor:
    dtype = torch.float32 if kind == "numbers" else torch.int64
    return torch.cat([table.to(dtype) for table in tables])


def _offsets(tables: list[Tensor]) -> Tensor:
    return torch.tensor([0, *(len(table) for table in tables)]).cumsum(0)
