"""From the graphs of a raw file to one `GraphStore` a split."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfiformer.data.official.raw import as_tensor, read_raw
from sfiformer.data.official.registry import SPLITS, Dataset
from sfiformer.data.store import GraphStore

# A field's shape: n nodes, e edges and l labelled links differ from graph to graph, numbers do not.
Shape = tuple[int | str, ...]

# MS COCO numbers its classes with these gaps; the task counts 81 classes without gaps.
_COCO_GAPS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
_COCO_LAST = 90


def read_splits(dataset: Dataset, raw: Path) -> Iterator[tuple[str, GraphStore]]:
    """Read and pack the raw files of a dataset, one split after the other."""
    if len(dataset.files) == 1:
        path = raw / dataset.files[0]
        parts = read_raw(path)
        if not isinstance(parts, list | tuple) or len(parts) != len(SPLITS):
            raise ValueError(f"{path} must hold a list of three splits")
        for split, graphs in zip(SPLITS, parts, strict=True):
            yield split, _pack(dataset, graphs, f"{path}, {split} split")
    else:
        for split, file in zip(SPLITS, dataset.files, strict=True):
            yield split, _pack(dataset, read_raw(raw / file), str(raw / file))


def layout(dataset: Dataset) -> dict[str, Shape]:
    """The fields of a raw graph, in the order in which LRGB's tuples hold them, and their shapes."""
    task = dataset.task
    target: dict[str, Shape]
    if task.level == "link":
        target = {"edge_label_index": (2, "l"), "edge_label": ("l",)}
    elif task.level == "node":
        target = {"y": ("n",)}
    else:
        target = {"y": (1,) if task.kind == "classification" else (1, task.outputs)}
    if len(dataset.files) == len(SPLITS):  # LRGB
        return {
            "x": ("n", dataset.node_width),
            "edge_attr": ("e", dataset.edge_width),
            "edge_index": (2, "e"),
            **target,
        }
    if dataset.edge_width:  # superpixels: colour and centre lie apart, and one weight an edge
        return {
            "x": ("n", dataset.node_width - 2),
            "pos": ("n", 2),
            "edge_attr": ("e",),
            "edge_index": (2, "e"),
            **target,
        }
    return {"x": ("n", dataset.node_width), "edge_index": (2, "e"), **target}


def _pack(dataset: Dataset, graphs: Any, place: str) -> GraphStore:
    """One split. `place` says in errors where the graphs come from."""
    columns, sizes = _columns(layout(dataset), graphs, place)
    flat = {
        name: torch.cat(parts, dim=1 if name.endswith("_index") else 0) for name, parts in columns.items()
    }
    ptr = {letter: _offsets(counts) for letter, counts in sizes.items()}

    number = torch.int64 if dataset.molecular else torch.float32
    x = flat["x"].to(number)  # [N, F]
    if "pos" in flat:
        x = torch.cat([x, flat["pos"].to(number)], dim=1)
    node, edge, graph, link = {"x": x}, {}, {}, {}
    if "edge_attr" in flat:
        edge["edge_attr"] = flat["edge_attr"].to(number).view(-1, dataset.edge_width)  # [E, D]
    if dataset.task.level == "node":
        node["y"] = _classes(dataset, flat["y"], ptr["n"], place)  # [N]
    elif dataset.task.kind == "classification":
        graph["y"] = _classes(dataset, flat["y"], torch.arange(len(graphs) + 1), place)  # [G]
    elif dataset.task.level == "graph":
        graph["y"] = flat["y"].to(torch.float32)  # [G, T]
    else:
        link = {
            "edge_label_index": flat["edge_label_index"].t(),
            "edge_label": flat["edge_label"],
        }  # [L, 2], [L]
    try:
        return GraphStore(
            ptr["n"],
            ptr["e"],
            flat["edge_index"],
            node=node,
            edge=edge,
            graph=graph,
            link_ptr=ptr.get("l"),
            link=link,
        )
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _columns(
    shapes: dict[str, Shape], graphs: Any, place: str
) -> tuple[dict[str, list[Tensor]], dict[str, list[int]]]:
    """The tensors of each field, graph by graph, and how many nodes, edges and links each graph has."""
    if not isinstance(graphs, list | tuple) or not graphs:
        raise ValueError(f"{place}: expected a list of graphs, and found {type(graphs).__name__} without any")
    columns: dict[str, list[Tensor]] = {name: [] for name in shapes}
    letters = {letter for shape in shapes.values() for letter in shape if isinstance(letter, str)}
    sizes: dict[str, list[int]] = {letter: [] for letter in letters}
    for index, graph in enumerate(graphs):
        if isinstance(graph, dict) and graph.keys() >= shapes.keys():
            values = [graph[name] for name in shapes]
        elif isinstance(graph, tuple) and len(graph) == len(shapes):
            values = list(graph)
        else:
            raise ValueError(f"{place}, graph {index}: expected the fields {', '.join(shapes)}")
        known: dict[str, int] = {}
        for (name, shape), value in zip(shapes.items(), values, strict=True):
            try:
                tensor = as_tensor(value)
            except ValueError as error:
                raise ValueError(f"{place}, graph {index}, {name}: {error}") from error
            if not _fits(tensor, shape, known):
                wanted = ", ".join(str(known.get(str(size), size)) for size in shape)
                raise ValueError(
                    f"{place}, graph {index}: {name} has shape {list(tensor.shape)}, not [{wanted}]"
                )
            columns[name].append(tensor)
        for letter, size in known.items():
            sizes[letter].append(size)
    return columns, sizes


def _fits(tensor: Tensor, shape: Shape, known: dict[str, int]) -> bool:
    """Whether a tensor has this shape; a letter takes its number where it is first met."""
    return tensor.dim() == len(shape) and all(
        have == (want if isinstance(want, int) else known.setdefault(want, have))
        for have, want in zip(tensor.shape, shape, strict=True)
    )


def _offsets(counts: list[int]) -> Tensor:
    ptr = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(counts), 0, out=ptr[1:])
    return ptr


def _classes(dataset: Dataset, y: Tensor, ptr: Tensor, place: str) -> Tensor:
    """Class labels [N] or [G], checked; `ptr` says which rows are a graph's."""
    classes = 2 if dataset.task.kind == "binary" else dataset.task.outputs
    labels = y.to(torch.int64)
    if dataset.name == "coco-sp":
        table = torch.full((_COCO_LAST + 2,), -1)  # the last entry is for what is no COCO class
        table[[label for label in range(_COCO_LAST + 1) if label not in _COCO_GAPS]] = torch.arange(classes)
        labels = table[labels.clamp(-1, _COCO_LAST + 1)]
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        graph = int(torch.searchsorted(ptr, row, right=True)) - 1
        raise ValueError(
            f"{place}, graph {graph}: label {y[row].item()} of row {row - int(ptr[graph])} is none of the "
            f"{classes} classes"
        )
    return labels
