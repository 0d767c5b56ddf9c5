import pytest
import torch

from sfiformer.data.record import Record
from sfiformer.data.splits import (
    node_masks,
    split_by_column,
    split_by_fractions,
    split_by_scaffold,
    split_name,
)


def record(**fields):
    return Record(x=torch.ones(1, 1), edge_index=torch.zeros(2, 0, dtype=torch.int64), **fields)


@pytest.mark.parametrize("count", [3, 10, 101])
def test_fractions(count):
    parts = split_by_fractions(count, (0.8, 0.1, 0.1), seed=4)
    assert sorted(i for part in parts.values() for i in part) == list(range(count))
    assert all(parts.values())
    assert abs(len(parts["train"]) - 0.8 * count) <= 2
    assert parts == split_by_fractions(count, (0.8, 0.1, 0.1), seed=4)
    if count > 3:
        assert parts != split_by_fractions(count, (0.8, 0.1, 0.1), seed=5)


def test_a_fraction_of_nothing():
    parts = split_by_fractions(4, (0.5, 0.5, 0.0))
    assert [len(part) for part in parts.values()] == [2, 2, 0]


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.8, 0.3, 0.1), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1)])
def test_fractions_that_make_no_sense(fractions):
    with pytest.raises(ValueError, match="sum to 1"):
        split_by_fractions(10, fractions)


def test_too_few():
    with pytest.raises(ValueError, match="only 2 to split into 3 parts"):
        split_by_fractions(2)


def test_column():
    parts = split_by_column([record(split="train"), record(split="test"), record(split="val")])
    assert parts == {"train": [0], "val": [2], "test": [1]}
    with pytest.raises(ValueError, match=r"g.jsonl, line 2: no split"):
        split_by_column([record(split="train"), record(place="g.jsonl, line 2")])


def test_names():
    assert [split_name(word) for word in ("Train", " valid ", "dev", "TEST")] == [
        "train",
        "val",
        "val",
        "test",
    ]
    with pytest.raises(ValueError, match="split 'holdout' is none of"):
        split_name("holdout")


def test_scaffolds_stay_together():
    names = ["a"] * 3 + ["b"] + ["a"] * 4 + ["c", "d"]
    parts = split_by_scaffold([record(smiles=name) for name in names], lambda name: name, (0.7, 0.1, 0.2))
    assert parts == {"train": [0, 1, 2, 4, 5, 6, 7], "val": [3], "test": [8, 9]}
    with pytest.raises(ValueError, match="needs molecules"):
        split_by_scaffold([record()], str)


def test_node_masks_cover_every_node_once():
    masks = node_masks(20, (0.5, 0.25, 0.25), seed=1)
    assert torch.stack(list(masks.values())).sum(0).tolist() == [1] * 20
    assert int(masks["train"].sum()) == 10
