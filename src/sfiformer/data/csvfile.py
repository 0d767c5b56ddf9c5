"""Molecules from a CSV file: which columns hold what, and its rows."""

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .jsonl import open_bytes
from .labels import TRUTH, are_few, as_number
from .record import Record, Rows, has_decimal_comma
from .smiles import canonical, graph_of, parse_smiles

_MISSING = frozenset(["", "na", "n/a", "#n/a", "<na>", "nan", "null", "none"])
_LARGEST = 3.4028234663852886e38  # float32's
_INTEGER = re.compile(r"[+-]?\d+")
_LABEL_NAMES = ("y", "label", "labels", "target", "targets", "class")
# As _plain writes them; of several columns the first of these is taken, and an unnamed one last.
_ID_NAMES = (
    *("id", "identifier", "molid", "moleculeid", "compoundid", "cmpdid", "ligandid", "drugid", "sampleid"),
    *("smilesid", "chemblid", "moleculechemblid", "compoundchemblid", "zincid", "drugbankid", "pubchemid"),
    *("pubchemcid", "cid", "inchikey", "standardinchikey", "cas", "casnumber", "casrn"),
    *("name", "moleculename", "compoundname", "index", "row", ""),
)


@dataclass(frozen=True)
class Columns:
    """Which columns of a CSV file mean what."""

    smiles: str
    targets: tuple[str, ...] = ()
    split: str | None = None
    id: str | None = None


def find_columns(
    path: Path,
    *,
    smiles: str | None = None,
    targets: Sequence[str] | None = None,
    split: str = "split",
    labelled: bool = True,
) -> Columns:
    """Read the header and, to find unnamed targets, the rows.

    Targets that are not given: a column called y, label(s), target(s) or class; else all further columns
    whose every entry is a number, a truth value or missing; else a single further column of text. Of several
    columns none may hold a few texts among its numbers. An unnamed column and ones that are called as identifiers
    are (id, compound_id, CAS, name, index, …) are not targets. A file that need not be `labelled` may have none of
    the given targets.
    """
    _, header = next(_csv(path))
    _require_commas(path, header)
    by_lower = {name.strip().lower(): name for name in reversed(header)}  # of several, the first

    def as_written(name: str) -> str:
        return name if name in header else by_lower.get(name.strip().lower(), name)

    if smiles is None:
        found = [name for name in header if "smiles" in name.lower() and not _is_id(name)]
        if "smiles" not in by_lower and len(found) != 1:
            raise ValueError(
                f"{path}: no column 'smiles' among {', '.join(header)}; name the one that holds them "
                "(--data.smiles_column of sfi train, --smiles-column elsewhere)"
            )
        smiles = by_lower.get("smiles") or found[0]
    if targets:
        targets = [as_written(name) for name in targets]
    if targets and not labelled and not set(targets) & set(header):
        targets = ()
    wanted = [smiles, *(targets or ()), *([as_written(split)] if split != "split" else [])]
    unknown = [name for name in wanted if name not in header]
    if unknown:
        raise ValueError(f"{path}: no column {unknown[0]!r}; the columns are {', '.join(header)}")
    names = sorted(filter(_is_id, header), key=lambda name: _ID_NAMES.index(_plain(name)))
    identifier = next((name for name in names if header.count(name) == 1), None)
    split = as_written(split)
    columns = Columns(smiles, tuple(targets or ()), split if split in header else None, identifier)
    if targets is None:
        columns = Columns(columns.smiles, _guess_targets(path, header, columns), columns.split, columns.id)
    for name in filter(None, (columns.smiles, *columns.targets, columns.split)):
        if header.count(name) > 1:
            raise ValueError(
                f"{path}: {header.count(name)} columns are called {name!r}, and only one can be meant"
            )
        if columns.targets.count(name) > 1:
            raise ValueError(f"{path}: the target {name!r} is named twice")
    return columns


def _is_id(name: str) -> bool:
    return _plain(name) in _ID_NAMES


def _plain(name: str) -> str:
    """The name of a column in one spelling: Compound ID, compound-id and compound_id are alike."""
    return re.sub(r"[\s_-]", "", name.lower())


def _require_commas(path: Path, header: Sequence[str]) -> None:
    """A header that other signs part, as spreadsheets write it where a comma begins the decimals, is one long name."""
    for sign, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "upright strokes")):
        if any("smiles" in cell.lower() and sign in cell for cell in header):
            raise ValueError(f"{path}: its columns are separated by {name}; save it with commas between them")


def rows(path: Path, columns: Columns) -> Rows:
    """The rows of the file, one in memory at a time."""
    lines = _csv(path)
    _, header = next(lines)
    for number, row in lines:
        if row:
            yield f"{path}, line {number}", partial(_parse, header, row, columns)


