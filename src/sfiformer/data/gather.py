"""Batches gathered where the store lies, in a fixed number of operations of fixed shapes.

Nothing here waits for the device or depends on values there, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sfiformer.branches import Branches
from sfiformer.data.batch import GraphBatch
from sfiformer.data.dtypes import widen
from sfiformer.data.shapes import BatchShape, filler_nodes, graph_sizes

if TYPE_CHECKING:
    from sfiformer.data.store import GraphStore

TARGETS = ("y", "edge_label")  # missing in padding rows: -1 or NaN


@dataclass(frozen=True)
class Tables:
    """The tensors of a store with one more graph at the end, the filler, of which padding graphs are copies.

    Its features are those of the first node, edge, link and graph, its targets are missing.
    """

    filler: int  # nodes of the filler graph
    levels: int  # nodes, edges and, where the store has any, links
    offsets: (
        Tensor  # [2 levels + 2, G + 1] int64: where a graph's rows end; their numbers; real nodes; 1 if real
    )
    zero: Tensor  # [levels + 2, 1]
    edge_index: Tensor  # [2, E + 1]
    link_index: Tensor | None  # [2, L + 1]
    node: dict[str, Tensor]  # [N + filler, ...]
    edge: dict[str, Tensor]  # [E + 1, ...]
    graph: dict[str, Tensor]  # [G + 1, ...]
    link: dict[str, Tensor]  # [L + 1, ...]

    @classmethod
    def of(cls, store: GraphStore) -> Tables:
        filler, levels = filler_nodes(store), 2 if store.link_ptr is None else 3
        sizes = graph_sizes(store).T[:levels]  # [levels, G]
        last = np.array([[filler], [0], [0]])[:levels]  # padding edges and links are no graph's own
        counts = np.hstack([sizes, last])
        real = np.hstack([np.vstack([sizes[0], np.ones_like(sizes[0])]), [[0], [0]]])
        offsets = np.vstack([counts.cumsum(1), counts, real])
        link = dict(store.link)
        ends = link.pop("edge_label_index", None)
        if ends is not None:  # without labels, links are true
            link.setdefault("edge_label", torch.ones(len(ends), dtype=torch.uint8, device=store.device))

        def extended(fields: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
            return {name: _extended(tensor, rows, name in TARGETS) for name, tensor in fields.items()}

        return cls(
            filler=filler,
            levels=levels,
            offsets=torch.from_numpy(offsets).to(store.device),
            zero=torch.zeros(levels + 2, 1, dtype=torch.int64, device=store.device),
            edge_index=_extended(store.edge_index.t(), 1).t().contiguous(),
            link_index=None if ends is None else _extended(ends, 1).t().contiguous(),
            node=extended(store.node, filler),
            edge=extended(store.edge, 1),
            graph=extended(store.graph, 1),
            link=extended(link, 1),
        )


def gather(store: GraphStore, graph_ids: Tensor, shape: BatchShape) -> GraphBatch:
    """The graphs `graph_ids` [shape.graphs] int64, on the store's device, as a batch of the given shape.

    In a shape with a filler the last ids are -1, for padding: graphs of missing targets after the real ones,
    with self-loops spread evenly over their nodes. `shape` must hold the graphs (`BatchShape.holds`): that is
    not looked at here. What is real comes first, `real_nodes`, `real_edges` and `real_graphs` of the batch.
    """
    tables, padded, levels = store.tables, shape.filler > 0, store.tables.levels
    if padded and shape.filler != tables.filler:
        raise ValueError(f"padding graphs of this store have {tables.filler} nodes, not {shape.filler}")
    slots = graph_ids.remainder(len(store) + 1) if padded else graph_ids  # -1: the last, the filler
    plan = tables.offsets.index_select(1, slots)  # [2 levels + 2, G]
    bounds = torch.cat([tables.zero, plan[levels:]], dim=1).cumsum(1)  # [levels + 2, G + 1]
    if padded:
        bounds[0].clamp_(max=shape.nodes)
    ptr, real = bounds[0], bounds[:, -1]
    real_nodes, real_graphs = real[-2], real[-1]
    shift = plan[:levels] - bounds[:levels, 1:]  # [levels, G] from a row of the batch to one of the store
    count = torch.arange(max(shape.nodes, shape.edges, shape.links), device=store.device)

    def owned(level: int, rows: int) -> tuple[Tensor, Tensor]:
        """For each of a level's rows the graph in this batch and the row in the store, [rows] each."""
        # The last end is left out: padding edges belong to the last graph, a filler.
        owner = torch.searchsorted(bounds[level, 1:-1], count[:rows], right=True)
        return owner, shift[level].index_select(0, owner) + count[:rows]

    def pairs(level: int, rows: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs of nodes [2, rows] and the rows taken; those of padding are loops on padding nodes."""
        owner, taken = owned(level, rows)
        if padded:
            taken = taken.clamp(max=table.size(1) - 1)  # they share the filler's one row
        ends = table.index_select(1, taken) + ptr.index_select(0, owner)
        if padded:
            place, more = count[:rows] - real[level], (rows - real[level]).clamp(min=1)
            loops = real_nodes + torch.div(place * (shape.nodes - real_nodes), more, rounding_mode="floor")
            ends = torch.where(place < 0, ends, loops)
        return ends, taken

    def gathered(table: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        return {name: widen(tensor.index_select(0, rows)) for name, tensor in table.items()}

    branches = Branches("gathering", graph_ids)  # nodes and edges side by side
    shared = (bounds, shift, count)
    with branches.next(*shared):
        batch, nodes = owned(0, shape.nodes)
        fields = gathered(tables.node, nodes)
    with branches.next(*shared):
        edge_index, edges = pairs(1, shape.edges, tables.edge_index)
        fields |= gathered(tables.edge, edges)
    fields |= gathered(tables.graph, slots)
    if tables.link_index is not None:
        fields["edge_label_index"], links = pairs(2, shape.links, tables.link_index)
        fields |= gathered(tables.link, links)
    branches.join(batch, edge_index, *fields.values())
    return GraphBatch(
        edge_index=edge_index,
        batch=batch,
        ptr=ptr,
        graph_ids=graph_ids,
        max_nodes=shape.max_nodes,
        fields=fields if padded else _as_stored(fields, store),
        real_nodes=real_nodes if padded else None,
        real_edges=real[1] if padded else None,
        real_graphs=real_graphs if padded else None,
    )


def _extended(tensor: Tensor, rows: int, target: bool = False) -> Tensor:
    """The field with rows for the filler graph: its first row again, or missing targets."""
    if not target:
        return torch.cat([tensor, tensor[:1].expand(rows, *tensor.shape[1:])]) if len(tensor) else tensor
    if tensor.dtype in (torch.bool, torch.uint8):  # neither holds a missing value
        tensor = tensor.to(torch.float16 if tensor.dtype == torch.bool else torch.int16)
    missing = float("nan") if tensor.is_floating_point() else -1
    return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), missing)])


def _as_stored(fields: dict[str, Tensor], store: GraphStore) -> dict[str, Tensor]:
    """Without padding no target is missing: truth values are such, and links have labels only if they had."""
    stored = {**store.node, **store.edge, **store.graph, **store.link}
    return {
        name: tensor.bool() if stored[name].dtype == torch.bool else tensor
        for name, tensor in fields.items()
        if name in stored
    }
