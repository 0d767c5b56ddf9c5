"""A user's own data: PyG `Data`, JSON lines or SMILES in, stores and a task out.

    dataset = load_custom("molecules.csv", split="scaffold")
    print(dataset.describe())

`stream` reads the same sources for prediction, a few graphs at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

from . import smiles
from .dataset import Dataset, Member
from .infer import Classes, encode, infer_level, infer_task, label_rows, standardised
from .notes import notes
from .pack import has_labels, masked_labels, pack
from .record import MASKS, Record
from .schema import FeatureKind, Features, Schema, infer_schema
from .source import CSV, Bad, Source, open_source, read_graphs, report
from .splits import (
    Fractions,
    Split,
    node_masks,
    split_by_column,
    split_by_fractions,
    split_by_scaffold,
    split_name,
)
from .store import GraphStore
from .task import Kind, Level, Task, listed

SplitBy = Literal["auto", "column", "masks", "random", "scaffold"]
MOLECULES = Schema(
    Features(9, "categories", smiles.ATOM_SIZES),
    Features(3, "categories", smiles.BOND_SIZES),
)


def load_custom(
    source: Source,
    *,
    split: SplitBy = "auto",
    fractions: Fractions = (0.8, 0.1, 0.1),
    seed: int = 0,
    skip_bad: bool = False,
    level: Level | None = None,
    kind: Kind | None = None,
    classes: Classes | None = None,
    node_features: FeatureKind | None = None,
    edge_features: FeatureKind | None = None,
    targets: Sequence[str] | None = None,
    smiles_column: str | None = None,
    split_column: str = "split",
) -> Dataset:
    """Read a user's data whole, infer its task and features, and split it.

    Args:
        source: see `open_source`, as for `targets`, `smiles_column` and `split_column`.
        split: by the graphs' own "column", by node "masks", at "random" by `fractions` and `seed`, or by
            Murcko "scaffold"; "auto" takes the first of column, masks and random that the data allow. One
            graph with labelled nodes is split at random by its nodes.
        skip_bad: leave bad rows out and list them in `Dataset.bad`, in place of stopping at the first.
        level, kind, classes: of the task, where `infer_task` should not find them.
        node_features, edge_features: whether integers are "categories" or "numbers".

    Raises:
        ValueError: names the file and line (or graph), and what is wrong there.
    """
    name = str(source) if isinstance(source, str | Path) else "the list"
    bad: Bad | None = [] if skip_bad else None
    rows, columns = open_source(
        source, targets=targets, smiles_column=smiles_column, split_column=split_column
    )
    settle = _settle_split if split in ("auto", "column") else _forget_split
    records = [record for record in read_graphs(rows, bad=bad) if _keep([record], settle, bad)]
    _not_empty(name, records, bad)
    with _about(name, bad):
        level = level or infer_level(records)
    records = _with_labels_of_one_width(records, level, bad)
    width = next((record.y.values.size for record in records if record.y is not None), None)
    target_names = columns
    if columns is not None and width != len(columns):
        target_names = None  # one column held a list of targets
    with _about(name, bad):
        if columns is not None and width is None:
            raise ValueError(f"{_no_labels(columns)}, so there is nothing to train on")
        task = infer_task(records, level=level, kind=kind, classes=classes, target_names=target_names)
    task = replace(task, columns=columns)
    records = _keep(records, lambda record: encode(record, task), bad)
    _not_empty(name, records, bad)
    molecules = isinstance(source, str | Path) and str(source).endswith(CSV)
    with _about(name, bad):
        schema = MOLECULES if molecules else infer_schema(records, node_features, edge_features)
        if all(record.split is None for record in records) and (split == "column" or split_column != "split"):
            raise ValueError(f"no graph has {split_column!r}, which is to say train, val or test")
        chosen, how = _split(records, task, split, fractions, seed)
        if not chosen["train"]:
            raise ValueError(f"no graph is left for training; the split is {how}")
    by_node = how == "by node masks"
    if task.kind == "regression":
        tables = [
            masked_labels(records[i], task.level, "train" if by_node else None) for i in chosen["train"]
        ]
        with _about(name, bad):
            task = standardised(task, tables)
    stores = {
        part: pack([records[i] for i in members], schema, task, mask=part if by_node else None)
        for part, members in chosen.items()
        if members
    }
    with _about(name, bad):
        if not has_labels(stores["train"], task):
            raise ValueError(f"no graph for training has a label; the split is {how}")
    return Dataset(
        name=name,
        splits=stores,
        task=task,
        schema=schema,
        members={part: [_member(records[i]) for i in members] for part, members in chosen.items() if members},
        bad=bad or [],
        notes=notes(records, task, chosen, how, stores, guessed=targets is None),
    )


def stream(
    source: Source,
    schema: Schema,
    *,
    task: Task | None = None,
    chunk: int = 256,
    bad: Bad | None = None,
    targets: Sequence[str] | None = None,
    smiles_column: str | None = None,
) -> Iterator[tuple[list[str], GraphStore]]:
    """Chunks of a source for prediction: the graphs' ids and their store, `chunk` graphs in memory at a time.

    Graphs must fit the `schema` that the model was trained on. Labels are not needed; with `task` they are
    read and encoded as in training, those of a CSV from the columns `targets` where it has any of them. A graph
    without an id of its own is called by its place in the source, from 0. `bad` collects bad rows, as for
    `read_graphs`.
    """
    if task is None:
        targets = ()
    rows, _ = open_source(source, targets=targets, smiles_column=smiles_column, labelled=False)
    graphs = _encodable(read_graphs(rows, bad=bad, schema=schema), task, bad)
    while members := list(islice(graphs, chunk)):
        yield [record.id or str(record.number) for record in members], pack(members, schema, task)


def _split(
    records: list[Record], task: Task, by: SplitBy, fractions: Fractions, seed: int
) -> tuple[Split, str]:
    """Positions of each split's graphs, and how they were found, in words."""
    if by == "auto":
        has_column = any(record.split is not None for record in records)
        has_masks = task.level == "node" and any(record.masks for record in records)
        by = "column" if has_column else "masks" if has_masks else "random"
    if by == "column":
        return split_by_column(records), "as the file says"
    words = "/".join(f"{fraction:g}" for fraction in fractions)
    if by == "scaffold":
        return split_by_scaffold(records, smiles.scaffold, fractions), f"by Murcko scaffold, {words}"
    if by == "random" and (len(records) > 1 or task.level != "node"):
        return split_by_fractions(len(records), fractions, seed), f"at random, {words}, seed {seed}"
    if by == "random":
        records[0] = replace(records[0], masks=node_masks(records[0].num_nodes, fractions, seed))
    if task.level != "node":
        raise ValueError(f"node masks split the labels of nodes, and these are of {task.level}s")
    masked = {
        part: [i for i, record in enumerate(records) if part in record.masks and record.masks[part].any()]
        for part in MASKS
    }
    return masked, "by node masks"


