"""Tables written to a file part by part, whole or not at all."""

import csv
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sfiformer.errors import UserError
from sfiformer.files import cell, whole_file

Table = dict[str, list[Any]]
Write = Callable[[Table], None]


@contextmanager
def table_file(path: Path) -> Iterator[Write]:
    """A function that appends rows to the table at `path` (.csv or .parquet), which appears when the block ends.

    All parts have the same columns.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"{path}: the name of a table ends in .csv or .parquet")
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file")
    write_to = _csv if path.suffix == ".csv" else _parquet
    with whole_file(path) as file, write_to(file) as write:
        yield write


@contextmanager
def _csv(file: BinaryIO) -> Iterator[Write]:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    started = False

    def write(table: Table) -> None:
        nonlocal started
        if not started:
            writer.writerow(map(cell, table))
            started = True
        writer.writerows(zip(*(map(_cell, column) for column in table.values()), strict=True))

    try:
        yield write
    finally:
        text.detach()  # flushes; the file is its owner's to close


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return (
            f"{value:.12g}"  # float32 has seven digits, which may stand on a far larger mean of the targets
        )
    return _text(value)


def _text(value: Any) -> Any:
    return cell(value) if isinstance(value, str) else value


@contextmanager
def _parquet(file: BinaryIO) -> Iterator[Write]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError("writing Parquet needs pyarrow: pip install 'sfiformer[parquet]'") from None
    writer: Any = None

    def write(table: Table) -> None:
        nonlocal writer
        rows = pyarrow.table({cell(name): [*map(_text, column)] for name, column in table.items()})
        writer = writer or parquet.ParquetWriter(file, rows.schema)
        writer.write_table(rows)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
