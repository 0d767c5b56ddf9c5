"""A batch gathered on the host, where NumPy plans faster than PyTorch; and rows of graphs, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sfiformer.data.batch import GraphBatch
from sfiformer.data.dtypes import widen

if TYPE_CHECKING:
    from sfiformer.data.store import GraphStore


def host_batch(store: GraphStore, chosen: np.ndarray) -> GraphBatch:
    """The graphs with the numbers ``chosen`` [B] of a store on the host."""
    graph_ids, device = torch.from_numpy(chosen), store.device
    ptr, nodes, batch = rows_of(store.node_ptr, chosen, device, np.arange(len(chosen)))
    # Local ids become ids within the batch in int32: on a CPU, memory traffic is what a batch costs.
    first = ptr[:-1].astype(np.int32)
    _, edges, offset = rows_of(store.edge_ptr, chosen, device, first)
    edge_index = torch.empty(2, edges.numel(), dtype=torch.int64, device=device)
    for end in (0, 1):
        edge_index[end].copy_(take(store.edge_index[end], edges).to(torch.int32).add_(offset))
    fields = {name: widen(take(tensor, nodes)) for name, tensor in store.node.items()}
    fields |= {name: widen(take(tensor, edges)) for name, tensor in store.edge.items()}
    fields |= {name: widen(take(tensor, graph_ids)) for name, tensor in store.graph.items()}
    if store.link_ptr is not None:
        _, links, offset = rows_of(store.link_ptr, chosen, device, first)
        fields |= {name: widen(take(tensor, links)) for name, tensor in store.link.items()}
        ends = fields["edge_label_index"].t() + offset
        fields["edge_label_index"] = ends.contiguous()  # [2, L], as PyG has it
    return GraphBatch(
        edge_index=edge_index,
        batch=batch,
        ptr=torch.from_numpy(ptr),
        graph_ids=graph_ids,
        max_nodes=int(np.diff(ptr).max(initial=0)),
        fields=fields,
    )


def rows_of(
    offsets: Tensor, chosen: np.ndarray, device: torch.device, value: np.ndarray | None = None
) -> tuple[np.ndarray, Tensor, Tensor]:
    """Where the rows of the chosen graphs lie, given the offsets of all graphs (host).

    Returns the graphs' new offsets [B + 1] (host), the rows to take [total] (on ``device``), and for every such
    row the `value` [B] of its graph (likewise).
    """
    old = offsets.numpy()
    start = old[chosen]
    counts = old[chosen + 1] - start
    ptr = np.concatenate([[0], np.cumsum(counts)])
    shift = start - ptr[:-1]
    if old[-1] <= np.iinfo(np.int32).max:
        shift = shift.astype(np.int32)
    rows, values = _spread((shift, start if value is None else value), counts, device)
    rows += torch.arange(rows.numel(), dtype=rows.dtype, device=device)
    return ptr, rows, values


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """`tensor[rows]`. PyTorch gathers from one dimension several times faster than from [M, 1]."""
    if tensor.dim() > 1 and tensor.numel() == tensor.size(0):
        return tensor.reshape(-1).index_select(0, rows).view(-1, *tensor.shape[1:])
    return tensor.index_select(0, rows)


def _spread(columns: tuple[np.ndarray, ...], counts: np.ndarray, device: torch.device) -> list[Tensor]:
    """Each column's entry b [B] repeated counts[b] times: [counts.sum()] on `device`."""
    if device.type == "cpu":
        return [torch.from_numpy(np.repeat(column, counts)) for column in columns]  # PyTorch's is slower
    plan = torch.from_numpy(np.stack([*columns, counts])).to(device, non_blocking=True)  # one small copy
    owner = torch.repeat_interleave(plan[-1], output_size=int(counts.sum()))
    return list(plan[:-1].index_select(1, owner))
