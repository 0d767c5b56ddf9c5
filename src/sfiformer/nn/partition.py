"""How the nodes and edges of a batch make up its graphs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfiformer.attention import Adjacency, EdgeOrder
from sfiformer.attention.edges import segment_sum, spread
from sfiformer.attention.inputs import as_offsets, require_ptr
from sfiformer.flow import checks


class Partition(NamedTuple):
    """Graph g owns the nodes ptr[g] … ptr[g+1]-1.

    A batch may be padded with graphs that stand at its end: `real_nodes` says how many nodes come before.
    """

    batch: Tensor  # [N] int64, the graph of each node, ascending
    ptr: Tensor  # [G+1] int64
    num_graphs: int
    max_nodes: int
    real_nodes: Tensor | None = None  # int64 [], on the device; None: all

    @classmethod
    def of(cls, batch: Any, num_nodes: int, device: torch.device) -> "Partition":
        """From a GraphBatch, a PyG Batch, or PyG Data, of one graph unless ``batch`` or ``ptr`` tells of more. On a CPU nodes
        must stand by graph, where this is not compiled.
        """
        index, ptr = getattr(batch, "batch", None), getattr(batch, "ptr", None)
        if index is None and ptr is not None:
            ptr = as_offsets(ptr)
            if checks.wanted(None, ptr) and not torch.compiler.is_compiling():
                require_ptr(ptr, num_nodes)
            graphs = torch.arange(len(ptr) - 1, device=ptr.device)
            index = graphs.repeat_interleave(ptr.diff(), output_size=num_nodes)
        elif index is None:
            index = torch.zeros(num_nodes, dtype=torch.long, device=device)
            ptr = torch.tensor([0, num_nodes], device=device)
        elif ptr is None:
            sizes = torch.bincount(index, minlength=getattr(batch, "num_graphs", None) or 0)
            ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        if not torch.compiler.is_compiling():
            require_sorted(index)
        max_nodes = getattr(batch, "max_nodes", None)
        if max_nodes is None:
            max_nodes = int(ptr.diff().max()) if ptr.numel() > 1 else 0
        return cls(index.long(), ptr, ptr.numel() - 1, max_nodes, getattr(batch, "real_nodes", None))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each graph: [N, …] → [G, …]; that of half-precision values is made, and returned, in float32."""
        return segment_sum(values, self.ptr, self.batch)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each graph: [N, d] → [G, d]; 0 for a graph without nodes."""
        return self.sum(values) / self.ptr.diff().clamp(min=1).unsqueeze(-1)

    def spread(self, values: Tensor) -> Tensor:
        """Each graph's row to its nodes: [G, …] → [N, …]."""
        return spread(values, self.ptr, self.batch)


def require_sorted(batch: Tensor) -> None:
    """Raises where the graphs of nodes do not ascend. Looks on a CPU only: a GPU would have to be waited for."""
    if checks.wanted(None, batch) and bool((batch[1:] < batch[:-1]).any()):
        raise ValueError(
            "batch must be sorted, as in PyG's Batch: nodes of one graph stand together. order = batch.argsort(stable=True) "
            "puts them so: x[order], batch[order] and order.argsort()[edge_index]"
        )


class Structure(NamedTuple):
    """What all layers share about the graphs of a batch."""

    edge_index: Tensor  # [2, E], j → i
    graphs: Partition
    adjacency: Adjacency | None = None  # Ã, where the attention has that term
    distance: Tensor | None = None  # [E, 1], ‖p_i − p_j‖² of the ESLapPE encodings
    order: EdgeOrder | None = None  # of edge_index, where a layer walks along the edges
    real_edges: Tensor | None = None  # int64 [], on the device: padding edges come after these; None: all
    sizes: Tensor | None = None  # [G], of the graphs, as the attention takes them
    hot: dict[str, Tensor] = {}  # noqa: RUF012  # by field: categorical features as what their tables are multiplied with
