"""One graph as a user's file or list gives it, checked on its own before anything is packed."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A row of a source: where it stands, and what reads it (raises ValueError when the row is bad).
Row = tuple[str, Callable[[], "Record"]]
Rows = Iterator[Row]

MASKS = ("train", "val", "test")
FIELDS = frozenset(
    ["x", "edge_index", "edges", "edge_attr", "y", "id", "split", "smiles", "num_nodes"]
    + ["edge_label_index", "links", "edge_label"]
    + [f"{name}_mask" for name in MASKS]
)

SMILES_ALONE = "SMILES alone are read from a CSV file with a column smiles"
_DECIMAL_COMMA = re.compile(r"[+-]?[\d.]*,\d+(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """Labels as given: float64 with NaN where missing, or objects (str, None) when `text`."""

    values: np.ndarray
    text: bool
    whole: bool  # every label present was written as an integer or a truth value


@dataclass
class Record:
    """A checked graph of n nodes and e directed edges; labels not yet encoded."""

    x: Tensor  # [n, F] int64 or float32
    edge_index: Tensor  # [2, e] int64
    edge_attr: Tensor | None = None  # [e, K] int64 or float32
    y: Target | None = None  # the labels of the graph, its nodes, or its links
    links: Tensor | None = None  # [L, 2] int64
    masks: dict[str, Tensor] = field(default_factory=dict)  # split name -> bool [n]
    id: str = ""
    split: str | None = None
    smiles: str | None = None
    molecule: str | None = None  # RDKit's canonical SMILES of it, where it was read as a molecule
    unused: frozenset[str] = frozenset()  # names of fields that were given and are not read
    place: str = ""  # file and line (or graph), for messages
    number: int = 0  # its place among all rows of the source, bad ones included

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]

    def digest(self) -> str:
        """The same for molecules that are alike, however they were written, and for graphs that are so node by node."""
        if self.molecule is not None:
            return hashlib.sha256(self.molecule.encode()).hexdigest()[:16]
        parts = (self.x, self.edge_index, self.edge_attr, self.links)
        tables = [part.numpy() for part in parts if part is not None]
        shapes = str([table.shape for table in tables]).encode()
        return hashlib.sha256(shapes + b"".join(table.tobytes() for table in tables)).hexdigest()[:16]

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Record":
        """Build from PyG's field names; values are tensors, arrays or nested lists, None is absent."""
        given = {name: value for name, value in fields.items() if value is not None}
        if given.get("id") is not None:
            try:
                return cls._from_fields(given)
            except ValueError as error:
                raise ValueError(f"graph {_name(given['id'])!r}: {error}") from None
        return cls._from_fields(given)

    @classmethod
    def _from_fields(cls, given: dict[str, Any]) -> "Record":
        x = _node_features(given)
        nodes = x.shape[0]
        edge_index = _pairs(given, "edge_index", "edges", nodes)
        if edge_index is None:
            raise ValueError("no edges: give edge_index or edges (an empty list for a graph without edges)")
        edge_attr = None
        if "edge_attr" in given:
            edge_attr = _matrix("edge_attr", given["edge_attr"], "edge")
            if edge_attr.shape[0] != edge_index.shape[1]:
                raise ValueError(f"edge_attr has {edge_attr.shape[0]} rows for {edge_index.shape[1]} edges")
            if edge_attr.shape[1] == 0:
                edge_attr = None  # an empty list says nothing about the width
        links = _pairs(given, "edge_label_index", "links", nodes)
        if links is None and "edge_label" in given:
            raise ValueError("edge_label without edge_label_index (or links)")
        label = "y" if links is None else "edge_label"
        return cls(
            x=x,
            edge_index=edge_index,
            edge_attr=edge_attr,
            y=as_target(label, given[label]) if label in given else None,
            links=None if links is None else links.T.contiguous(),
            masks=_masks(given, nodes),
            id=_name(given.get("id", "")),
            split=str(given["split"]) if "split" in given else None,
            smiles=str(given["smiles"]) if "smiles" in given else None,
            unused=frozenset(given) - FIELDS,
        )


def as_target(name: str, value: Any) -> Target:
    """Labels from a tensor, a scalar or nested lists; None, NaN and empty text are missing."""
    array = _array(name, value)
    if array.dtype.kind in "biu":
        return Target(array.astype(np.float64), text=False, whole=True)
    target = (
        Target(array.astype(np.float64), text=False, whole=False)
        if array.dtype.kind == "f"
        else _objects(name, array)
    )
    with np.errstate(over="ignore"):
        infinite = np.zeros(1) if target.text else np.isinf(target.values.astype(np.float32))
    if infinite.any():
        place = f", at {_first(infinite)}" if infinite.ndim else ""  # a single label has none
        raise ValueError(f"{name} is infinite, or beyond float32{place}")
    return target


def _objects(name: str, cells: np.ndarray) -> Target:
    """Labels among which some are missing or text."""
    present = [cell for cell in cells.flat if cell is not None and cell != ""]
    if not all(isinstance(cell, bool | int | float | str) for cell in present):
        raise ValueError(f"{name} holds something that is neither number, text nor null")
    if any(isinstance(cell, str) for cell in present):
        text = np.empty(cells.shape, dtype=object)  # None throughout
        for index, cell in np.ndenumerate(cells):
            if cell is not None and cell != "" and cell == cell:
                text[index] = label_text(cell)
        return Target(text, text=True, whole=False)
    numbers = [np.nan if cell is None or cell == "" else cell for cell in cells.flat]
    try:
        values = np.array(numbers, dtype=np.float64).reshape(cells.shape)
    except OverflowError:
        raise ValueError(f"{name} holds a number that is too large") from None
    return Target(values, text=False, whole=all(isinstance(cell, bool | int) for cell in present))


