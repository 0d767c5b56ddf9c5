import math

import pytest
import torch

from sfiformer.training.losses import L1, BinaryCrossEntropy, CrossEntropy

NAN = float("nan")


def row_loss(logits, label):
    return math.log(sum(math.exp(v) for v in logits)) - logits[label]


def test_cross_entropy_leaves_missing_labels_out():
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([2, -1, 0, 1, -1])
    expected = sum(row_loss(logits[i].tolist(), int(target[i])) for i in (0, 2, 3)) / 3
    assert float(CrossEntropy(3)(logits, target)) == pytest.approx(expected, rel=1e-6)


def test_weighted_cross_entropy_by_hand():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    labels = [0, 0, 0, 2, 3, -1]  # class 1 is absent, the last row has no label
    weights = {0: 2 / 5, 2: 4 / 5, 3: 4 / 5}
    total = sum(weights[y] * row_loss(logits[i].tolist(), y) for i, y in enumerate(labels) if y >= 0)
    expected = total / (3 * 2 / 5 + 2 * 4 / 5)
    loss = CrossEntropy(4, weighted=True)(logits, torch.tensor(labels))
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("target", [torch.tensor([1, 1, 1]), torch.tensor([-1, -1, -1])])
def test_a_batch_of_one_class_or_none_has_a_finite_loss_and_gradient(target):
    logits = torch.randn(3, 2, requires_grad=True)
    loss = CrossEntropy(2, weighted=True)(logits, target)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(logits.grad, torch.zeros(3, 2))


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_weighted_binary_cross_entropy_is_a_mean_over_the_rows(shape):
    logits = torch.tensor([0.3, -1.2, 2.0, 0.1, 5.0])
    labels = [1, 0, 0, 0, -1]
    weights = {1: 3 / 4, 0: 1 / 4}
    total = sum(
        weights[y] * math.log1p(math.exp(-v if y else v))
        for v, y in zip(logits.tolist(), labels, strict=True)
        if y >= 0
    )
    loss = BinaryCrossEntropy(weighted=True)(logits.reshape(shape), torch.tensor(labels))
    assert float(loss) == pytest.approx(total / 4, rel=1e-6)


def test_binary_cross_entropy_masks_single_entries():
    logits = torch.tensor([[0.5, -2.0], [1.5, 0.2]], requires_grad=True)
    target = torch.tensor([[1.0, NAN], [0.0, 1.0]])
    loss = BinaryCrossEntropy()(logits, target)
    expected = (math.log1p(math.exp(-0.5)) + math.log1p(math.exp(1.5)) + math.log1p(math.exp(-0.2))) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert logits.grad[0, 1] == 0
    assert logits.grad.isfinite().all()


def test_l1_masks_single_entries():
    outputs = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    loss = L1()(outputs, torch.tensor([[0.0, NAN], [5.0, 4.5]]))
    assert float(loss.detach()) == pytest.approx((1 + 2 + 0.5) / 3)
    loss.backward()
    assert outputs.grad[0, 1] == 0
    assert outputs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (CrossEntropy(3, weighted=True), torch.tensor([0, 1, 1, -1, 2, 2, 2, 0])),
        (BinaryCrossEntropy(weighted=True), torch.tensor([0, 1, 1, -1, 0, 0, 0, 1])),
        (L1(), torch.tensor([0.0, 1, 2, NAN, 4, 5, 6, 7])),
    ],
)
def test_terms_of_the_parts_give_the_loss_of_the_whole(loss, target):
    columns = 3 if isinstance(loss, CrossEntropy) else 1
    outputs = torch.randn(8, columns, generator=torch.Generator().manual_seed(2))
    parts = [slice(0, 3), slice(3, 8)]
    counts = [loss.counts(target[part]) for part in parts]
    summed = None if counts[0] is None else counts[0] + counts[1]
    totals, weights = zip(*(loss.terms(outputs[p], target[p], summed) for p in parts), strict=True)
    assert float(sum(totals) / sum(weights)) == pytest.approx(float(loss(outputs, target)), rel=1e-6)
