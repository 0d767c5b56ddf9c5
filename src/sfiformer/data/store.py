"""All graphs of a split as a few flat tensors with offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sfiformer.data import checks, files, pyg
from sfiformer.data.batch import GraphBatch
from sfiformer.data.dtypes import narrow
from sfiformer.data.gather import Tables, gather
from sfiformer.data.host_gather import host_batch, rows_of, take
from sfiformer.data.shapes import BatchShape, exact_shape, graph_sizes

if TYPE_CHECKING:
    from torch_geometric.data import Data

Indices = Sequence[int] | np.ndarray | Tensor


class GraphStore:
    """The graphs of a split, laid end to end.

    Graph `g` owns the rows `node_ptr[g]:node_ptr[g+1]` of every node field, `edge_ptr[g]:edge_ptr[g+1]` of
    `edge_index` (its columns) and of every edge field, row `g` of every graph field, and
    `link_ptr[g]:link_ptr[g+1]` of every link field. Node ids count from 0 in each graph. Within a graph,
    edges are sorted by destination (row 1 of `edge_index`), stably: unsorted edges are sorted here, edge
    fields along with them.

    Values are held in the smallest dtype that loses nothing (`narrow`) and handed out as int64, float32 or
    bool (`widen`). The offsets stay on the host wherever the rest lives: a batch is planned there, so that
    gathering one on a GPU never waits for it.

    Args:
        node_ptr: [G + 1] offsets of the graphs into the node fields.
        edge_ptr: [G + 1] offsets of the graphs into the edges.
        edge_index: [2, E] local node ids, source over destination.
        node: fields [N, ...], such as "x", "pos", or "y" for node tasks.
        edge: fields [E, ...], such as "edge_attr".
        graph: fields [G, ...], such as "y" for graph tasks.
        link_ptr: [G + 1] offsets of the graphs into the labelled links, where there are any.
        link: "edge_label_index" [L, 2] local node ids and "edge_label" [L, ...].

    Raises:
        ValueError: where the data are not sound; the message names the graph and the node, edge or link.
    """

    def __init__(
        self,
        node_ptr: Tensor,
        edge_ptr: Tensor,
        edge_index: Tensor,
        *,
        node: Mapping[str, Tensor] | None = None,
        edge: Mapping[str, Tensor] | None = None,
        graph: Mapping[str, Tensor] | None = None,
        link_ptr: Tensor | None = None,
        link: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.node_ptr = torch.as_tensor(node_ptr).to("cpu", torch.int64)
        self.edge_ptr = torch.as_tensor(edge_ptr).to("cpu", torch.int64)
        self.link_ptr = None if link_ptr is None else torch.as_tensor(link_ptr).to("cpu", torch.int64)
        self.edge_index = narrow(edge_index)
        self.node = {name: narrow(tensor) for name, tensor in (node or {}).items()}
        self.edge = {name: narrow(tensor) for name, tensor in (edge or {}).items()}
        self.graph = {name: narrow(tensor) for name, tensor in (graph or {}).items()}
        self.link = {name: narrow(tensor) for name, tensor in (link or {}).items()}
        checks.check(self)
        order = checks.destination_order(self.edge_index, self.edge_ptr)
        if order is not None:
            self.edge_index = self.edge_index[:, order]
            self.edge = {name: tensor[order] for name, tensor in self.edge.items()}

    @classmethod
    def _from_parts(cls, parts: Mapping[str, Any]) -> GraphStore:
        """A store of tensors that a sound store held: nothing is checked or converted again."""
        store = cls.__new__(cls)
        store.__dict__.update(parts)
        store.__dict__.pop("_tables", None)  # of the store that the parts come from
        return store

    @classmethod
    def from_pyg(cls, graphs: Iterable[Data], levels: Mapping[str, str] | None = None) -> GraphStore:
        """Packs PyG `Data` objects (a list or any dataset).

        Whether a field belongs to the nodes, the edges or the graph follows from its length in all graphs
        and, where lengths leave a choice, from its name; `levels={"y": "node"}` says it outright.
        `edge_label_index` and `edge_label` are link fields. Values that are neither tensors nor numbers (a
        SMILES string, say) are left out.
        """
        return cls(**pyg.pack(graphs, levels or {}))

    def to_pyg(self) -> list[Data]:
        """The graphs as PyG `Data`, with sorted edges and the dtypes of `widen`."""
        return pyg.unpack(self)

    def __len__(self) -> int:
        return self.node_ptr.numel() - 1

    @property
    def num_nodes(self) -> int:
        return int(self.node_ptr[-1])

    @property
    def num_edges(self) -> int:
        return int(self.edge_ptr[-1])

    @property
    def device(self) -> torch.device:
        return self.edge_index.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: what `.to("cuda")` will take."""
        fields = (*self.node.values(), *self.edge.values(), *self.graph.values(), *self.link.values())
        return sum(tensor.nbytes for tensor in (self.edge_index, *fields))

    def __repr__(self) -> str:
        levels = {"node": self.node, "edge": self.edge, "graph": self.graph, "link": self.link}
        fields = "".join(
            f", {level}.{name}={list(tensor.shape)}"
            for level in levels
            for name, tensor in levels[level].items()
        )
        return f"GraphStore({len(self)} graphs, {self.num_nodes} nodes, {self.num_edges} edges{fields})"

    def to(self, device: str | torch.device) -> GraphStore:
        """The store with its tensors on `device`; the offsets stay on the host."""

        def moved(fields: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(device) for name, tensor in fields.items()}

        return self._from_parts(
            {
                **self.__dict__,
                "edge_index": self.edge_index.to(device),
                "node": moved(self.node),
                "edge": moved(self.edge),
                "graph": moved(self.graph),
                "link": moved(self.link),
            }
        )

    def with_fields(
        self,
        *,
        node: Mapping[str, Tensor] | None = None,
        edge: Mapping[str, Tensor] | None = None,
        graph: Mapping[str, Tensor] | None = None,
    ) -> GraphStore:
        """The same graphs with some fields added or replaced; the tensors that stay are shared.

        Edge fields [E, ...] are in this store's edge order.
        """
        new = {"node": node or {}, "edge": edge or {}, "graph": graph or {}}
        parts = {
            level: {
                **getattr(self, level),
                **{name: narrow(tensor).to(self.device) for name, tensor in fields.items()},
            }
            for level, fields in new.items()
        }
        store = self._from_parts({**self.__dict__, **parts})
        checks.check_fields(store, only={name for fields in new.values() for name in fields})
        return store

    def save(self, folder: str | Path) -> None:
        """Writes one .npy file a field and a manifest, all or nothing; an older store there is replaced."""
        files.save_store(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> GraphStore:
        """Opens a saved store, memory-mapped: rows are read from the disk when a batch first needs them.

        Raises:
            ValueError: where the folder holds no store, or not all of one.
        """
        return cls._from_parts(files.load_store(Path(folder)))

    def subset(self, indices: Indices) -> GraphStore:
        """The graphs `indices`, in that order, as a store of their own."""
        chosen = self._host(indices)
        node_ptr, nodes, _ = rows_of(self.node_ptr, chosen, self.device)
        edge_ptr, edges, _ = rows_of(self.edge_ptr, chosen, self.device)
        graphs = torch.from_numpy(chosen).to(self.device)
        parts: dict[str, Any] = {
            "node_ptr": torch.from_numpy(node_ptr),
            "edge_ptr": torch.from_numpy(edge_ptr),
            "edge_index": self.edge_index.index_select(1, edges),
            "node": {name: take(tensor, nodes) for name, tensor in self.node.items()},
            "edge": {name: take(tensor, edges) for name, tensor in self.edge.items()},
            "graph": {name: take(tensor, graphs) for name, tensor in self.graph.items()},
            "link_ptr": None,
            "link": {},
        }
        if self.link_ptr is not None:
            link_ptr, links, _ = rows_of(self.link_ptr, chosen, self.device)
            parts["link_ptr"] = torch.from_numpy(link_ptr)
            parts["link"] = {name: take(tensor, links) for name, tensor in self.link.items()}
        return self._from_parts(parts)

    @property
    def tables(self) -> Tables:
        """What `gather` reads, made when first asked for; the fields of this store become views of it."""
        if "_tables" not in self.__dict__:
            self._tables = tables = Tables.of(self)
            self.edge_index = tables.edge_index[:, : self.num_edges]
            for fields, extended in (
                (self.node, tables.node),
                (self.edge, tables.edge),
                (self.graph, tables.graph),
            ):
                for name, tensor in fields.items():
                    if extended[name].dtype == tensor.dtype:
                        fields[name] = extended[name][: len(tensor)]
        return self._tables

    def batch(self, indices: Indices, shape: BatchShape | None = None) -> GraphBatch:
        """Gathers the graphs `indices`, in any order and with repeats if so asked, padded to `shape` if given.

        The number of tensor operations does not depend on that of the graphs, and none waits for the device.
        """
        chosen = self._host(indices)
        if shape is not None or self.device.type != "cpu":
            sizes = graph_sizes(self, chosen)
            if shape is None:
                shape = exact_shape(sizes)
            elif not shape.holds(sizes):
                raise ValueError(f"{shape} does not hold {exact_shape(sizes)}; choose one with a Ladder")
            slots = torch.from_numpy(shape.slots(chosen))
            return gather(self, slots.to(self.device, non_blocking=True), shape)
        return host_batch(self, chosen)

    def _host(self, indices: Indices) -> np.ndarray:
        """Graph indices as a host array; negative ones count from the end."""
        if isinstance(indices, Tensor):
            indices = indices.cpu().numpy()
        chosen = np.array(indices, dtype=np.int64).reshape(-1)
        wrong = (chosen < -len(self)) | (chosen >= len(self))
        if wrong.any():
            raise IndexError(f"there is no graph {chosen[wrong][0]} in a store of {len(self)} graphs")
        chosen[chosen < 0] += len(self)
        return chosen
