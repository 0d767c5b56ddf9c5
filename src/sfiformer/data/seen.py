"""What the graphs that a model was trained on have: which categories (what stands for any other was never trained), and edges
both ways or one."""

from collections.abc import Iterator

import torch

from .schema import MOST_CATEGORIES, Schema
from .smiles import ATOM_SIZES
from .store import GraphStore

ATOM_FEATURES = (
    "atomic number", "chirality", "degree", "charge", "hydrogens", "radical electrons", "hybridization",
    "aromatic", "in a ring",
)  # fmt: skip

Seen = dict[str, list[list[int]]]  # of x and edge_attr, as far as they are categories: those of each column
Category = tuple[str, int, int]  # x or edge_attr, column, value


def seen_categories(store: GraphStore, schema: Schema) -> Seen:
    """The categories that occur in a store."""
    seen: Seen = {}
    for name, table, features in (
        ("x", store.node.get("x"), schema.node),
        ("edge_attr", store.edge.get("edge_attr"), schema.edge),
    ):
        sizes = features.sizes if features is not None else None
        if sizes is None or table is None or max(sizes) > MOST_CATEGORIES:
            continue
        columns = table.long().unbind(1)
        seen[name] = [column.bincount().nonzero().flatten().tolist() for column in columns]
    return seen


def unseen(store: GraphStore, seen: Seen) -> Iterator[tuple[int, Category]]:
    """The graphs with a category that is none of those, and the first that each has."""
    told = set()
    for name, fields, ptr in (("x", store.node, store.node_ptr), ("edge_attr", store.edge, store.edge_ptr)):
        for column, known in enumerate(seen.get(name, ()) if name in fields else ()):
            values = fields[name][:, column].long()
            rows = (~torch.isin(values, torch.tensor(known, dtype=torch.long))).nonzero().flatten()
            graphs = torch.searchsorted(ptr, rows, right=True) - 1
            for graph, row in zip(graphs.tolist(), rows.tolist(), strict=True):
                if graph not in told:
                    told.add(graph)
                    yield graph, (name, column, int(values[row]))


def has_both_ways(store: GraphStore) -> bool | None:
    """Whether any edge has its reverse in its graph; None where there are no edges but from a node to itself."""
    graphs = torch.repeat_interleave(store.edge_ptr.diff())
    source, target = store.edge_index.long().cpu() + store.node_ptr[graphs]
    source, target = source[source != target], target[source != target]
    if not len(source):
        return None
    reverse = target * store.num_nodes + source
    return bool(torch.isin(source * store.num_nodes + target, reverse).any())


def named(category: Category, schema: Schema) -> str:
    """A category in words, where the features are those of molecules."""
    name, column, value = category
    if name == "x" and schema.node.sizes == ATOM_SIZES:
        return f"atomic number {value + 1}" if column == 0 else f"{ATOM_FEATURES[column]} {value}"
    return f"{name}[:, {column}] = {value}"
