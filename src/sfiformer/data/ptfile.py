"""Graphs from a list of PyG `Data`, or from a `.pt` file that holds such a list."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from sfiformer.pickles import foreign_names

from .record import SMILES_ALONE, Record, Rows

# All that a saved list of Data needs beside tensors.
_CLASSES = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]
_ALLOWED = {f"{cls.__module__} {cls.__qualname__}" for cls in _CLASSES}


def load_pt(path: Path) -> list[Data]:
    """The list of `Data` in a file, read without running any code from it."""
    remedy = "save it with torch.save([Data(...), ...], path), tensors only"
    try:
        foreign = foreign_names(path, _ALLOWED)
    except ValueError as error:
        raise ValueError(f"{path} is not a file of torch.save: {error}") from None
    if foreign:
        what = ", ".join(foreign)
        raise ValueError(f"{path} is refused: it holds {what}, and only PyG Data is read; {remedy}")
    try:
        with torch.serialization.safe_globals(_CLASSES):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # a pickle that is none has all kinds of errors
        reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
        raise ValueError(f"{path} cannot be read: {reason}; {remedy}") from None
    graphs = [content] if isinstance(content, Data) else content
    if not isinstance(graphs, list | tuple) or not all(isinstance(graph, Data) for graph in graphs):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a list of PyG Data; {remedy}")
    return list(graphs)


def rows(graphs: Sequence[Data], name: str, split_column: str = "split") -> Rows:
    """The rows of a list; `name` is what messages call it."""
    for number, graph in enumerate(graphs):
        yield f"{name}, graph {number}", partial(_parse, graph, split_column)


def _parse(graph: Data, split_column: str) -> Record:
    if isinstance(graph, str):
        raise ValueError(f"text ({graph[:40]!r}), not a PyG Data; {SMILES_ALONE}")
    if not isinstance(graph, Data):
        raise ValueError(f"a {type(graph).__name__}, not a PyG Data")
    try:
        fields = graph.to_dict()
    except (RuntimeError, AttributeError):
        raise ValueError("not a whole PyG Data, or one of another release of PyG; make it anew") from None
    if split_column != "split":
        fields["split"] = fields.pop(split_column, None)
    return Record.from_fields(fields)
