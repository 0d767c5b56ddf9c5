"""Graphs from a JSON-lines file: one JSON object a line, plain or gzipped (.jsonl, .jsonl.gz).

    {"x": [[0.1, 2.0], [0.3, 1.0]], "edges": [[0, 1], [1, 0]], "y": "active"}

| key | meaning |
|---|---|
| `x` | node features, one list a node (or one number a node). Integers ≥ 0 are categories, others numbers |
| `num_nodes` | in place of `x` for nodes without features |
| `edges` or `edge_index` | pairs `[[from, to], …]`, or PyG's `[[from …], [to …]]`; list both directions |
| `edge_attr` | edge features, one list (or number) an edge; optional |
| `y` | the label: a number or text, a list of targets, or a list with one entry a node; `null` is missing |
| `links` or `edge_label_index` | node pairs to predict, written as edges are; optional |
| `edge_label` | the label of each link; without it all are true links |
| `split` | `"train"`, `"val"` or `"test"`; optional |
| `train_mask`, `val_mask`, `test_mask` | truth values, one a node; optional |
| `id`, `smiles` | a name for the predictions; the molecule, for the scaffold split; optional |
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, cast

from .record import Record, Rows


def rows(path: Path, split_column: str = "split") -> Rows:
    """The rows of the file, one line in memory at a time; blank lines are passed over."""
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield f"{path}, line {number}", partial(_parse, line, split_column)


def open_bytes(path: Path) -> IO[bytes]:
    """A file to read, unzipped on the way when its name ends in .gz."""
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def _lines(path: Path) -> Iterator[bytes]:
    with open_bytes(path) as file:
        try:
            yield from file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a whole gzip file: {error}") from None


def _parse(line: bytes, split_column: str) -> Record:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:  # its own line and column would be those of this one line
        raise ValueError(
            f"not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a graph is a JSON object {{…}}, not a {type(fields).__name__}")
    if split_column != "split":
        fields["split"] = fields.pop(split_column, None)
    return Record.from_fields(fields)
