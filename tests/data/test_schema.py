import pytest
import torch

from sfiformer.data.record import Record
from sfiformer.data.schema import Features, Schema, infer_features, infer_schema


def graph(x, edge_attr=None):
    return Record.from_fields({"x": x, "edges": [[0, 0]], "edge_attr": edge_attr})


@pytest.mark.parametrize(
    ("tables", "kind", "expected"),
    [
        ([[[0, 3]], [[2, 1]]], None, Features(2, "categories", (3, 4))),
        ([[[0, 3]]], "numbers", Features(2, "numbers")),
        ([[[0, 3]], [[0.5, 1.0]]], None, Features(2, "numbers")),
        ([[[-1]]], None, Features(1, "numbers")),
        ([[[5000]]], None, Features(1, "numbers")),
        ([[[5000]]], "categories", Features(1, "categories", (5001,))),
    ],
)
def test_features(tables, kind, expected):
    assert infer_features("x", [torch.tensor(table) for table in tables], kind) == expected


def test_so_many_categories_are_a_mistake():
    with pytest.raises(
        ValueError, match=r"column 1 goes up to 1000000000000, .* number the categories from 0"
    ):
        infer_features("x", [torch.tensor([[1, 10**12]])], "categories")


def test_numbers_are_no_categories():
    with pytest.raises(ValueError, match="x cannot be categories"):
        infer_features("x", [torch.tensor([[0.5]])], "categories")


def test_schema_of_graphs():
    assert infer_schema([graph([[1.5]])]) == Schema(Features(1, "numbers"), None)
    schema = infer_schema([graph([[1]], [[0.5, 1]]), graph([[4]], [[2.0, 1]])])
    assert schema == Schema(Features(1, "categories", (5,)), Features(2, "numbers"))
    assert schema.node.describe() == "1 column of categories (5)"
    assert schema.edge.describe() == "2 numbers"


@pytest.mark.parametrize(
    ("x", "edge_attr", "message"),
    [
        ([[1, 2]], [[0.5]], "x has 2 columns where the model was trained with 1"),
        ([[1]], None, "edge_attr has 0 columns where the model was trained with 1"),
        ([[1]], [[1.0, 2.0]], "edge_attr has 2 columns"),
        ([[7]], [[0.5]], "x is 7 in row 0, column 0, where the categories are 0 to 2"),
        ([[0.5]], [[0.5]], "x holds real numbers where categories"),
    ],
)
def test_graphs_that_do_not_fit(x, edge_attr, message):
    schema = Schema(Features(1, "categories", (3,)), Features(1, "numbers"))
    with pytest.raises(ValueError, match=message):
        schema.check(graph(x, edge_attr))
