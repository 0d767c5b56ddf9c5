import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfiformer.data.record import Record, as_target

GRAPH = {"x": [[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]], "edges": [[0, 1], [1, 2]]}


def test_lists_and_tensors_read_alike():
    record = Record.from_fields({**GRAPH, "edge_attr": [3, 4], "y": 1, "id": 7})
    same = Record.from_fields(
        {
            "x": torch.tensor(GRAPH["x"]),
            "edge_index": torch.tensor([[0, 1], [1, 2]]),
            "edge_attr": np.array([3, 4]),
        }
    )
    for graph in (record, same):
        assert graph.x.dtype == torch.float32
        assert graph.edge_index.tolist() == [[0, 1], [1, 2]]
        assert graph.edge_attr.tolist() == [[3], [4]]
    assert record.id == "7"
    assert [Record.from_fields({**GRAPH, "id": torch.tensor(i)}).id for i in (8, [9])] == ["8", "9"]


def test_nodes_without_features_share_one_category():
    record = Record.from_fields({"num_nodes": 2, "edges": []})
    assert record.x.tolist() == [[0], [0]]
    assert record.edge_index.shape == (2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": [[0, 1], [1, 3]]}, r"edges: number 1 \(1 -> 3\) is outside the nodes 0 to 2"),
        ({"edges": [[0, -1]]}, "outside the nodes"),
        ({"edges": [[0, 1, 2]]}, "must be pairs"),
        ({"edges": [[0.5, 1]]}, "of node numbers"),
        ({"edge_index": [[0], [1]]}, "both edge_index and edges"),
        ({"edges": None}, "no edges"),
        ({"x": [[1.0, math.nan]] * 3}, "x is nan at node 0, column 1"),
        (
            {"x": [[1.0, 2.0], [3.0, None], [1.0, 1.0]]},
            "x holds a value that is not a number at node 1, column 1",
        ),
        ({"x": [[1.0, 2.0], [3.0], [1.0, 1.0]]}, "x has rows of different lengths"),
        ({"x": [["a"], ["b"], ["c"]]}, "not a number at node 0"),
        ({"x": [[1], [2], [2**70]]}, "x holds a number that is too large at node 2"),
        ({"x": []}, "no nodes"),
        ({"x": None}, "no node features: give x, or num_nodes for nodes without features$"),
        ({"x": None, "smiles": "CCO"}, "no node features: .*; SMILES alone are read from a CSV"),
        ({"num_nodes": 4}, "num_nodes is 4, x has 3 rows"),
        ({"edge_attr": [[1.0]]}, "edge_attr has 1 rows for 2 edges"),
        ({"edge_attr": [[1.0], [math.inf]]}, "edge_attr is inf at edge 1, column 0"),
        ({"train_mask": [True]}, r"train_mask has shape \[1\] for 3 nodes"),
        ({"train_mask": [1, 0, 1], "test_mask": [0, 0, 1]}, "node 2 is in two masks"),
        ({"links": [[0, 5]]}, "links: number 0"),
        ({"edge_label": [1]}, "edge_label without edge_label_index"),
        ({"y": math.inf}, "y is infinite, or beyond float32$"),
        ({"y": [0.5, None, -1e300]}, "y is infinite, or beyond float32, at row 2"),
        ({"y": {"a": 1}}, "neither number, text nor null"),
    ],
)
def test_bad_graphs_name_the_place(changes, message):
    with pytest.raises(ValueError, match=message):
        Record.from_fields({**GRAPH, **changes})


def test_errors_name_the_graph():
    with pytest.raises(ValueError, match="graph 'mol7': x has rows"):
        Record.from_fields({"id": "mol7", "x": [[1], [1, 2]], "edges": []})


@pytest.mark.parametrize(
    ("value", "values", "whole"),
    [
        (3, 3.0, True),
        (2.5, 2.5, False),
        ([1, None, 2], [1.0, None, 2.0], True),
        ([0.5, None], [0.5, None], False),
        ([True, False], [1.0, 0.0], True),
        (torch.tensor([1.0, float("nan")]), [1.0, None], False),
        ([None, None], [None, None], True),
    ],
)
def test_targets(value, values, whole):
    target = as_target("y", value)
    np.testing.assert_array_equal(target.values, np.array(values, dtype=float))
    assert target.whole == whole
    assert not target.text


def test_text_targets_keep_their_names():
    target = as_target("y", ["a", None, 3, "", 2.5])
    assert target.text
    assert target.values.tolist() == ["a", None, "3", None, "2.5"]


def test_unknown_fields_are_remembered():
    assert Record.from_fields({**GRAPH, "pos": [1]}).unused == {"pos"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.integers(min_value=2**62)
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
FIELDS = [
    "x",
    "edges",
    "edge_index",
    "edge_attr",
    "y",
    "id",
    "num_nodes",
    "train_mask",
    "links",
    "edge_label",
]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sets(st.sampled_from(["x", "edges"])))
def test_nonsense_is_a_value_error(fields, sound):
    try:
        record = Record.from_fields({**fields, **{name: GRAPH[name] for name in sound}})
    except ValueError:
        return
    assert record.x.isfinite().all()
    assert (record.edge_index < record.num_nodes).all()
