"""What the model said of a graph, beside the truth, as texts for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfiformer.data.decode import decode, in_units
from sfiformer.data.task import Task

if TYPE_CHECKING:
    from sfiformer.explain.record import GraphRecord

_UNKNOWN = "?"


def said(record: GraphRecord) -> dict[str, list]:
    """ "graph": rows of target, model and truth; or "nodes": a sentence for each node; neither for links."""
    task = record.task
    if task.level == "link" or len(record.outputs) != (1 if task.level == "graph" else record.num_nodes):
        return {}
    models, truths = _models(task, record.outputs), _truths(task, record.target, len(record.outputs))
    if task.level == "graph":
        names = (
            task.target_names or _numbered(task) if task.kind in ("multilabel", "regression") else ("class",)
        )
        return {"graph": [list(row) for row in zip(names, models[0], truths[0], strict=True)]}
    pairs = zip(models, truths, strict=True)
    return {
        "nodes": [f"model: {', '.join(model)}; truth: {', '.join(truth)}" for model, truth in pairs],
    }


def _models(task: Task, outputs: Tensor) -> list[list[str]]:
    """For each target row, a text for each target."""
    columns = decode(task, outputs)
    if task.kind in ("multilabel", "regression"):
        return [[_number(value) for value in row] for row in zip(*columns.values(), strict=True)]
    logits = outputs.double()
    if task.kind == "binary":
        logits = torch.nn.functional.pad(logits, (1, 0))  # of the negative and the positive class
    likely = logits.softmax(-1).amax(-1).tolist()
    return [
        [f"{name} ({probability:.0%})"]
        for name, probability in zip(columns["prediction"], likely, strict=True)
    ]


def _truths(task: Task, target: Tensor | None, rows: int) -> list[list[str]]:
    targets = task.outputs if task.kind in ("multilabel", "regression") else 1
    if target is None:
        return [[_UNKNOWN] * targets] * rows
    values = target.reshape(rows, targets).double()
    if task.kind == "regression":
        values = in_units(task, values)
    if task.kind in ("multilabel", "regression"):
        return [[_number(value) for value in row] for row in values.tolist()]
    names = task.class_names or tuple(map(str, range(2 if task.kind == "binary" else task.outputs)))
    known = (values >= 0) & values.isfinite()
    return [
        [names[int(v)] if ok else _UNKNOWN]
        for (v,), (ok,) in zip(values.tolist(), known.tolist(), strict=True)
    ]


def _numbered(task: Task) -> tuple[str, ...]:
    return tuple(map(str, range(task.outputs)))


def _number(value: float) -> str:
    return _UNKNOWN if not torch.tensor(value).isfinite() else f"{value:.3g}"