def label_text(value: Any) -> str:
    """The name of a label: 3 and 3.0 are both "3"."""
    if isinstance(value, str):
        return value
    return str(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)


def has_decimal_comma(label: str) -> bool:
    """Whether a text is a number but for its comma, as spreadsheets write 1,5 where a point parts thousands."""
    return _DECIMAL_COMMA.fullmatch(label) is not None


def _name(value: Any) -> str:
    return str(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)


def _node_features(given: dict[str, Any]) -> Tensor:
    nodes = given.get("num_nodes", 0)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 0 <= nodes < 2**31:
        raise ValueError(f"num_nodes is {nodes!r}, not a number of nodes")
    if "x" in given:
        x = _matrix("x", given["x"], "node")
        if "num_nodes" in given and nodes != x.shape[0]:
            raise ValueError(f"num_nodes is {nodes}, x has {x.shape[0]} rows")
        if x.shape[1] == 0 and x.shape[0]:
            raise ValueError("x has no columns; leave it out and give num_nodes")
    elif "num_nodes" in given:
        # No features: one category that every node has, so that a model learns one embedding.
        x = torch.zeros(nodes, 1, dtype=torch.int64)
    else:
        remedy = f"; {SMILES_ALONE}" if "smiles" in given else ""
        raise ValueError(f"no node features: give x, or num_nodes for nodes without features{remedy}")
    if x.shape[0] == 0:
        raise ValueError("the graph has no nodes")
    return x


def _matrix(name: str, value: Any, row: str) -> Tensor:
    """[rows, columns] int64 or float32; a flat list is one column."""
    array = _array(name, value)
    if array.ndim == 1:
        array = array[:, None] if array.size else array.reshape(0, 0)
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {list(array.shape)}, not [{row}s, columns]")
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind not in "fb":
        if not _not_number(array).any():
            large = np.vectorize(lambda cell: abs(cell) >= 2**63, otypes=[bool])(array)
            raise ValueError(f"{name} holds a number that is too large at {_first(large, row)}")
        raise ValueError(f"{name} holds a value that is not a number at {_first(_not_number(array), row)}")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and refused as such
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        place = ~np.isfinite(array)
        raise ValueError(f"{name} is {array[place][0]} at {_first(place, row)}")
    return torch.from_numpy(array)


def _pairs(given: dict[str, Any], index_name: str, pairs_name: str, nodes: int) -> Tensor | None:
    """[2, e] from PyG's two rows (`index_name`) or from a list of pairs (`pairs_name`)."""
    if index_name in given and pairs_name in given:
        raise ValueError(f"both {index_name} and {pairs_name} are given; keep one")
    name = index_name if index_name in given else pairs_name
    if name not in given:
        return None
    array = _array(name, given[name])
    if array.size == 0:
        return torch.zeros(2, 0, dtype=torch.int64)
    wanted, axis = ("two rows [[from …], [to …]]", 0) if name == index_name else ("pairs [[from, to], …]", 1)
    if array.ndim != 2 or array.shape[axis] != 2 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be {wanted} of node numbers")
    index = torch.from_numpy(array.astype(np.int64).T.copy() if axis else array.astype(np.int64))
    outside = (index < 0) | (index >= nodes)
    if outside.any():
        place = int(outside.any(0).nonzero()[0])
        pair = " -> ".join(str(int(end)) for end in index[:, place])
        raise ValueError(f"{name}: number {place} ({pair}) is outside the nodes 0 to {nodes - 1}")
    return index


def _masks(given: dict[str, Any], nodes: int) -> dict[str, Tensor]:
    masks = {}
    for name in MASKS:
        if f"{name}_mask" in given:
            array = _array(f"{name}_mask", given[f"{name}_mask"])
            if array.shape != (nodes,) or array.dtype.kind not in "biu":
                raise ValueError(
                    f"{name}_mask has shape {list(array.shape)} for {nodes} nodes; "
                    "give one truth value a node (of several splits, choose one column)"
                )
            masks[name] = torch.from_numpy(array.astype(bool))
    if len(masks) > 1:
        doubled = torch.stack(list(masks.values())).sum(0) > 1
        if doubled.any():
            raise ValueError(f"node {int(doubled.nonzero()[0])} is in two masks ({', '.join(masks)})")
    return masks


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() and value.dtype != torch.float64 else value
        return value.numpy()
    try:
        array = np.asarray(value)
        # NumPy turns [1, "a"] into text and integers beyond int64 into others: keep what was written.
        return (
            np.asarray(value, dtype=object) if array.dtype.kind in "US" or array.dtype == np.uint64 else array
        )
    except ValueError:
        raise ValueError(f"{name} has rows of different lengths") from None


def _not_number(array: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda cell: not isinstance(cell, int | float), otypes=[bool])(array)


def _first(places: np.ndarray, row: str = "row") -> str:
    index = np.argwhere(places)
    if not len(index) or not index.shape[1]:
        return f"{row} 0"
    return f"{row} {index[0][0]}" + (f", column {index[0][1]}" if index.shape[1] > 1 else "")
