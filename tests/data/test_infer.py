import math

import pytest
import torch

from sfiformer.data.infer import encode, infer_level, infer_task, standardised
from sfiformer.data.record import Record
from sfiformer.data.task import Task


def graph(y=None, nodes=3, **fields):
    return Record.from_fields({"num_nodes": nodes, "edges": [], "y": y, **fields})


def graphs(*labels):
    return [graph(label, nodes=3 + i % 2) for i, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("labels", "kind", "outputs", "names"),
    [
        (["b", "a", "c", None], "classification", 3, ("a", "b", "c")),
        (["1_1", "11", "1_2"] * 3, "classification", 3, ("11", "1_1", "1_2")),
        (["no", "yes"], "binary", 1, ("no", "yes")),
        ([0, 1, 1, None], "binary", 1, None),
        ([0.0, 1.0], "binary", 1, None),
        ([True, False], "binary", 1, None),
        ([-1, 1, 1], "binary", 1, ("-1", "1")),
        ([0, 2, 1], "classification", 3, None),
        ([1, 2, 5], "classification", 3, ("1", "2", "5")),
        ([1.0, 2.0, 5.0], "regression", 1, None),
        (list(range(30)), "regression", 1, None),
        (list(range(20)) * 5, "classification", 20, None),
        ([[0, 1], [1, None], [0, 0]], "multilabel", 2, None),
        ([[0, 1], [1, 2]], "regression", 2, None),
        ([0.5, None, -3], "regression", 1, None),
    ],
)
def test_kinds_of_graph_labels(labels, kind, outputs, names):
    assert infer_task(graphs(*labels)) == Task("graph", kind, outputs, class_names=names)


def test_levels():
    assert infer_level([graph([0, 1, 1]), graph([0, 1, 0, 1], nodes=4)]) == "node"
    assert infer_level([graph([0, 1]), graph([0, 1], nodes=4)]) == "graph"
    assert infer_level([graph(torch.ones(1, 4)), graph(torch.ones(1, 4), nodes=4)]) == "graph"
    assert infer_level([graph([0, 1, 1])]) == "node"
    assert infer_level([graph([0, 1, 1], train_mask=[1, 1, 0])] * 2) == "node"
    assert infer_level([graph(links=[[0, 1]])]) == "link"
    with pytest.raises(ValueError, match=r"say --data\.level node"):
        infer_level([graph([0, 1, 1]), graph([0, 0, 1])])
    with pytest.raises(ValueError, match=r"y has shape \[2\] in a graph of 4 nodes"):
        infer_level([graph([0, 1, 1]), graph([0, 1], nodes=4)])


def test_one_odd_graph_does_not_change_the_level():
    assert infer_level([graph([0]), graph([1]), graph([0, 1, 1])]) == "graph"
    assert infer_level([graph(0), graph(1), graph([0, 1, 1])]) == "graph"
    assert infer_level([graph([0, 1, 1]), graph([0, 1, 1, 0], nodes=4), graph([0, 1])]) == "node"
    with pytest.raises(ValueError, match=r"say --data\.level node"):
        infer_level([graph([0, 1, 1]), graph([0, 0, 1]), graph([0, 1])])


def test_links():
    assert infer_task([graph(links=[[0, 1]])]) == Task("link", "ranking", 1)
    labelled = [graph(links=[[0, 1], [1, 2]], edge_label=[0, 1])]
    assert infer_task(labelled) == Task("link", "binary", 1)
    assert encode(labelled[0], Task("link", "binary", 1)).tolist() == [0, 1]
    assert encode(graph(links=[[0, 1], [1, 2]]), Task("link", "ranking", 1)).tolist() == [1, 1]


def test_a_link_has_one_score():
    links = [[0, 1], [1, 2], [0, 2]]
    with pytest.raises(ValueError, match=r"one score, and its labels \(edge_label\) have 3 classes"):
        infer_task([graph(links=links, edge_label=[0, 1, 2])])
    with pytest.raises(ValueError, match="have 2 targets"):
        infer_task([graph(links=links, edge_label=[[0.5, 1], [2, 3], [4, 5]])])
    assert infer_task([graph(links=links, edge_label=[0, 1, 2])], kind="regression").outputs == 1


