import pytest
import torch
from lightning.fabric import Fabric

from sfiformer import SFiFormer
from sfiformer.training import prepare
from sfiformer.training.losses import CrossEntropy
from sfiformer.training.step import NonFinite, Step

QUIET = {"model.dropout": 0.0, "model.attention_dropout": 0.0}


@pytest.fixture
def make(experiment):
    """make(clip): a step and its batches."""
    prepared = prepare(experiment(QUIET))
    batch = prepared.stores["train"].batch([0, 1, 2])

    def build(clip=1e9):
        torch.manual_seed(0)
        model = SFiFormer(prepared.config.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        fabric = Fabric(accelerator="cpu", devices=1)
        return Step(fabric, model, optimizer, CrossEntropy(6, weighted=True), prepared.task, clip), batch

    return build


def test_a_step_is_the_gradient_of_the_loss(make):
    step, batch = make()
    reference, _ = make()
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    logits = reference.model(batch)
    counts = batch.y.bincount(minlength=6)
    weight = 1 - counts / counts.sum()
    loss = torch.nn.functional.cross_entropy(logits, batch.y, weight)
    loss.backward()
    assert step([batch])[0].item() == pytest.approx(loss.item())
    moved = [(old - new).detach() for old, new in zip(before, step.model.parameters(), strict=True)]
    for distance, parameter in zip(moved, reference.model.parameters(), strict=True):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(distance, gradient, rtol=1e-4, atol=1e-6)


def test_accumulated_batches_count_by_their_mean(make):
    one, batch = make()
    two, _ = make()
    one([batch])
    losses = two([batch, batch])
    assert losses[0] == losses[1]
    for left, right in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_long_gradients_are_clipped(make):
    step, batch = make(clip=1e-3)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step([batch])
    moved = [(old - new).detach() for old, new in zip(before, step.model.parameters(), strict=True)]
    assert sum(float(distance.square().sum()) for distance in moved) ** 0.5 == pytest.approx(1e-3, rel=1e-2)


def test_a_gradient_whose_square_leaves_the_type_is_clipped_too(make):
    step, batch = make(clip=1e-3)
    bias = step.model.head.mlp.out.bias
    bias.register_hook(lambda gradient: gradient * 0 + 1e25)
    before = bias.detach().clone()
    assert step([batch])[-1] == pytest.approx(1e25 * len(bias) ** 0.5, rel=1e-3)
    assert float((bias - before).norm()) == pytest.approx(1e-3, rel=1e-2)


def test_what_is_not_finite_is_named_and_nothing_is_changed(make):
    step, batch = make()
    with torch.no_grad():
        step.model.head.mlp.out.bias[2] = float("nan")
    weight = step.model.head.mlp.out.weight.detach().clone()
    with pytest.raises(
        NonFinite, match=r"^parameters \(head.mlp.out.bias\), \d+ of the model's .* the loss \(nan\)"
    ):
        step([batch])
    assert torch.equal(step.model.head.mlp.out.weight, weight)

    step, batch = make()
    with torch.no_grad():
        step.model.layers[0].attention.value.weight[0, 0] = float("inf")
    with pytest.raises(NonFinite, match="inside the model: v must be finite"):
        step([batch])
