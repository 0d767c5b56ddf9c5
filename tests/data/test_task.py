import json
from dataclasses import FrozenInstanceError, asdict

import pytest

from sfiformer.data.task import Task


def test_survives_json():
    task = Task("graph", "regression", 2, target_names=("a", "b"), target_mean=(0.5, 1), target_std=(1, 2))
    assert Task(**json.loads(json.dumps(asdict(task)))) == task


def test_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Task("graph", "binary", 1).outputs = 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "edge"}, "Task.level is 'edge'; choose one of graph, node, link"),
        ({"kind": "regresion"}, "Task.kind is 'regresion'"),
        ({"outputs": 0}, "at least one output"),
        ({"kind": "binary", "outputs": 2}, "has one output, not 2"),
        ({"kind": "ranking", "outputs": 1}, "ranks links, not graphs"),
        ({"class_names": ("a", "b")}, "class_names has 2 entries; this classification task has 3"),
        ({"kind": "regression", "target_mean": (0, 0, 0)}, "come together"),
    ],
)
def test_refuses_what_makes_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        Task(**{"level": "graph", "kind": "classification", "outputs": 3, **arguments})


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task("node", "classification", 3, class_names="abc"), "node classification, 3 classes (a, b, c)"),
        (Task("graph", "binary", 1), "graph binary classification"),
        (Task("graph", "regression", 1, target_names=["logP"]), "graph regression, 1 target (logP)"),
        (Task("link", "ranking", 1), "link ranking"),
    ],
)
def test_describes_itself(task, words):
    assert task.describe() == words
