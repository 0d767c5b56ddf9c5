import pytest
import torch

from sfiformer.data.task import Task
from sfiformer.training.losses import L1, BinaryCrossEntropy, CrossEntropy
from sfiformer.training.objectives import DATASETS, loss_and_metric


@pytest.mark.parametrize(
    ("name", "loss", "weighted", "metric"),
    [
        ("pascalvoc-sp", CrossEntropy, True, "macro_f1"),
        ("coco-sp", CrossEntropy, True, "macro_f1"),
        ("peptides-func", BinaryCrossEntropy, False, "ap"),
        ("peptides-struct", L1, None, "mae"),
        ("pcqm-contact", BinaryCrossEntropy, False, "mrr"),
        ("mnist", CrossEntropy, False, "accuracy"),
        ("cifar10", CrossEntropy, False, "accuracy"),
        ("pattern", BinaryCrossEntropy, True, "mean_recall"),
        ("cluster", CrossEntropy, True, "mean_recall"),
    ],
)
def test_benchmarks(name, loss, weighted, metric):
    made, judged = loss_and_metric(name)
    assert type(made) is loss
    assert getattr(made, "weighted", None) == weighted
    assert judged.name == metric
    assert len(DATASETS) == 9


@pytest.mark.parametrize(
    ("task", "target", "metric"),
    [
        (Task("node", "classification", 3), torch.tensor([0, 2, -1, 1]), "accuracy"),
        (Task("graph", "binary", 1), torch.tensor([0, 1, -1, 1]), "roc_auc"),
        (Task("graph", "multilabel", 2), torch.tensor([[0.0, 1], [1, 0], [1, 1], [0, 1]]), "ap"),
        (Task("graph", "regression", 2), torch.tensor([[0.0, 1], [1, 0], [1, 1], [0, 1]]), "mae"),
    ],
)
def test_defaults_of_a_task_take_the_models_outputs(task, target, metric):
    loss, judged = loss_and_metric(task)
    outputs = torch.randn(4, task.outputs)
    assert loss(outputs, target).isfinite()
    judged.update(outputs, target)
    assert isinstance(judged.compute(), float)
    assert judged.name == metric


def test_choices_by_name():
    task = Task("node", "classification", 3)
    loss, metric = loss_and_metric(task, loss="weighted_cross_entropy", metric="macro_f1")
    assert loss.weighted
    assert metric.name == "macro_f1"
    assert loss_and_metric("pcqm-contact", metric="mrr_filtered_self")[1].variant == "filtered_self"
    with pytest.raises(
        ValueError, match="'mae' is no metric for a classification task; choose from accuracy"
    ):
        loss_and_metric(task, metric="mae")
    with pytest.raises(ValueError, match="no dataset is called 'mnst'"):
        loss_and_metric("mnst")


def test_mae_comes_in_the_units_of_the_data():
    task = Task("graph", "regression", 1, target_mean=(5.0,), target_std=(4.0,))
    metric = loss_and_metric(task)[1]
    metric.update(torch.tensor([[1.0]]), torch.tensor([[0.5]]))
    assert metric.compute() == pytest.approx(2.0)
