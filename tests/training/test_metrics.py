import math

import pytest
import torch
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from sfiformer.training import metrics

NAN = float("nan")


def in_batches(metric, outputs, target, size=7):
    for start in range(0, len(outputs), size):
        metric.update(outputs[start : start + size], target[start : start + size])
    return metric.compute()


def confusion(predicted, target, c):
    pairs = [(p, t) for p, t in zip(predicted, target, strict=True) if t >= 0]
    hit = sum(p == t == c for p, t in pairs)
    return hit, sum(p == c for p, _ in pairs), sum(t == c for _, t in pairs)


def f1(predicted, target, c):
    hit, said, true = confusion(predicted, target, c)
    return 2 * hit / (said + true) if said + true else None


def mean(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values)


@pytest.fixture
def classes():
    """40 rows of 5 classes; class 3 is never a label nor predicted, some labels are missing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 5, generator=generator)
    logits[:, 3] = -99
    target = torch.randint(0, 3, (40,), generator=generator)
    target[target == 2] = 4
    target[[3, 17]] = -1
    return logits, target, logits.argmax(1).tolist(), target.tolist()


def test_macro_f1(classes):
    logits, target, predicted, labels = classes
    expected = mean(f1(predicted, labels, c) for c in range(5))
    assert in_batches(metrics.macro_f1(5), logits, target) == pytest.approx(expected, abs=1e-6)


def test_macro_f1_over_some_classes(classes):
    logits, target, predicted, labels = classes
    expected = mean(f1(predicted, labels, c) for c in (0, 4))
    assert in_batches(metrics.macro_f1(5, over=[0, 4]), logits, target) == pytest.approx(expected, abs=1e-6)


def test_mean_recall_and_accuracy(classes):
    logits, target, predicted, labels = classes
    recalls = [confusion(predicted, labels, c) for c in range(5)]
    expected = mean(hit / true if true else None for hit, _, true in recalls)
    assert in_batches(metrics.mean_recall(5), logits, target) == pytest.approx(expected, abs=1e-6)
    right = mean(float(p == t) if t >= 0 else None for p, t in zip(predicted, labels, strict=True))
    assert in_batches(metrics.accuracy(5), logits, target) == pytest.approx(right, abs=1e-6)


def test_mean_recall_of_one_logit():
    logits = torch.tensor([[2.0], [-1.0], [0.5], [-0.5], [3.0]])
    target = torch.tensor([1, 1, 0, 0, -1])
    metric = metrics.mean_recall(2)
    metric.update(logits, target)
    assert metric.compute() == pytest.approx((1 / 2 + 1 / 2) / 2)


def average_precision(scores, labels):
    """By hand: walk down the distinct scores."""
    total, positives, recall_before = 0.0, sum(labels), 0.0
    for threshold in sorted(set(scores), reverse=True):
        taken = [y for s, y in zip(scores, labels, strict=True) if s >= threshold]
        recall = sum(taken) / positives
        total += (recall - recall_before) * sum(taken) / len(taken)
        recall_before = recall
    return total


def auc(scores, labels):
    pairs = [
        (p > n) + 0.5 * (p == n)
        for p, y in zip(scores, labels, strict=True)
        if y
        for n, z in zip(scores, labels, strict=True)
        if not z
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize(
    ("metric", "oracle"), [(metrics.average_precision, average_precision), (metrics.roc_auc, auc)]
)
def test_scores_over_tasks_skip_missing_labels_and_tasks_of_one_class(metric, oracle):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 4, generator=generator).round(decimals=1)  # with ties
    logits[:25] += 60  # where a float32 sigmoid knows no difference any more
    target = torch.randint(0, 2, (50, 4), generator=generator).float()
    target[::3, 0] = NAN
    target[:, 2] = 1
    target[:, 3] = NAN
    expected = []
    for column in (0, 1):
        present = [i for i in range(50) if not math.isnan(target[i, column])]
        scores = [float(logits[i, column]) for i in present]
        expected.append(oracle(scores, [int(target[i, column]) for i in present]))
    assert in_batches(metric(4), logits, target) == pytest.approx(mean(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("metric", "oracle"),
    [(metrics.average_precision, binary_average_precision), (metrics.roc_auc, binary_auroc)],
)
@pytest.mark.parametrize("digits", [1, 6])  # of the scores: many ties, and hardly any
def test_scores_are_those_of_torchmetrics(metric, oracle, digits):
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(2331, 10, generator=generator).round(decimals=digits)
    target = (torch.rand(2331, 10, generator=generator) < torch.linspace(0.01, 0.6, 10)).float()
    target[torch.rand(2331, 10, generator=generator) < 0.05] = NAN
    present = ~target.isnan()
    expected = [
        float(oracle(scores[rows, t].double(), target[rows, t].long())) for t, rows in enumerate(present.T)
    ]
    assert in_batches(metric(10), scores, target, size=500) == pytest.approx(mean(expected), abs=1e-6)


def test_scores_beyond_all_numbers_are_ranked_too():
    scores = torch.tensor([math.inf, math.inf, 1.0, -math.inf, -math.inf])
    metric = metrics.roc_auc()
    metric.update(scores, torch.tensor([1, 0, 1, 0, 1]))
    assert metric.compute() == pytest.approx(auc(scores.tolist(), [1, 0, 1, 0, 1]))


def test_roc_auc_of_integer_labels():
    metric = metrics.roc_auc()
    metric.update(torch.tensor([[0.9], [0.1], [0.4], [7.0]]), torch.tensor([1, 0, 1, -1]))
    assert metric.compute() == 1.0


def test_scores_without_two_classes_are_nan():
    metric = metrics.average_precision()
    metric.update(torch.tensor([0.9, 0.1]), torch.tensor([1, 1]))
    assert math.isnan(metric.compute())


def test_mae_in_units():
    outputs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    target = torch.tensor([[0.5, NAN], [3.0, 6.0]])
    plain, scaled = metrics.MAE(targets=2), metrics.MAE(scale=(10.0, 100.0))
    assert (plain.name, scaled.name) == ("mae", "relative_mae")
    assert in_batches(plain, outputs, target, size=1) == pytest.approx((0.5 + 0 + 2) / 3)
    assert in_batches(scaled, outputs, target, size=1) == pytest.approx((0.5 + 0 + 2) / 3)
    one = metrics.MAE(scale=(10.0,))
    assert in_batches(one, outputs[:, :1], target[:, :1], size=1) == pytest.approx((5 + 0) / 2)
    assert scaled.by_target() == pytest.approx([2.5, 200])


def test_an_output_that_is_no_number_is_no_small_error():
    metric = metrics.MAE()
    metric.update(torch.tensor([[NAN, 1.0]]), torch.tensor([[1.0, NAN]]))
    assert math.isnan(metric.compute())


def test_reset_name_and_direction(classes):
    logits, target, *_ = classes
    for metric in (metrics.macro_f1(5), metrics.accuracy(5), metrics.mean_recall(5)):
        first = in_batches(metric, logits, target)
        metric.reset()
        assert in_batches(metric, logits[:10], target[:10]) != first
        metric.reset()
        assert in_batches(metric, logits, target) == first
        assert metric.higher_is_better
    assert not metrics.MAE().higher_is_better
    assert metrics.average_precision(3).name == "ap"
