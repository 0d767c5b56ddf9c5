"""Which loss and which metric a task is trained and judged by."""

from torchmetrics import Metric

from ..data.task import Task
from . import metrics
from .losses import L1, BinaryCrossEntropy, CrossEntropy, Loss
from .mrr import VARIANTS, LinkMRR

# The nine benchmarks: their tasks, and the losses and metrics of their papers.
DATASETS: dict[str, tuple[Task, str, str]] = {
    "pascalvoc-sp": (Task("node", "classification", 21), "weighted_cross_entropy", "macro_f1"),
    "coco-sp": (Task("node", "classification", 81), "weighted_cross_entropy", "macro_f1"),
    "peptides-func": (Task("graph", "multilabel", 10), "cross_entropy", "ap"),
    "peptides-struct": (Task("graph", "regression", 11), "l1", "mae"),
    "pcqm-contact": (Task("link", "ranking", 1), "cross_entropy", "mrr"),
    "mnist": (Task("graph", "classification", 10), "cross_entropy", "accuracy"),
    "cifar10": (Task("graph", "classification", 10), "cross_entropy", "accuracy"),
    "pattern": (Task("node", "binary", 1), "weighted_cross_entropy", "mean_recall"),
    "cluster": (Task("node", "classification", 6), "weighted_cross_entropy", "mean_recall"),
}
# What each kind of task may take, the default first.
LOSSES = {
    "classification": ("cross_entropy", "weighted_cross_entropy"),
    "binary": ("cross_entropy", "weighted_cross_entropy"),
    "multilabel": ("cross_entropy",),
    "regression": ("l1",),
    "ranking": ("cross_entropy",),
}
METRICS = {
    "classification": ("accuracy", "macro_f1", "mean_recall"),
    "binary": ("roc_auc", "ap", "accuracy", "macro_f1", "mean_recall"),
    "multilabel": ("ap", "roc_auc"),
    "regression": ("mae",),
    "ranking": ("mrr", "mrr_filtered", "mrr_filtered_self"),
}


def loss_and_metric(
    what: Task | str, loss: str | None = None, metric: str | None = None
) -> tuple[Loss, Metric]:
    """The loss and metric of a task, or of a benchmark by name; `loss` and `metric` choose others by name.

    The MAE of one target is in the units of the data when the task holds what they were standardised with.
    """
    if isinstance(what, str):
        if what not in DATASETS:
            raise ValueError(f"no dataset is called {what!r}; there are {', '.join(DATASETS)}")
        task, own_loss, own_metric = DATASETS[what]
        loss, metric = loss or own_loss, metric or own_metric
    else:
        task = what
    return (
        _loss(task, _choice("loss", task, loss, LOSSES[task.kind])),
        _metric(task, _choice("metric", task, metric, METRICS[task.kind])),
    )


def _choice(what: str, task: Task, name: str | None, choices: tuple[str, ...]) -> str:
    if name is not None and name not in choices:
        raise ValueError(f"{name!r} is no {what} for a {task.kind} task; choose from {', '.join(choices)}")
    return name or choices[0]


def _loss(task: Task, name: str) -> Loss:
    if name == "l1":
        return L1()
    weighted = name == "weighted_cross_entropy"
    if task.kind == "classification":
        return CrossEntropy(task.outputs, weighted)
    return BinaryCrossEntropy(weighted)


def _metric(task: Task, name: str) -> Metric:
    if name == "mae":
        return metrics.MAE(task.target_std, task.outputs)
    if task.kind == "ranking":
        return LinkMRR(VARIANTS[METRICS["ranking"].index(name)])
    if name in ("ap", "roc_auc"):
        return (metrics.average_precision if name == "ap" else metrics.roc_auc)(task.outputs)
    classes = 2 if task.kind == "binary" else task.outputs
    build = {"accuracy": metrics.accuracy, "macro_f1": metrics.macro_f1, "mean_recall": metrics.mean_recall}
    return build[name](classes)