def _parse(header: list[str], row: list[str], columns: Columns) -> Record:
    if len(row) != len(header):
        raise ValueError(f"{len(row)} cells under {len(header)} columns")
    cells = dict(zip(header, row, strict=True))
    smiles = cells[columns.smiles].strip()
    molecule = parse_smiles(smiles)
    fields: dict[str, Any] = {**graph_of(molecule), "smiles": smiles}
    if columns.targets:
        # One column may hold text, or all targets of the molecule as a list.
        alone = len(columns.targets) == 1
        values = [
            parse_cell(cells[name]) if alone else _number(name, cells[name]) for name in columns.targets
        ]
        for name, value in zip(columns.targets, values, strict=True):
            if isinstance(value, int | float) and abs(value) > _LARGEST:
                raise ValueError(
                    f"{cells[name].strip()[:40]!r} in column {name} is infinite, or beyond float32"
                )
        fields["y"] = values[0] if alone else values
    if columns.split is not None:
        fields["split"] = cells[columns.split].strip() or None
    if columns.id is not None:
        fields["id"] = cells[columns.id].strip() or None
    record = Record.from_fields(fields)
    record.molecule = canonical(molecule)
    record.unused = frozenset(header) - {columns.smiles, *columns.targets, columns.split, columns.id, ""}
    return record


def parse_cell(text: str) -> Any:
    """A number, a list, text, or None where nothing is written (also NA, NaN, null)."""
    text = text.strip()
    if text.lower() in _MISSING:
        return None
    if _INTEGER.fullmatch(text):
        return int(text)
    if text.startswith("["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the list {text[:40]!r} is not valid: {error}") from None
    number = as_number(text)
    return text if number is None else number


def _number(column: str, text: str) -> Any:
    """What a cell holds beside other targets, where truth values are 0 and 1."""
    value = parse_cell(text)
    if isinstance(value, str | list):
        value = TRUTH.get(text.strip().lower())
        if value is None:
            remedy = (
                "write decimals with a point"
                if has_decimal_comma(text.strip())
                else "choose others (--data.targets of sfi train)"
            )
            raise ValueError(
                f"{text.strip()[:40]!r} in column {column}: of several targets each is a number or a truth value; {remedy}"
            )
    return value


def _guess_targets(path: Path, header: list[str], columns: Columns) -> tuple[str, ...]:
    taken = {columns.smiles, columns.split}
    free = [name for name in header if name not in taken and not _is_id(name)]
    named = [name for name in free if name.strip().lower() in _LABEL_NAMES]
    if named:
        return tuple(named[:1])
    numbers: Counter[str] = Counter()  # of cells, by column, truth values among them
    texts: Counter[str] = Counter()
    first_text: dict[str, tuple[int, str]] = {}  # the line, and what it says
    lines = _csv(path)
    next(lines)
    for line, row in lines:
        if len(row) != len(header):  # a bad row, whose cells may stand under other columns
            continue
        for name, text in zip(header, map(str.strip, row), strict=True):
            if text.lower() in _MISSING:
                continue
            if text.lower() in TRUTH or as_number(text) is not None:
                numbers[name] += 1
            else:
                texts[name] += 1
                first_text.setdefault(name, (line, text))
    found = tuple(name for name in free if numbers[name] and not texts[name])
    text_columns = [name for name in free if texts[name]]
    strays = [name for name in text_columns if are_few(texts[name], numbers[name])]
    if strays and len(found) + len(text_columns) > 1:  # one that is alone is judged with all its labels
        line, text = first_text[strays[0]]
        mend = "write decimals with a point" if has_decimal_comma(text) else "correct it"
        raise ValueError(
            f"{path}, line {line}: {text[:40]!r} in column {strays[0]} is text, and {numbers[strays[0]]} others are "
            f"numbers: {mend}, leave it empty where it is missing, or name the columns to be predicted "
            "(--data.targets of sfi train)"
        )
    if not found and len(text_columns) > 1:
        raise ValueError(
            f"{path}: {', '.join(text_columns)} hold text, and of several targets each must hold numbers or truth "
            "values; name one column (--data.targets of sfi train)"
        )
    return found or tuple(text_columns or free[:1])


def _csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The header and the rows, each with the number of the line that it begins on."""
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as file:
        cells = csv.reader(file, strict=True)  # else a lone quotation mark takes in all up to the next
        line = 1
        try:
            first = next(cells, None)
            if not first:
                raise ValueError(f"{path}: its first line must name the columns, and is empty")
            yield 1, first
            line = cells.line_num + 1
            for row in cells:
                yield line, row
                line = cells.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {line}: not valid CSV: {error}; a quotation mark within a text is written twice, and "
                "the text between two more"
            ) from None
        except UnicodeDecodeError:
            raise ValueError(f"{path}, line {_not_utf8(path)} is not UTF-8: save the file as UTF-8") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a whole gzip file: {error}") from None


def _not_utf8(path: Path) -> int:
    """The first line that is not UTF-8."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    raise AssertionError(f"{path} is UTF-8")
