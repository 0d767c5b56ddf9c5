"""Whether the tensors of a graph store are sound, with errors that name the place."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfiformer.data.batch import GraphBatch

if TYPE_CHECKING:
    from sfiformer.data.store import GraphStore

# Inputs of the model. Targets may hold NaN (a missing label), and so may positional encodings (an eigenpair
# that a small graph does not have).
FEATURES = ("x", "pos", "edge_attr")


def check(store: GraphStore) -> None:
    """Raises ValueError where the store's graphs are not sound."""
    _check_offsets(store)
    check_fields(store)
    _check_edges(store)
    _check_links(store)


def check_fields(store: GraphStore, only: Set[str] | None = None) -> None:
    """Names, lengths and finiteness of the fields (of those named in `only`)."""
    graphs = len(store)
    links = 0 if store.link_ptr is None else int(store.link_ptr[-1])
    levels = {
        "node": (store.node, store.num_nodes),
        "edge": (store.edge, store.num_edges),
        "graph": (store.graph, graphs),
        "link": (store.link, links),
    }
    seen: dict[str, str] = {}
    for level, (fields, rows) in levels.items():
        for name, tensor in fields.items():
            if name in seen:
                raise ValueError(f"'{name}' is both a {seen[name]} field and a {level} field; rename one")
            seen[name] = level
            if only is not None and name not in only:
                continue
            if not name.isidentifier() or hasattr(GraphBatch, name) or name in GraphBatch.__annotations__:
                raise ValueError(
                    f"'{name}' cannot name a {level} field: it is no identifier, or it is reserved"
                )
            if tensor.dim() == 0 or tensor.size(0) != rows:
                raise ValueError(
                    f"the {level} field '{name}' has shape {list(tensor.shape)}; its first dimension must "
                    f"be {rows}, one row a {level}"
                )
            if name in FEATURES and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                ptr = {"node": store.node_ptr, "edge": store.edge_ptr}.get(level, torch.arange(graphs + 1))
                bad = int((~torch.isfinite(tensor)).reshape(rows, -1).any(1).nonzero()[0])
                graph, local = _place(bad, ptr)
                raise ValueError(
                    f"graph {graph}, {level} {local}: '{name}' is not finite ({_row(tensor[bad])}); drop the "
                    "graph, or fill in the value"
                )


def destination_order(edge_index: Tensor, edge_ptr: Tensor) -> Tensor | None:
    """The stable permutation that sorts each graph's edges by destination; None where they are sorted."""
    destination = edge_index[1]
    descends = destination[1:] < destination[:-1]
    first = edge_ptr[1:-1]
    first = first[(first > 0) & (first < destination.numel())].to(descends.device)
    descends[first - 1] = False  # from one graph's last edge to the next one's first
    if not bool(descends.any()):
        return None
    graph = torch.repeat_interleave(edge_ptr.diff().to(destination.device))
    key = graph * (int(destination.max()) + 1) + destination
    return torch.argsort(key, stable=True)


def _check_offsets(store: GraphStore) -> None:
    if store.node_ptr.numel() < 2:
        raise ValueError("the dataset is empty: a graph store needs at least one graph")
    if store.edge_index.dim() != 2 or store.edge_index.size(0) != 2 or store.edge_index.is_floating_point():
        raise ValueError(
            f"edge_index must be integers of shape [2, E], source over destination; it is "
            f"{store.edge_index.dtype} {list(store.edge_index.shape)}"
        )
    offsets = {"node_ptr": store.node_ptr, "edge_ptr": store.edge_ptr}
    if store.link_ptr is not None:
        offsets["link_ptr"] = store.link_ptr
    elif store.link:
        raise ValueError(
            f"link fields ({', '.join(store.link)}) need link_ptr, the graphs' offsets into them"
        )
    for name, ptr in offsets.items():
        if ptr.dim() != 1 or ptr.numel() != len(store) + 1:
            raise ValueError(
                f"{name} has shape {list(ptr.shape)}; {len(store)} graphs need [{len(store) + 1}]"
            )
        if int(ptr[0]) != 0 or bool((ptr.diff() < 0).any()):
            raise ValueError(f"{name} must start at 0 and never decrease")
    empty = (store.node_ptr.diff() == 0).nonzero()
    if empty.numel():
        raise ValueError(f"graph {int(empty[0])} has no nodes; drop it")
    if store.num_edges != store.edge_index.size(1):
        raise ValueError(
            f"edge_ptr ends at {store.num_edges}, but there are {store.edge_index.size(1)} edges"
        )


def _check_edges(store: GraphStore) -> None:
    bad = _first_out_of_range(store.edge_index, store.edge_ptr, store.node_ptr)
    if bad is not None:
        graph, local = _place(bad, store.edge_ptr)
        source, destination = store.edge_index[:, bad].tolist()
        raise ValueError(_out_of_range(store, graph, f"edge {local} ({source} → {destination})"))


def _check_links(store: GraphStore) -> None:
    if store.link_ptr is None:
        return
    ends = store.link.get("edge_label_index")
    if ends is None or ends.dim() != 2 or ends.size(1) != 2 or ends.is_floating_point():
        raise ValueError("labelled links need the link field 'edge_label_index', integers of shape [L, 2]")
    bad = _first_out_of_range(ends.t(), store.link_ptr, store.node_ptr)
    if bad is not None:
        graph, local = _place(bad, store.link_ptr)
        raise ValueError(_out_of_range(store, graph, f"link {local} ({ends[bad, 0]} → {ends[bad, 1]})"))


def _first_out_of_range(ends: Tensor, ptr: Tensor, node_ptr: Tensor) -> int | None:
    """The first column of `ends` [2, M] with an id outside its graph."""
    if ends.size(1) == 0:
        return None
    nodes = node_ptr.diff().to(torch.int32)
    limit = torch.repeat_interleave(nodes, ptr.diff()).to(ends.device)  # [M]
    wrong = (ends < 0).any(0) | (ends >= limit).any(0)
    return int(wrong.nonzero()[0]) if bool(wrong.any()) else None


def _out_of_range(store: GraphStore, graph: int, what: str) -> str:
    nodes = int(store.node_ptr[graph + 1] - store.node_ptr[graph])
    return f"graph {graph}: {what} is out of range; the graph's node ids are 0 to {nodes - 1}"


def _place(row: int, ptr: Tensor) -> tuple[int, int]:
    """The graph that owns a row, and the row's number within it."""
    graph = int(torch.searchsorted(ptr, row, right=True)) - 1
    return graph, row - int(ptr[graph])


def _row(values: Tensor) -> str:
    flat = values.reshape(-1)
    column = int((~torch.isfinite(flat)).nonzero()[0])
    return f"{float(flat[column])} in column {column}"