def test_overrides():
    assert infer_task(graphs(0, 1, 2), classes=5).outputs == 5
    assert infer_task(graphs("b", "a"), classes=["b", "a", "z"]).class_names == ("b", "a", "z")
    assert infer_task(graphs(0, 1), kind="classification") == Task("graph", "classification", 2)
    assert infer_task(graphs(0, 1, 3), kind="regression") == Task("graph", "regression", 1)
    assert infer_task([graph([0, 1, 1])] * 2, level="graph") == Task("graph", "multilabel", 3)
    with pytest.raises(
        ValueError, match=r"binary needs two classes, the labels have 3: say --data.kind classification"
    ):
        infer_task(graphs(0, 1, 2), kind="binary")
    with pytest.raises(ValueError, match="regression needs numbers, and there is the label 'a'"):
        infer_task(graphs("a", "b"), kind="regression")
    with pytest.raises(ValueError, match="takes one label a row, here are 2"):
        infer_task(graphs([0, 1], [1, 1]), kind="classification")


@pytest.mark.parametrize("labels", [[None, None], [math.nan]])
def test_nothing_to_learn(labels):
    with pytest.raises(ValueError, match="nothing to train on"):
        infer_task(graphs(*labels))


@pytest.mark.parametrize("labels", [["yes", None, "yes"], [7, 7, None], [1, None, 1], [0, 0]])
def test_one_class_is_none(labels):
    with pytest.raises(
        ValueError, match=rf"^every label is '{labels[0]}', so .* two classes are needed, and a missing"
    ):
        infer_task(graphs(*labels))
    with pytest.raises(ValueError, match=rf"^every label in column active is '{labels[0]}'"):
        infer_task(graphs(*labels), target_names=["active"])
    assert infer_task(graphs(7, 7), kind="regression") == Task("graph", "regression", 1)
    assert infer_task(graphs("yes", "yes"), classes=["no", "yes"]).kind == "binary"


def test_encoding_classes():
    task = Task("node", "classification", 3, class_names=("a", "b", "c"))
    assert encode(graph(["c", None, "a"]), task).tolist() == [2, -1, 0]
    assert encode(graph(), task).tolist() == [-1, -1, -1]
    with pytest.raises(ValueError, match=r"label 'd' of node 1 is not among the 3 classes \(a, b, c\)"):
        encode(graph(["c", "d", "a"]), task)
    with pytest.raises(ValueError, match="label '4' is not among the 3 classes"):
        encode(graph(4), Task("graph", "classification", 3))
    with pytest.raises(ValueError, match="2 labels for 3 nodes"):
        encode(graph(["a", "b"]), task)


def test_encoding_numbers():
    multilabel = Task("graph", "multilabel", 2)
    assert encode(graph([1, None]), multilabel).nan_to_num(-9).tolist() == [[1, -9]]
    assert encode(graph(), multilabel).isnan().all()
    with pytest.raises(ValueError, match="label 3 in row 0, target 1, is neither 0 nor 1"):
        encode(graph([1, 3]), multilabel)
    with pytest.raises(ValueError, match="3 targets where 2 are expected"):
        encode(graph([1, 1, 1]), multilabel)


def test_standardisation():
    task = standardised(
        Task("graph", "regression", 2), [graph([1.0, 7.0]).y.values[None], graph([3.0, None]).y.values[None]]
    )
    assert task.target_mean == (2.0, 7.0)
    assert task.target_std == (1.0, 1.0)  # the second target is constant
    assert encode(graph([5.0, 8.0]), task).tolist() == [[3.0, 1.0]]
    with pytest.raises(ValueError, match="target 1 has no label in the training split"):
        standardised(Task("graph", "regression", 2), [graph([1.0, None]).y.values[None].astype(float)])


