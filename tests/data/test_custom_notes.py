"""What is said of a user's data beside reading it, and what is refused since nothing could be learnt from it."""

import json

import pytest

from graph_files import EDGES, line, write
from sfiformer.data.custom import load_custom
from sfiformer.data.task import Task


def test_edges_that_are_listed_once_are_said(tmp_path):
    said = "no edge has its reverse: edges are directed, and undirected ones are to be listed both ways"
    once = [line(i, y=i % 2, edges=[[1, 0], [0, 0]] if i else []) for i in range(20)]
    assert said in load_custom(write(tmp_path, once)).notes
    for others in ([[0, 1], [1, 0]], [[0, 0]]):  # both ways in one graph, or from nodes to themselves alone
        graphs = (
            [*once[:5], line(5, y=1, edges=others)]
            if len(others) > 1
            else [line(i, y=i % 2, edges=others) for i in range(20)]
        )
        assert said not in load_custom(write(tmp_path, graphs)).notes


def test_an_edge_of_another_graph_is_no_reverse(tmp_path):
    graphs = [line(i, y=i % 2, edges=EDGES[i % 2 : i % 2 + 1]) for i in range(20)]
    assert any("no edge has its reverse" in note for note in load_custom(write(tmp_path, graphs)).notes)


def test_what_is_read_from_a_table_is_said(tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    rows = [f"m{i},{'C' * (1 + i)},{['yes', 'no', ''][i % 3]},{i}\n" for i in range(10)]
    (tmp_path / "m.csv").write_text("id,smiles,label,mass\n" + "".join(rows))
    assert load_custom(tmp_path / "m.csv").describe().splitlines()[1:] == [
        "task: graph binary classification (no, yes)",
        "node features: 9 columns of categories (119, 5, 12, 12, 10, 6, 6, 2, 2); edge features: 3 columns of "
        "categories (5, 6, 2)",
        "labels: column label, 3 of 10 missing",
        "split: at random, 0.8/0.1/0.1, seed 0",
        "val has no label of class no",
        "test has no label",
        "not used: mass",
    ]
    said = load_custom(tmp_path / "m.csv", targets=["mass"]).describe()
    assert "\nlabels: column mass\n" in said
    assert said.endswith("\nnot used: label")


@pytest.mark.parametrize(
    ("header", "cells", "message"),
    [
        ("target,pIC50", "EGFR,5.{i}", "is 'EGFR', .* is none of them; name what .* --data.targets pIC50$"),
        ("target,pIC50,mw", "EGFR,5.{i},{i}.5", "--data.targets one of mw, pIC50$"),
        ("target", "EGFR", "and a missing label is none of them$"),
        ("name", "m{i}", r"m.csv: no column holds labels \(as one called y would\), so there is nothing to"),
        ("y", "", "m.csv: no row has a label in column y, so there is nothing to train on"),
        ("a,b", ",", "m.csv: no row has a label in column a, "),
        ("y", "{i}e400", "line 3: '1e400' in column y is infinite, or beyond float32$"),
        ("mw,logp", "{i}e400,1", "line 3: '1e400' in column mw is infinite, or beyond float32$"),
    ],
)
def test_columns_without_anything_to_learn(tmp_path, header, cells, message):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    path = tmp_path / "m.csv"
    rows = "".join(f"{'C' * (1 + i)},{cells.format(i=i)}\n" for i in range(9))
    path.write_text(f"smiles,{header}\n{rows}")
    with pytest.raises(ValueError, match=message):
        load_custom(path)


def test_a_target_that_is_the_same_everywhere_is_said(tmp_path):
    same = write(tmp_path, [line(i, y=None if i == 3 else 3.25) for i in range(20)])
    said = "every label is 3.25, so there is nothing to learn"
    assert f"target 0: {said}" in load_custom(same).notes
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    path = tmp_path / "m.csv"
    path.write_text("smiles,a,b\n" + "".join(f"{'C' * (1 + i)},{i / 7},3.25\n" for i in range(20)))
    assert [note for note in load_custom(path).notes if "nothing to learn" in note] == [f"b: {said}"]


def test_a_column_of_numbers_of_the_rows_is_said(tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    path = tmp_path / "m.csv"
    rows = [f"{'C' * (1 + i)},{1000 + i},{i / 7},{i // 2}\n" for i in range(20)]
    path.write_text("smiles,Compound,logp,rings\n" + "".join(rows))
    said = [note for note in load_custom(path).notes if "--data.targets" in note]
    assert len(said) == 1
    assert said[0].startswith("Compound: another whole number in each row, as row numbers and ids are;")
    for targets in (["Compound", "logp"], ["Compound"]):
        assert not any("row numbers" in note for note in load_custom(path, targets=targets).notes)
    path.write_text(path.read_text() + "CO,,0.5,1\n")
    assert not any("row numbers" in note for note in load_custom(path).notes)


def test_a_list_of_targets_may_be_missing_in_the_first_row(tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    rows = ["C,\n", *(f'{"C" * i},"[{i % 2}, 0, 1]"\n' for i in range(2, 11))]
    (tmp_path / "m.csv").write_text("smiles,labels\n" + "".join(rows))
    assert load_custom(tmp_path / "m.csv").task == Task("graph", "multilabel", 3, columns=("labels",))


def test_a_column_called_split_is_not_looked_at_where_another_split_is_asked_for(tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    path = tmp_path / "m.csv"
    path.write_text("smiles,y,split\n" + "".join(f"{'C' * (1 + i)},{i / 7},{i % 3}\n" for i in range(10)))
    with pytest.raises(ValueError, match="split '0' is none of"):
        load_custom(path)
    assert sum(map(len, load_custom(path, split="random").splits.values())) == 10


def test_a_split_without_labels_is_said(tmp_path):
    lines = [{"x": [[1.0]], "edges": [], "y": i / 7, "split": "train"} for i in range(5)]
    lines += [{"x": [[1.0]], "edges": [], "split": "val"}]
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "val has no label" in load_custom(tmp_path / "g.jsonl").describe().splitlines()


def test_molecules_that_training_has_seen_are_said(tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    file = tmp_path / "m.csv"
    rows = [
        f"{'CN'[i // 10]}{'C' * (i % 10)}{'NC'[i // 10]},{i / 10},{part}\n"  # the same from its other end
        for i, part in enumerate(["train"] * 10 + ["val", "test"] * 5)
    ]
    file.write_text("smiles,y,split\n" + "".join(rows))
    said = "10 graphs of val and test with a molecule of train: scores on them say little"
    assert load_custom(file).notes[-2].startswith(said)
    file.write_text("smiles,y,split\nC[C@H](N)O,1,train\nC[C@@H](N)O,2,val\nCC(N)O,3,test\n")
    assert not any("molecule" in note for note in load_custom(file).notes)  # of another chirality
    graphs = [line(i, y=i / 10, smiles="C" * (1 + i % 5), split=["train", "test"][i > 4]) for i in range(6)]
    said = "1 graph of val and test with a molecule of train"  # compared as text, for want of RDKit's reading
    assert load_custom(write(tmp_path, graphs)).notes[-2].startswith(said)
    file.write_text("smiles,y\n" + "".join(f"{'C' * (1 + i)},{i / 10}\n" for i in range(20)))
    assert not any("molecule" in note for note in load_custom(file).notes)


def test_molecules_with_several_labels_are_said(tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    pairs = [("CCO,1,2", "OCC,1,"), ("CCN,1,2", "NCC,1,3"), ("CCC,0,", "CCC,,2")]  # only the second differs
    (tmp_path / "m.csv").write_text("smiles,a,b\n" + "".join(f"{one}\n{two}\n" for one, two in pairs))
    assert load_custom(tmp_path / "m.csv").notes[-1] == "1 molecule in several graphs with different labels"
    rows = [f"{'CC' * (1 + i // 2)},{'ab'[i % 3 == 0]}\n" for i in range(12)] + ["CCCCCC,\n"]
    (tmp_path / "m.csv").write_text("smiles,y\n" + "".join(rows))
    assert load_custom(tmp_path / "m.csv").notes[-1] == "4 molecules in several graphs with different labels"
