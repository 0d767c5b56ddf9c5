"""Where a user's graphs come from, and how they are read: one at a time, each checked, each error with its place."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sfiformer.errors import BadRowError

from . import csvfile, jsonl
from .record import SMILES_ALONE, Record, Rows
from .schema import Schema, check_widths

if TYPE_CHECKING:
    from torch_geometric.data import Data

Source = str | Path | Sequence["Data"]
Bad = list[tuple[str, str]]  # (place, reason)

JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
CSV = (".csv", ".csv.gz")
TEXTS = (".smi", ".smiles", ".txt")  # in which molecules are often listed


def open_source(
    source: Source,
    *,
    targets: Sequence[str] | None = None,
    smiles_column: str | None = None,
    split_column: str = "split",
    labelled: bool = True,
) -> tuple[Rows, tuple[str, ...] | None]:
    """The rows of a source, and the names of its target columns (CSV).

    A source is a list of PyG `Data`, or a file of them (.pt), of JSON lines (.jsonl, see `jsonl`), or of
    SMILES (.csv, where `targets` are the target columns, found where None, and () reads none; a file that need
    not be `labelled` may have none of them); .gz where the text is zipped.
    """
    if not isinstance(source, str | Path):
        from . import ptfile  # PyG takes seconds to import, and only its own graphs need it

        return ptfile.rows(source, "the list", split_column), None
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"{path} is a folder: give a file" if path.is_dir() else f"{path}: there is no such file"
        )
    if path.name.endswith(CSV):
        columns = csvfile.find_columns(
            path, smiles=smiles_column, targets=targets, split=split_column, labelled=labelled
        )
        return csvfile.rows(path, columns), columns.targets
    if path.name.endswith(JSONL):
        return jsonl.rows(path, split_column), None
    if path.suffix == ".pt":
        from . import ptfile

        return ptfile.rows(ptfile.load_pt(path), str(path), split_column), None
    remedy = f"; {SMILES_ALONE}" if path.suffix in TEXTS else ""
    raise ValueError(f"{path}: its name must end in one of .pt, {', '.join(JSONL + CSV)}{remedy}")


def read_graphs(rows: Rows, *, bad: Bad | None = None, schema: Schema | None = None) -> Iterator[Record]:
    """The graphs of the rows, checked, one at a time.

    A bad row raises ValueError with its place or, when a list `bad` is given, is added to it as (place,
    reason). All graphs must fit `schema`; without one, the widths of the graphs before.
    """
    node_width: int | None = None
    edge_width: int | None = None
    for number, (place, build) in enumerate(rows):
        try:
            record = build()
            record.place, record.number = place, number
            if schema is not None:
                schema.check(record)
            else:
                check_widths(record, node_width, edge_width)
        except ValueError as error:
            report(bad, place, error)
            continue
        node_width = record.x.shape[1]
        if record.edge_index.shape[1]:  # a graph without edges does not tell the width of edge_attr
            edge_width = 0 if record.edge_attr is None else record.edge_attr.shape[1]
        yield record


def digest(path: str | Path) -> str:
    """The SHA-256 of a file: another one where anything in it was changed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def report(bad: Bad | None, place: str, error: ValueError) -> None:
    """Raise an error with its place, or add it to the list that was given."""
    if bad is None:
        raise BadRowError(f"{place}: {error}") from None
    bad.append((place, str(error)))


def skipped(bad: Bad) -> str:
    """A line that says how many rows were left out, and which was the first."""
    place, reason = bad[0]
    return f"skipped: {len(bad)} bad, the first {place}: {reason}"
