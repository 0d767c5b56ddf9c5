"""What a batch asks of the model, and what the right answers are."""

import torch
from torch import Tensor

from sfiformer.data.batch import GraphBatch
from sfiformer.data.task import Task
from sfiformer.errors import UserError
from sfiformer.hashing import mixed, seeded, uniform
from sfiformer.nn.model import SFiFormer
from sfiformer.training.negatives import sample_negatives

NEGATIVES = 2  # for each true link


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


def with_negatives(batch: GraphBatch, seed: int | Tensor) -> GraphBatch:
    """The true links of a batch, label 1, and two false ones for each, label 0.

    What is drawn for a link depends on the seed, the graph and the link alone, not on what is in the batch besides. Pairs that
    are neither have no label (NaN): how many there are of each does not show in the shapes. A link that is there twice draws
    the same twice.
    """
    links, true = batch.edge_label_index, true_links(batch)
    graph = batch.batch[links[0]]
    bits = seeded(seed)
    for number in (batch.graph_ids[graph], *(links - batch.ptr[graph])):
        bits = mixed(bits + number + 1)
    each = torch.arange(1, NEGATIVES + 1, device=batch.device)
    chosen = uniform(mixed(bits.unsqueeze(1) + each))  # [L, 2]
    negatives, negative = sample_negatives(links, true, batch.ptr, batch.num_nodes, chosen)
    label = torch.cat([true.float(), torch.zeros_like(negative, dtype=torch.float32)])
    label = label.masked_fill(~torch.cat([true, negative]), torch.nan)
    return batch.replace(edge_label_index=torch.cat([links, negatives], dim=1), edge_label=label)


def answers(model: SFiFormer, batch: GraphBatch, task: Task) -> tuple[Tensor, ...]:
    """What a metric is to see of a batch: the model's answers and what is right."""
    if task.kind == "ranking":  # a true tail is ranked among all nodes of its graph
        return model.embed(batch).float(), batch.edge_label_index, batch.ptr, true_links(batch)
    return model(batch).float(), target_of(batch, task)
