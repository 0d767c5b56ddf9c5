import pytest
import torch

from sfiformer.data.decode import decode, in_units
from sfiformer.data.task import Task


def test_class_names_reach_the_predictions():
    task = Task("graph", "classification", 2, class_names=("cat", "dog"))
    table = decode(task, torch.tensor([[0.0, 0.0], [1.0, 5.0]]))
    assert table["prediction"] == ["cat", "dog"]
    assert table["probability:cat"][0] == 0.5
    assert list(table) == ["prediction", "probability:cat", "probability:dog"]


def test_binary():
    table = decode(Task("graph", "binary", 1, class_names=("no", "yes")), torch.tensor([[-1.0], [0.5]]))
    assert table["prediction"] == ["no", "yes"]
    assert list(table) == ["prediction", "probability:yes"]
    assert table["probability:yes"][1] == pytest.approx(0.62246, abs=1e-5)


def test_multilabel():
    table = decode(Task("graph", "multilabel", 2, target_names=("a", "b")), torch.zeros(1, 2))
    assert table == {"probability:a": [0.5], "probability:b": [0.5]}


def test_regression_comes_back_in_its_own_units():
    task = Task("graph", "regression", 2, target_mean=(10.0, 0.0), target_std=(2.0, 3.0))
    assert decode(task, torch.tensor([[1.0, 1.0]])) == {"prediction:0": [12.0], "prediction:1": [3.0]}
    assert in_units(Task("graph", "regression", 1), torch.ones(1, 1)).item() == 1


def test_ranking():
    assert decode(Task("link", "ranking", 1), torch.tensor([0.5, 2.0])) == {"score": [0.5, 2.0]}
