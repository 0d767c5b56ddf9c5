"""Graphs from a list of PyG `Data`, or from a `.pt` file that holds such a list."""

import pickle
import pickletools
import re
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from .record import Record, Rows

# All that a saved list of Data needs. Importing PyG registers more classes with torch.load, some of whose
# constructors touch files, so the names in the file are checked against this list before it is loaded.
_CLASSES = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]
_ALLOWED = {f"{cls.__module__} {cls.__qualname__}" for cls in _CLASSES} | {
    "collections OrderedDict",
    "torch Size",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.storage UntypedStorage",
}
_DTYPE = re.compile(r"torch (\w+Storage|u?int\d+|b?float\d+|bool)")


def load_pt(path: Path) -> list[Data]:
    """The list of `Data` in a file, read without running any code from it."""
    remedy = "save it with torch.save([Data(...), ...], path), tensors only"
    foreign = _names(path) - _ALLOWED
    foreign = {name for name in foreign if not _DTYPE.fullmatch(name)}
    if foreign:
        what = ", ".join(sorted(name.replace(" ", ".") for name in foreign))
        raise ValueError(f"{path} is refused: it holds {what}, and only PyG Data is read; {remedy}")
    try:
        with torch.serialization.safe_globals(_CLASSES):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
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
    if not isinstance(graph, Data):
        raise ValueError(f"a {type(graph).__name__}, not a PyG Data")
    fields = graph.to_dict()
    if split_column != "split":
        fields["split"] = fields.pop(split_column, None)
    return Record.from_fields(fields)


def _names(path: Path) -> set[str]:
    """Every class and function that the pickle inside a torch.save archive names; nothing is run."""
    try:
        with zipfile.ZipFile(path) as archive:
            # PyTorch's zip reader does not mind the case of names: any second one is refused.
            members = [name for name in archive.namelist() if name.lower().endswith("data.pkl")]
            if len(members) != 1:
                raise ValueError(f"{len(members)} members called data.pkl")
            code = archive.read(members[0])
        operations = list(pickletools.genops(code))
    except (zipfile.BadZipFile, ValueError, zipfile.LargeZipFile, EOFError) as error:
        raise ValueError(f"{path} is not a file of torch.save: {error}") from None
    names = {str(argument) for opcode, argument, _ in operations if opcode.name in ("GLOBAL", "INST")}
    # torch.save writes protocol 2, which names everything in place; later protocols name by the stack.
    if any(opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4") for opcode, _, _ in operations):
        names.add("something named by a pickle protocol that torch.save does not write")
    return names
