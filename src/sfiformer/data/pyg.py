"""Between PyG's `Data` objects and the flat tensors of a graph store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sfiformer.data.dtypes import widen

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from sfiformer.data.store import GraphStore

LEVELS = ("node", "edge", "graph")
LINK = ("edge_label_index", "edge_label")
# A batch knows these by itself.
DERIVED = ("batch", "ptr", "num_nodes")


def pack(graphs: Iterable[Data], levels: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `GraphStore` for a list of PyG graphs."""
    for name, level in levels.items():
        if level not in LEVELS:
            raise ValueError(f"levels['{name}'] is '{level}'; it must be one of {', '.join(LEVELS)}")
    columns: dict[str, list[Tensor]] = {}
    nodes: list[int] = []
    for index, data in enumerate(graphs):
        if index == 0 and data.edge_index is None:
            raise ValueError("graph 0 has no edge_index; a graph without edges has one of shape [2, 0]")
        fields = _tensors(data)
        if index == 0:
            columns = {name: [] for name in fields}
        if fields.keys() != columns.keys():
            odd = sorted(fields.keys() ^ columns.keys())
            raise ValueError(
                f"graph {index}: '{odd[0]}' is a field of this graph or of graph 0, but not of both"
            )
        nodes.append(int(data.num_nodes or 0))
        for name, tensor in fields.items():
            columns[name].append(tensor)
    if not nodes:
        raise ValueError("the dataset is empty: a graph store needs at least one graph")

    edge_index = columns.pop("edge_index")
    for index, ends in enumerate(edge_index):
        if ends.dim() != 2 or ends.size(0) != 2:
            raise ValueError(f"graph {index}: edge_index has shape {list(ends.shape)}, not [2, E]")
    sizes = {"node": nodes, "edge": [ends.size(1) for ends in edge_index], "graph": [1] * len(nodes)}
    parts: dict[str, Any] = {
        "node_ptr": _offsets(sizes["node"]),
        "edge_ptr": _offsets(sizes["edge"]),
        "edge_index": torch.cat(edge_index, dim=1),
        "node": {},
        "edge": {},
        "graph": {},
    }
    links = {name: columns.pop(name) for name in LINK if name in columns}
    if links:
        if "edge_label_index" not in links:
            raise ValueError("'edge_label' needs 'edge_label_index' [2, L], the links that it labels")
        pairs = [tensor.t() for tensor in links.pop("edge_label_index")]  # each [L, 2]
        counts = [tensor.size(0) for tensor in pairs]
        parts["link_ptr"] = _offsets(counts)
        parts["link"] = {"edge_label_index": torch.cat(pairs)}
        for name, tensors in links.items():
            _check_rows(name, tensors, "link", counts)
            parts["link"][name] = _join(name, tensors)
    for name, tensors in columns.items():
        level = levels.get(name) or _level(name, tensors, sizes)
        _check_rows(name, tensors, level, sizes[level])
        parts[level][name] = _join(name, tensors)
    return parts


def unpack(store: GraphStore) -> list[Data]:
    """The graphs of a store as PyG `Data`, one each."""
    from torch_geometric.data import Data  # slow to import, and most of this package does without

    def split(fields: Mapping[str, Tensor], ptr: Tensor) -> dict[str, tuple[Tensor, ...]]:
        sizes = ptr.diff().tolist()
        return {name: widen(tensor).split(sizes) for name, tensor in fields.items()}

    columns = split(store.node, store.node_ptr) | split(store.edge, store.edge_ptr)
    columns |= split(store.graph, torch.arange(len(store) + 1))
    columns |= split({"edge_index": store.edge_index.t()}, store.edge_ptr)
    if store.link_ptr is not None:
        columns |= split(store.link, store.link_ptr)
    graphs = []
    for index, nodes in enumerate(store.node_ptr.diff().tolist()):
        fields = {name: column[index] for name, column in columns.items()}
        for name in ("edge_index", "edge_label_index"):
            if name in fields:
                fields[name] = fields[name].t().contiguous()  # [2, ...], as PyG has it
        graphs.append(Data(num_nodes=nodes, **fields))
    return graphs


def _tensors(data: Data) -> dict[str, Tensor]:
    """The tensors of a graph by name; plain numbers become tensors of one row."""
    tensors = {}
    for name, value in data.to_dict().items():
        if name in DERIVED:
            continue
        if isinstance(value, bool | int | float):
            value = torch.tensor([value])
        if isinstance(value, Tensor):
            tensors[name] = value.reshape(1) if value.dim() == 0 else value
    return tensors


def _level(name: str, tensors: list[Tensor], sizes: dict[str, list[int]]) -> str:
    """The level whose sizes a field has in every graph, the likeliest first where several fit."""
    if name.startswith("edge_"):
        order = ("edge", "node", "graph")
    elif name in ("x", "pos") or name.endswith("_mask"):
        order = ("node", "graph", "edge")
    else:
        order = ("graph", "node", "edge")
    rows = [tensor.size(0) for tensor in tensors]
    for level in order:
        if rows == sizes[level]:
            return level
    # None fits: the one that fits longest has the most telling error.
    fits = {
        level: next(i for i, pair in enumerate(zip(rows, sizes[level], strict=True)) if len(set(pair)) > 1)
        for level in order
    }
    return max(order, key=lambda level: fits[level])


def _check_rows(name: str, tensors: list[Tensor], level: str, sizes: list[int]) -> None:
    for index, (tensor, rows) in enumerate(zip(tensors, sizes, strict=True)):
        if tensor.size(0) != rows:
            hint = "; give a graph's own row the shape [1, ...]" if level == "graph" else ""
            raise ValueError(
                f"graph {index}: '{name}' has shape {list(tensor.shape)}, but as a {level} field it needs "
                f"{rows} row{'' if rows == 1 else 's'}{hint}"
            )


def _join(name: str, tensors: list[Tensor]) -> Tensor:
    """All graphs' rows of a field, end to end."""
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"graph {index}: '{name}' has rows of shape {list(tensor.shape[1:])}, those of graph 0 have "
                f"{list(first.shape[1:])}; all graphs need the same width"
            )
    return torch.cat(tensors)


def _offsets(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)
