"""What is said of a user's data once it is read: a line for each thing that was inferred, left out or is amiss."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .infer import FEW_CLASSES, encode, label_rows
from .pack import has_labels
from .record import Record, label_text
from .seen import has_both_ways
from .splits import Split
from .store import GraphStore
from .task import Task, listed


def notes(
    records: list[Record],
    task: Task,
    chosen: Split,
    how: str,
    stores: Mapping[str, GraphStore],
    guessed: bool,
) -> tuple[str, ...]:
    """The lines: of the labels, the split (`how` in words, `chosen` by position), the columns, the edges and the molecules.

    `guessed`: nobody named the columns of the targets.
    """
    lines = [
        *_about_labels(records, task),
        *_about_amounts(records, task, guessed),
        f"split: {how}",
        *_absent(stores, task),
    ]
    if task.target_mean is not None:
        lines.append("targets are standardised with the training split's mean and standard deviation")
    unused = sorted(frozenset[str]().union(*(record.unused for record in records)))
    if unused:
        lines.append(f"not used: {', '.join(unused)}")
    if not any(ways := [has_both_ways(store) for store in stores.values()]) and False in ways:
        lines.append(
            "no edge has its reverse: edges are directed, and undirected ones are to be listed both ways"
        )
    return (*lines, *_about_molecules(records, task, chosen))


def _about_labels(records: list[Record], task: Task) -> list[str]:
    """A line that names their columns, and says how many are missing."""
    facts = []
    if task.columns is not None:
        facts.append(f"column{'s' * (len(task.columns) > 1)} {listed(task.columns)}")
    labels = torch.cat([encode(record, task) for record in records])
    missing = int((labels.isnan() if labels.is_floating_point() else labels < 0).sum())
    if missing:
        facts.append(f"{missing} of {labels.numel()} missing")
    return [f"labels: {', '.join(facts)}"] if facts else []


def _about_amounts(records: list[Record], task: Task, guessed: bool) -> list[str]:
    """Lines that name the targets of a regression that look like numbers of the rows, or are the same everywhere."""
    if task.kind != "regression":
        return []
    tables = [table for record in records if (table := label_rows(record, task.level)) is not None]
    lines, numbers = [], []
    for column, labels in enumerate(np.concatenate(tables).T):
        name = task.target_names[column] if task.target_names else f"target {column}"
        values = np.unique(labels[~np.isnan(labels)])
        if len(values) == 1:
            lines.append(f"{name}: every label is {label_text(values.item())}, so there is nothing to learn")
        if len(values) == len(labels) > FEW_CLASSES and (values == values.round()).all():
            numbers.append(name)
    if guessed and 0 < len(numbers) < task.outputs:
        lines.append(
            f"{listed(numbers)}: another whole number in each row, as row numbers and ids are; if it is none to be predicted, "
            "name those that are (--data.targets)"
        )
    return lines


def _absent(stores: Mapping[str, GraphStore], task: Task) -> list[str]:
    """A line for each split without labels, for a class that cannot be learnt, and where two are not to be told apart."""
    names = task.class_names or tuple(map(str, range(2 if task.kind == "binary" else task.outputs)))
    lines = []
    for part, store in stores.items():
        if not has_labels(store, task):
            lines.append(f"{part} has no label")
        elif task.kind in ("classification", "binary"):
            fields = {**store.node, **store.graph, **store.link}
            present = set(fields["edge_label" if task.level == "link" else "y"].unique().tolist())
            absent = [name for number, name in enumerate(names) if number not in present]
            if absent and (part == "train" or task.kind == "binary"):
                lines.append(f"{part} has no label of class {listed(absent)}")
    return lines


def _about_molecules(records: list[Record], task: Task, chosen: Split) -> list[str]:
    """Lines that say how many molecules to measure by are those of training, and how many contradict themselves."""
    molecules = [record.molecule or record.smiles for record in records]
    trained = {molecules[i] for i in chosen["train"]} - {None}
    again = sum(molecules[i] in trained for part in ("val", "test") for i in chosen.get(part, ()))
    lines = []
    if again:
        lines.append(
            f"{again} graph{'s' * (again > 1)} of val and test with a molecule of train: scores on them say little "
            "(--data.split scaffold keeps equal molecules together)"
        )
    labels = defaultdict(list)
    for record, molecule in zip(records, molecules, strict=True):
        if molecule is not None and record.y is not None and task.level == "graph":
            labels[molecule].append(_present(encode(record, task)))
    odd = sum(_differ(torch.stack(rows)) for rows in labels.values() if len(rows) > 1)
    if odd:
        lines.append(f"{odd} molecule{'s' * (odd > 1)} in several graphs with different labels")
    return lines


def _present(labels: Tensor) -> Tensor:
    """Labels as they are trained on, with NaN for a missing class, too."""
    if labels.is_floating_point():
        return labels
    return torch.where(labels < 0, torch.nan, labels.float())


def _differ(labels: Tensor) -> bool:
    """Whether rows of labels [rows, …] differ where they are not missing (NaN)."""
    return bool((labels.nan_to_num(-torch.inf).amax(0) > labels.nan_to_num(torch.inf).amin(0)).any())
