"""Model outputs as predictions in the user's own terms: class names, probabilities, units."""

import torch
from torch import Tensor

from .task import Task


def decode(task: Task, outputs: Tensor) -> dict[str, list[str] | list[float]]:
    """Columns of a prediction table, one entry a target row, from raw model outputs [rows, task.outputs].

    Classification: "prediction" (the class's name) and "probability:NAME" for each class. Binary:
    the same with the second class alone. Multi-label: "probability:NAME" for each target.
    Regression: "prediction:NAME" for each target, in its own units. Ranking: "score", the logit of the link.
    Classes and targets without names are numbered.
    """
    outputs = outputs.detach().to("cpu", torch.float64).reshape(-1, task.outputs)
    if task.kind == "ranking":
        return {"score": outputs[:, 0].tolist()}
    if task.kind == "classification":
        names = task.class_names or tuple(map(str, range(task.outputs)))
        probability = outputs.softmax(-1)
        best = [names[number] for number in outputs.argmax(-1).tolist()]
        return {"prediction": best, **_columns(probability, [f"probability:{name}" for name in names])}
    if task.kind == "binary":
        names = task.class_names or ("0", "1")
        best = [names[number] for number in (outputs[:, 0] > 0).long().tolist()]
        return {"prediction": best, f"probability:{names[1]}": outputs[:, 0].sigmoid().tolist()}
    targets = task.target_names or tuple(map(str, range(task.outputs)))
    if task.kind == "multilabel":
        return _columns(outputs.sigmoid(), [f"probability:{name}" for name in targets])
    return _columns(in_units(task, outputs), [f"prediction:{name}" for name in targets])


def in_units(task: Task, values: Tensor) -> Tensor:
    """Standardised values [..., task.outputs] of a regression in the units of the data: y·std + mean."""
    if task.target_mean is None or task.target_std is None:
        return values
    return values * values.new_tensor(task.target_std) + values.new_tensor(task.target_mean)


def _columns(table: Tensor, names: list[str]) -> dict[str, list[str] | list[float]]:
    return {name: table[:, column].tolist() for column, name in enumerate(names)}
