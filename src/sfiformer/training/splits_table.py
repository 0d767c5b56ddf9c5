"""splits.csv of a run, a line for each of the user's own graphs, split by split, and skipped.csv, of its bad rows."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from sfiformer.data.dataset import Member
from sfiformer.data.source import Bad
from sfiformer.errors import UserError
from sfiformer.files import cell

COLUMNS = ("id", "split", "graph", "row", "digest")


def splits_text(members: Mapping[str, Sequence[Member]]) -> str:
    """The table of these graphs."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for split, graphs in members.items():
        for number, graph in enumerate(graphs):
            table.writerow((cell(graph.id), split, number, graph.row, graph.digest))
    return text.getvalue()


def skipped_text(bad: Bad) -> str:
    """The table of the rows that were left out: where each stands, and why."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerows([("place", "reason"), *((cell(place), cell(reason)) for place, reason in bad)])
    return text.getvalue()


def read_splits(path: Path) -> dict[str, list[Member]]:
    """The graphs of each split, in order; tables of earlier releases have neither rows nor digests.

    Raises:
        UserError: where it is not such a table.
    """
    members: dict[str, list[Member]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                row = int(line["row"]) if "row" in line else None
                members.setdefault(line["split"], []).append(Member(line["id"], row, line.get("digest", "")))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path} is damaged: {error!r}") from None
    return members
