"""A mini-batch of graphs, packed end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# As on PyG's `Data`, these read None where the dataset does not have them.
OPTIONAL = ("x", "edge_attr", "y")
PARTS = (
    "edge_index", "batch", "ptr", "graph_ids", "max_nodes", "fields", "real_nodes", "real_edges", "real_graphs", "structure",
)  # fmt: skip


class GraphBatch:
    """Several graphs as one disconnected graph, under PyG's attribute names.

    Node `i` of graph `g` is row `ptr[g] + i` of every node field; `edge_index` holds such batch-global ids
    and is sorted by destination (row 1). A field is an attribute of its own name: `batch.x` [N, F],
    `batch.edge_attr` [E, F], `batch.y`, `batch.lappe_vectors` [N, k] and so on. `x`, `edge_attr` and `y` are
    None where absent, any other absent name is an AttributeError, as on PyG's `Data`.

    A batch may be padded to a given shape (`BatchShape`): then more graphs, their nodes and edges come after the
    real ones, with `graph_ids` -1 and all targets missing. Any other batch has None for `real_nodes` and so on.
    """

    edge_index: Tensor  # [2, E] int64
    batch: Tensor  # [N] int64, the graph of each node, as a position in this batch
    ptr: Tensor  # [num_graphs + 1] int64
    graph_ids: Tensor  # [num_graphs] int64, each graph's index in its store
    max_nodes: int  # nodes of the largest graph at most, known without asking the device
    fields: dict[str, Tensor]
    real_nodes: Tensor | None  # [] int64, in a padded batch: the rows after these are padding
    real_edges: Tensor | None
    real_graphs: Tensor | None
    structure: tuple[Any, ...] | None  # what a model has found out about the graphs (`SFiFormer.structure`)
    edges_by_target = True  # edge_index ascends in row 1: see `EdgeOrder.of`

    def __init__(
        self,
        *,
        edge_index: Tensor,
        batch: Tensor,
        ptr: Tensor,
        graph_ids: Tensor,
        max_nodes: int,
        fields: dict[str, Tensor],
        real_nodes: Tensor | None = None,
        real_edges: Tensor | None = None,
        real_graphs: Tensor | None = None,
        structure: tuple[Any, ...] | None = None,
    ) -> None:
        self.edge_index = edge_index
        self.batch = batch
        self.ptr = ptr
        self.graph_ids = graph_ids
        self.max_nodes = max_nodes
        self.fields = fields
        self.real_nodes, self.real_edges, self.real_graphs = real_nodes, real_edges, real_graphs
        self.structure = structure

    @property
    def num_graphs(self) -> int:
        return self.graph_ids.numel()

    @property
    def num_nodes(self) -> int:
        return self.batch.numel()

    @property
    def num_edges(self) -> int:
        return self.edge_index.size(1)

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    def __getattr__(self, name: str) -> Any:
        # `fields` itself is missing while an instance is being unpickled.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        if name in OPTIONAL:
            return None
        raise AttributeError(f"the batch has no field '{name}'; it has {', '.join(fields)}")

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def __iter__(self) -> Iterator[str]:
        """The names of the fields."""
        return iter(self.fields)

    def replace(self, **fields: Tensor) -> GraphBatch:
        """The same graphs with some fields added or replaced; this batch is left as it is.

        What a model has found out about it is left out: it may have been about the fields.
        """
        return GraphBatch(**{**self._parts(), "fields": {**self.fields, **fields}, "structure": None})

    def structured(self, structure: tuple[Any, ...]) -> GraphBatch:
        """The same graphs with what a model has found out about them, which it then need not do again."""
        return GraphBatch(**{**self._parts(), "structure": structure})

    def to(self, device: str | torch.device, non_blocking: bool = False) -> GraphBatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> GraphBatch:
        return self.map(Tensor.pin_memory)

    def map(self, function: Callable[[Tensor], Tensor]) -> GraphBatch:
        """The same graphs with every tensor as the function makes it."""
        return GraphBatch(**{name: _mapped(value, function) for name, value in self._parts().items()})

    def _parts(self) -> dict[str, Any]:
        """The arguments that this batch would be made from; what was set on it since is none of them."""
        return {name: getattr(self, name) for name in PARTS}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={list(tensor.shape)}" for name, tensor in self.fields.items())
        return (
            f"GraphBatch(num_graphs={self.num_graphs}, num_nodes={self.num_nodes}, num_edges={self.num_edges}"
            f"{', ' if shapes else ''}{shapes})"
        )


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The function on the tensors in dictionaries and tuples, named ones too; all else stays as it is."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _mapped(part, function) for name, part in value.items()}
    if isinstance(value, tuple):
        parts = (_mapped(part, function) for part in value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