def test_a_text_among_numbers_is_named_where_classes_make_no_sense():
    records = [graph(y=0.5 + i) for i in range(30)] + [graph(y="<10")]
    with pytest.raises(ValueError, match="the label '<10' is text, and 30 others are numbers: correct it"):
        infer_task(records, level="graph")
    assert infer_task(records, level="graph", kind="classification").outputs == 31
    third = [graph(y=i % 3) for i in range(30)] + [graph(y="unknown")] * 2
    assert infer_task(third, level="graph").class_names == ("0", "1", "2", "unknown")


@pytest.mark.parametrize(
    ("others", "odd", "message"),
    [
        ((0, 1), "ND", "'ND' is text, and 97 others are numbers"),
        ((0, 1, 2), "ND", "'ND' is text, and 97 others are numbers"),
        ((0, 1), "True", "'True' is text, and 97 others are numbers"),
        (("True", "FALSE"), "ND", "'ND' is no truth value, and 97 others are"),
        (("True", "False"), 1, "'1' is no truth value, and 97 others are"),
    ],
)
def test_a_few_texts_are_no_class(others, odd, message):
    records = [graph(y=odd if i in (7, 50, 60) else others[i % len(others)]) for i in range(100)]
    for i, record in enumerate(records):
        record.place = f"line {i}"
    with pytest.raises(ValueError, match=rf"^line 7: the label {message}: correct it, .* --data.kind class"):
        infer_task(records)
    assert infer_task(records, kind="classification").outputs == len(others) + 1
    assert infer_task([*records, *[graph(y=odd)] * 5]).outputs == len(others) + 1  # 8 of 105 are a class


def test_truth_values_are_classes_in_any_case():
    labels = [("True", "False", "TRUE", "false")[i % 4] for i in range(12)]
    task = infer_task(graphs(*labels))
    assert task == Task("graph", "binary", 1, class_names=("False", "True"))
    assert [encode(record, task).item() for record in graphs(*labels)] == [1, 0, 1, 0] * 3
    task = infer_task(graphs("TRUE", "FALSE"))
    assert task.class_names == ("FALSE", "TRUE")  # as they are written
    assert encode(graph("true"), task).item() == 1


def test_classes_that_differ_only_by_case():
    records = graphs(*["inactive", "active"] * 5, "Active", None, "active")
    records[10].place = "m.csv, line 12"
    with pytest.raises(
        ValueError,
        match=r"^m\.csv, line 12: the label 'Active' differs from 'active' only by case: write them alike, or say",
    ):
        infer_task(records)
    assert infer_task(records, kind="classification").class_names == ("Active", "active", "inactive")


def test_one_text_of_more_than_ten_labels_is_a_slip():
    with pytest.raises(ValueError, match="'ND' is text, and 10 others are numbers"):
        infer_task(graphs(*[0, 1] * 5, "ND"))
    assert infer_task(graphs(*[0, 1] * 4, "ND")).outputs == 3


def test_a_few_texts_make_no_classes_of_amounts():
    """As where a measurement ends: 500 rows with one decimal have fewer values than rows."""
    records = [graph(y=4 + (i % 52) / 10) for i in range(490)] + [graph(y="<4.0")] * 10
    with pytest.raises(
        ValueError, match=r"the label '<4\.0' is text, and 490 others are numbers: correct it"
    ):
        infer_task(records, level="graph")
    halves = [graph(y=i % 7 / 2) for i in range(70)] + [graph(y="n.d.")]
    with pytest.raises(ValueError, match=r"'n\.d\.' is text, and 70 others"):
        infer_task(halves, level="graph")
    counted = [graph(y=i % 20) for i in range(100)] + [graph(y="unknown")] * 6
    assert infer_task(counted, level="graph").outputs == 21
    doses = [graph(y="control")] * 6 + [graph(y=0.5)] * 4
    assert infer_task(doses, level="graph").class_names == ("0.5", "control")


