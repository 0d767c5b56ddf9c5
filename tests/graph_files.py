"""Small graphs of a user's own, and files of them."""

import gzip
import json

EDGES = [[0, 1], [1, 0]]


def line(i, **fields):
    return {"id": f"g{i}", "x": [[0.5, i]] * (2 + i % 3), "edges": EDGES, **fields}


def write(folder, graphs, name="graphs.jsonl"):
    text = "".join(graph if isinstance(graph, str) else json.dumps(graph) + "\n" for graph in graphs)
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path
