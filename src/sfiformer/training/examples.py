"""What a batch asks of the model, and what the right answers are."""

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from sfiformer.data.batch import GraphBatch
from sfiformer.data.task import Task
from sfiformer.errors import UserError
from sfiformer.nn.model import SFiFormer
from sfiformer.training.negatives import sample_negatives


def target_of(batch: GraphBatch, task: Task) -> Tensor:
    """The labels of a batch, a row for each graph, node or link."""
    name = "edge_label" if task.level == "link" else "y"
    if name not in batch:
        raise UserError(f"the graphs have no labels: their field {name!r} is missing")
    return batch.fields[name]


def true_links(batch: GraphBatch) -> Tensor:
    """Which of the labelled links are true ones, [L] bool; without labels all are."""
    if "edge_label" in batch:
        return batch.edge_label.reshape(-1) == 1
    return torch.ones(batch.edge_label_index.size(1), dtype=torch.bool, device=batch.device)


def with_negatives(batch: GraphBatch, uniform: Tensor) -> GraphBatch:
    """The true links of a batch, label 1, and false ones that `uniform` [L, K] chooses for each, label 0."""
    true = true_links(batch)
    positives = batch.edge_label_index[:, true]  # [2, P]
    negatives = sample_negatives(positives, batch.ptr, uniform.to(batch.device)[true])
    label = torch.zeros(positives.size(1) + negatives.size(1), device=batch.device)
    label[: positives.size(1)] = 1.0
    return batch.replace(edge_label_index=torch.cat([positives, negatives], dim=1), edge_label=label)


def update(metric: Metric | MetricCollection, model: SFiFormer, batch: GraphBatch, task: Task) -> None:
    """Let a metric see the model's answers to a batch."""
    if task.kind == "ranking":  # a true tail is ranked among all nodes of its graph
        outputs = model.embed(batch).float()
        metric.update(outputs, batch.edge_label_index, batch.ptr, true_links(batch))
    else:
        metric.update(model(batch).float(), target_of(batch, task))