def _member(record: Record) -> Member:
    return Member(record.id or str(record.number), record.number, record.digest())


def _with_labels_of_one_width(records: list[Record], level: Level, bad: Bad | None) -> list[Record]:
    records = _keep(records, lambda record: label_rows(record, level), bad)
    widths = [None if (table := label_rows(record, level)) is None else table.shape[1] for record in records]
    usual = Counter(width for width in widths if width is not None).most_common(1)

    def check(record: Record) -> None:
        table = label_rows(record, level)
        if table is not None and table.shape[1] != usual[0][0]:
            raise ValueError(f"{table.shape[1]} targets where most graphs have {usual[0][0]}")

    return _keep(records, check, bad)


def _settle_split(record: Record) -> None:
    if record.split is not None:
        record.split = split_name(record.split)


def _forget_split(record: Record) -> None:
    """What a graph says of its split may be anything where it is not asked for."""
    record.split = None


def _encodable(records: Iterator[Record], task: Task | None, bad: Bad | None) -> Iterator[Record]:
    for record in records:
        if task is None or _keep([record], lambda graph: encode(graph, task), bad):
            yield record


def _keep(records: list[Record], check: Callable[[Record], object], bad: Bad | None) -> list[Record]:
    """The records that pass the check; the others are reported or raised."""
    kept = []
    for record in records:
        try:
            check(record)
        except ValueError as error:
            report(bad, record.place, error)
        else:
            kept.append(record)
    return kept


@contextmanager
def _about(name: str, bad: Bad | None) -> Iterator[None]:
    """An error about all graphs together begins with their source, as one about a row does, and tells what was left out."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(name):
            raise
        left_out = f"; left out as bad: {len(bad)}, {_first(bad)}" if bad else ""
        raise ValueError(f"{name}: {error}{left_out}") from None


def _no_labels(columns: Sequence[str]) -> str:
    if not columns:
        return "no column holds labels (as one called y would)"
    several = len(columns) > 1
    return f"no row has a label in column{'s' * several} {listed(columns)}"


def _first(bad: Bad) -> str:
    place, reason = bad[0]
    return f"the first {place}: {reason}"


def _not_empty(name: str, records: list[Record], bad: Bad | None) -> None:
    if not records:
        first = f": all {len(bad)} rows are bad, {_first(bad)}" if bad else ""
        raise ValueError(f"{name} holds no graphs{first}")
