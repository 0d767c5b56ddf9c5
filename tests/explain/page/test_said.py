"""What the model said, in words."""

import math
from types import SimpleNamespace

import torch

from sfiformer.data.task import Task
from sfiformer.explain.page.said import said


def of(task: Task, outputs: list, target: list | None, nodes: int = 1) -> dict:
    truth = None if target is None else torch.tensor(target)
    return said(SimpleNamespace(task=task, outputs=torch.tensor(outputs), target=truth, num_nodes=nodes))


def test_classes_of_a_graph():
    task = Task("graph", "classification", 2, class_names=("cat", "dog"))
    assert of(task, [[0.0, math.log(4)]], [0]) == {"graph": [["class", "dog (80%)", "cat"]]}
    assert of(task, [[0.0, math.log(4)]], None) == {"graph": [["class", "dog (80%)", "?"]]}


def test_labels_of_a_graph():
    task = Task("graph", "multilabel", 2, target_names=("a", "b"))
    rows = of(task, [[0.0, -math.log(3)]], [[1.0, math.nan]])["graph"]
    assert rows == [["a", "0.5", "1"], ["b", "0.25", "?"]]


def test_numbers_come_in_their_units():
    task = Task("graph", "regression", 1, target_names=("mass",), target_mean=(10.0,), target_std=(2.0,))
    assert of(task, [[1.0]], [[-1.0]]) == {"graph": [["mass", "12", "8"]]}


def test_nodes():
    task = Task("node", "binary", 1)
    assert of(task, [[math.log(3)], [-math.log(9)]], [1.0, math.nan], nodes=2) == {
        "nodes": ["model: 1 (75%); truth: 1", "model: 0 (90%); truth: ?"]
    }


def test_links_are_left_out():
    assert of(Task("link", "ranking", 1), [[0.3]], None) == {}