def test_a_text_label_of_nodes_may_begin_with_a_missing_one():
    records = [graph([0.5 + 3 * i + j for j in range(3)]) for i in range(10)] + [graph([None, "<10", None])]
    with pytest.raises(ValueError, match="the label '<10' is text, and 30 others are numbers"):
        infer_task(records, level="node")
    beside = [*records, graph([7.5, "<9", 8.5])]  # numbers beside it are those of labels, too
    with pytest.raises(ValueError, match="the label '<10' is text, and 32 others are numbers"):
        infer_task(beside, level="node")
    with pytest.raises(ValueError, match="the label '<9' is text"):
        infer_task([beside[-1], *beside], level="node")


def test_the_label_that_is_shown_is_no_number():
    records = [graph(y=label) for label in (1, 2.5, "<4.0", "abc")]
    records[2].place = "m.csv, line 4"
    with pytest.raises(
        ValueError,
        match=r"^m\.csv, line 4: regression needs numbers, and there is the label '<4\.0'; correct it",
    ):
        infer_task(records, kind="regression")
    with pytest.raises(ValueError, match="there is the label '1'; write numbers without quotation marks"):
        infer_task(graphs("1", "2"), kind="regression")


def test_an_underscore_makes_no_number():
    with pytest.raises(
        ValueError, match="regression needs numbers, and there is the label '1_1'; correct it"
    ):
        infer_task(graphs("11", "1_1"), kind="regression")


def test_the_labels_that_are_numbers_are_counted_not_their_values():
    records = [graph(y=0.5 + i % 15) for i in range(45)] + [graph(y=">5")]
    with pytest.raises(
        ValueError, match=r"'>5' is text, and 45 others are numbers: .* say --data.kind class"
    ):
        infer_task(records, level="graph")


def test_decimals_with_a_comma_are_no_classes():
    for labels in (["103,12", "7", 12, None, "1.103,5"], ["0,5", "1,5"] * 20):
        with pytest.raises(
            ValueError, match=r"^labels in column mw such as '\d+,\d+' are text, for their comma: write"
        ):
            infer_task(graphs(*labels), target_names=["mw"])
        assert infer_task(graphs(*labels), kind="classification").kind == "classification"
    with pytest.raises(ValueError, match=r"write decimals with a point \(1103.5\)$"):
        infer_task(graphs("1.103,5", "-2,5e3"))
    with pytest.raises(ValueError, match="there is the label '0,5'; write decimals with a point"):
        infer_task(graphs("0,5", "1,5"), kind="regression")
    assert infer_task(graphs("2,4-D", "1,1,1", "2,4-D")).kind == "binary"


def test_texts_that_hardly_come_twice_are_no_classes():
    names = [f"m{i}" for i in range(20)]
    with pytest.raises(
        ValueError, match=r"^11 of the 20 different labels in column SMILES, such as 'm0', occur only once"
    ):
        infer_task(graphs(*names, *names[:9]), target_names=["SMILES"])
    assert infer_task(graphs(*names, *names[:10])).outputs == 20
    assert infer_task(graphs(*names[:10])).outputs == 10
    assert infer_task(graphs(*names), kind="classification").outputs == 20
    assert infer_task(graphs(*names), classes=names).outputs == 20


def test_whole_numbers_that_are_amounts_are_predicted_as_such():
    weights = [graph(y=40 + 3 * (i % 60)) for i in range(600)]
    assert infer_task(weights, level="graph").kind == "regression"
    assert infer_task(weights[:10], level="graph").kind == "classification"  # ten at most


def test_whole_numbers_that_count_classes_are_classes():
    for first in (0, 1):
        numbered = [graph(y=first + i % 60) for i in range(300)]
        assert infer_task(numbered, level="graph").outputs == 60
        assert infer_task([*numbered, graph()], level="graph").outputs == 60
        assert infer_task(numbered[1:], level="graph").kind == "regression"  # four rows of the first
        with_a_gap = [record for i, record in enumerate(numbered) if i % 60 != 33]
        assert infer_task(with_a_gap, level="graph").kind == "regression"
