"""The task that a user's labels pose, and labels as the tensors that losses and metrics take."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import ne

import numpy as np
import torch
from torch import Tensor

from .labels import are_few, is_number, is_truth, with_one_truth
from .record import Record, has_decimal_comma, label_text
from .task import Kind, Level, Task, listed

FEW_CLASSES = 10  # so many integer labels are classes; more must be numbered as such, with five rows of each
REMEDY = "correct it, leave it empty where it is missing, or say --data.kind classification"
Classes = int | Sequence[str]


def infer_level(records: Sequence[Record]) -> Level:
    """Whether the labels are of graphs, nodes or links."""
    if any(record.links is not None for record in records):
        return "link"
    if any(record.masks for record in records):
        return "node"
    labelled = [(record.y.values.shape, record) for record in records if record.y is not None]
    shapes = [shape for shape, _ in labelled]
    if not any(shapes):  # single values
        return "graph"
    fits_nodes = [shape[:1] == (record.num_nodes,) for shape, record in labelled]
    of_nodes = sum(fits_nodes)
    # Of a graph: a single value, [1], [1, T], or a bare list of T targets that is as long in every graph.
    usual = Counter(shape for shape in shapes if len(shape) < 2).most_common(1)
    of_graph = max(sum(shape[:1] in ((), (1,)) for shape in shapes), *(count for _, count in usual), 0)
    if 2 * max(of_nodes, of_graph) > len(labelled):  # a few that are neither are bad graphs
        if of_nodes == of_graph and (len(records) > 1 or records[0].num_nodes == 1):
            raise ValueError(
                "y is as long as the graph has nodes, but so in graphs that are all of one size: "
                "say --data.level node (one label a node) or --data.level graph (several targets a graph)"
            )
        return "node" if of_nodes >= of_graph else "graph"
    shape, odd = labelled[fits_nodes.index(False)]
    raise ValueError(
        f"{odd.place}: y has shape {list(shape)} in a graph of {odd.num_nodes} nodes, "
        "neither one label a node nor as many targets as the other graphs; correct it, or say --data.level"
    )


def label_rows(record: Record, level: Level) -> np.ndarray | None:
    """The labels as given, [rows, T]: for the graph one row, else one a node or link; None where absent."""
    if record.y is None:
        return None
    values = record.y.values
    if level == "graph":
        return values.reshape(1, -1)
    rows = row_count(record, level)
    if values.ndim == 0 or values.shape[0] != rows:
        found = values.shape[0] if values.ndim else 1
        raise ValueError(
            f"{found} labels for {rows} {level}s: one a {level} is needed, null where it is missing"
        )
    return values.reshape(rows, -1) if rows else None


def row_count(record: Record, level: Level) -> int:
    """Target rows of a graph."""
    if level == "link":
        return 0 if record.links is None else len(record.links)
    return record.num_nodes if level == "node" else 1


def infer_task(
    records: Sequence[Record],
    *,
    level: Level | None = None,
    kind: Kind | None = None,
    classes: Classes | None = None,
    target_names: Sequence[str] | None = None,
) -> Task:
    """The task that the labels of all splits pose; what is given is kept, the rest inferred.

    One column: text is classes; zeros and ones are binary, as are two classes; integers are classes when
    they are few (10 at most), or numbers from 0 or 1 on without a gap and with five rows of each; all else is
    regression. Several columns: multi-label when all are zeros and ones, else regression. Links without labels
    are true links, to be ranked above all other pairs. `classes` is the number of classes
    (integer labels 0, 1, …) or their names in order.
    """
    level = level or infer_level(records)
    tables = [table for record in records if (table := label_rows(record, level)) is not None]
    text = any(record.y.text for record in records if record.y is not None)
    whole = all(record.y.whole for record in records if record.y is not None)
    if kind == "ranking" or (kind is None and level == "link" and not tables):
        return Task(level, "ranking", 1)
    if not tables:
        raise ValueError("no graph has a label (y), so there is nothing to train on")
    width = tables[0].shape[1]
    cells = np.concatenate([table.ravel() for table in tables])
    if text:
        distinct = sorted(
            with_one_truth({label_text(cell) for cell in cells if cell is not None and cell == cell})
        )
    else:
        distinct = np.unique(cells[~np.isnan(cells)]).tolist()
    if not distinct:
        raise ValueError("every label (y) is missing, so there is nothing to train on")

    if text and kind is None and classes is None:
        _require_names(records, cells, target_names)
    truth = not text and set(distinct) <= {0.0, 1.0}
    few = whole and _are_numbers_of_classes(cells[~np.isnan(cells)])
    names = _class_names(classes if classes is not None else 2 if truth else distinct)
    if kind is None and width > 1:
        kind = "multilabel" if truth else "regression"
    elif kind is None:
        discrete = text or truth or few or classes is not None
        kind = "regression" if not discrete else "binary" if len(names) == 2 else "classification"

    outputs = len(names) if kind == "classification" else width
    if level == "link" and outputs > 1:
        what = "classes" if kind == "classification" else "targets"
        raise ValueError(
            f"a link has one score, and its labels (edge_label) have {outputs} {what}: give each link one label of two, "
            "or one number (--data.kind regression)"
        )
    if kind in ("classification", "binary"):
        if width > 1:
            raise ValueError(
                f"{kind} takes one label a row, here are {width}: say --data.kind multilabel or regression"
            )
        if kind == "binary" and len(names) != 2:
            raise ValueError(
                f"binary needs two classes, the labels have {len(names)}: say --data.kind classification"
            )
        if classes is None and len(distinct) < 2:
            column = f" in column {target_names[0]}" if target_names else ""
            raise ValueError(
                f"every label{column} is {label_text(distinct[0])!r}, so there is nothing to learn: two classes are needed, "
                f"and a missing label is none of them{_other_columns(records) if target_names else ''}"
            )
        plain = names == _class_names(len(names))
        return Task(level, kind, 1 if kind == "binary" else len(names), class_names=None if plain else names)
    if text:
        place, label = _first_text(records)
        remedy = "correct it, or leave it empty where it is missing"
        if has_decimal_comma(label):
            remedy = "write decimals with a point"
        elif is_number(label):
            remedy = "write numbers without quotation marks"
        raise ValueError(f"{place}: {kind} needs numbers, and there is the label {label!r}; {remedy}")
    return Task(level, kind, width, target_names=tuple(target_names) if target_names else None)


def _other_columns(records: Sequence[Record]) -> str:
    """A remedy that names the columns that were not read, where there are any."""
    others = sorted(frozenset[str]().union(*(record.unused for record in records)))
    which = f"one of {listed(others)}" if others[1:] else "".join(others)
    return f"; name what is to be predicted: --data.targets {which}" if others else ""


def _are_numbers_of_classes(labels: np.ndarray) -> bool:
    """Whether whole numbers are classes, and not amounts."""
    distinct, counts = np.unique(labels, return_counts=True)
    without_gap = distinct[0] in (0, 1) and distinct[-1] - distinct[0] == len(distinct) - 1
    return len(distinct) <= FEW_CLASSES or bool(without_gap and counts.min() >= 5)


def _are_amounts(labels: np.ndarray) -> bool:
    """Whether numbers that have text beside them are amounts by their values."""
    return not (labels == labels.round()).all() or not _are_numbers_of_classes(labels)


def _first_text(records: Sequence[Record], usual: Callable[[str], bool] = is_number) -> tuple[str, str]:
    """The first label that is not as usual, with its place; where there is none, the first that was written as text."""
    labels = [
        (record.place, label)
        for record in records
        if record.y is not None
        for label in record.y.values.ravel().tolist()
        if label is not None and label == label
    ]
    odd = ((place, label_text(label)) for place, label in labels if not usual(label_text(label)))
    return next(odd, None) or next(found for found in labels if isinstance(found[1], str))


def _require_names(records: Sequence[Record], cells: np.ndarray, target_names: Sequence[str] | None) -> None:
    """Refuse text that names no classes: decimals with a comma, a few among numbers, hardly a label twice, or two that
    differ by case."""
    labels = [cell for cell in cells if cell is not None and cell == cell]
    numbers = [float(label) for label in labels if is_number(label)]
    texts = [label for label in labels if not is_number(label)]
    column = f" in column {target_names[0]}" if target_names else ""
    commas = [label for label in texts if has_decimal_comma(label)]
    if 2 * len(commas) > len(texts):
        raise ValueError(
            f"labels{column} such as {commas[0]!r} are text, for their comma: write decimals with a point "
            f"({commas[0].replace('.', '').replace(',', '.')})"
        )
    truths = [label for label in texts if is_truth(label)]
    if are_few(len(labels) - len(truths), len(truths)) and len(truths) < len(labels):
        place, label = _first_text(records, is_truth)
        raise ValueError(
            f"{place}: the label {label!r} is no truth value, and {len(truths)} others are: {REMEDY}"
        )
    many = len(numbers) > len(texts) or len(set(numbers)) > max(FEW_CLASSES, len(labels) // 5)
    few = are_few(len(texts), len(numbers)) or (many and _are_amounts(np.array(numbers)))
    if texts and few:
        place, label = _first_text(records)
        raise ValueError(
            f"{place}: the label {label!r} is text, and {len(numbers)} others are numbers: {REMEDY}"
        )
    counts = Counter(map(label_text, labels))
    once = sum(count == 1 for count in counts.values())
    if len(counts) > FEW_CLASSES and 2 * once > len(counts):
        shown = label_text((texts or labels)[0])[:40]
        raise ValueError(
            f"{once} of the {len(counts)} different labels{column}, such as {shown!r}, occur only once, "
            "and are hardly classes: name another column (--data.targets of sfi train), or "
            "say --data.kind classification"
        )
    spellings: dict[str, str] = {}
    for name, _ in counts.most_common():
        usual = spellings.setdefault(name.lower(), name)
        if name != usual and not is_truth(name):
            place, _ = _first_text(records, partial(ne, name))
            raise ValueError(
                f"{place}: the label {name!r} differs from {usual!r} only by case: write them alike, or say "
                "--data.kind classification"
            )


def encode(record: Record, task: Task) -> Tensor:
    """The labels of one graph for losses and metrics, one row for the graph, a node or a link.

    Classification and binary: int64 [rows], -1 where missing. Multi-label and regression: float32 [rows, T],
    NaN where missing, a regression standardised with the task's mean and standard deviation.
    """
    rows = row_count(record, task.level)
    table = label_rows(record, task.level)
    single = task.kind in ("classification", "binary", "ranking")
    if table is None:
        if task.kind == "ranking":
            return torch.ones(rows, dtype=torch.int64)  # links listed without labels are true
        return torch.full((rows,), -1) if single else torch.full((rows, task.outputs), float("nan"))
    wanted = 1 if single else task.outputs
    if table.shape[1] != wanted:
        raise ValueError(f"{table.shape[1]} targets where {wanted} are expected")
    if single:
        return torch.from_numpy(_class_numbers(table[:, 0], task))
    if table.dtype == object:
        raise ValueError(f"text labels, such as {table.ravel()[0]!r}, where numbers are expected")
    if task.kind == "multilabel":
        wrong = ~np.isnan(table) & (table != 0) & (table != 1)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise ValueError(
                f"label {table[row, column]:g} in row {row}, target {column}, is neither 0 nor 1"
            )
    if task.target_mean is not None:
        table = (table - np.array(task.target_mean)) / np.array(task.target_std)
    return torch.from_numpy(table.astype(np.float32))


def standardised(task: Task, tables: Sequence[np.ndarray | None]) -> Task:
    """A regression task with the mean and standard deviation of the training labels, tables [rows, T]."""
    values = np.concatenate([np.full((1, task.outputs), np.nan), *(t for t in tables if t is not None)])
    empty = np.isnan(values).all(0)
    if empty.any():
        number = int(empty.argmax())
        name = task.target_names[number] if task.target_names else number
        raise ValueError(f"target {name} has no label in the training split")
    mean, std = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    std = np.where(std > 1e-12 * np.abs(mean), std, 1.0)  # a constant target keeps its scale
    return replace(task, target_mean=tuple(mean.tolist()), target_std=tuple(std.tolist()))


def _class_names(classes: int | Sequence[object]) -> tuple[str, ...]:
    return tuple(label_text(name) for name in (range(classes) if isinstance(classes, int) else classes))


def _class_numbers(labels: np.ndarray, task: Task) -> np.ndarray:
    names = task.class_names or _class_names(2 if task.outputs == 1 else task.outputs)
    numbers = {name.lower(): number for number, name in enumerate(names) if is_truth(name)}
    numbers |= {name: number for number, name in enumerate(names)}
    found = np.full(len(labels), -1, dtype=np.int64)
    for row, label in enumerate(labels.tolist()):
        if label is not None and label == label:
            name = label_text(label)
            number = numbers.get(name, numbers.get(name.lower()) if is_truth(name) else None)
            if number is None:
                place = "" if task.level == "graph" else f" of {task.level} {row}"
                raise ValueError(
                    f"label {label_text(label)!r}{place} is not among the {len(names)} classes ({listed(names)})"
                )
            found[row] = number
    return found
