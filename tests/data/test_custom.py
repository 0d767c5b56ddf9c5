import pytest
import torch
from torch_geometric.data import Data

from graph_files import line, write
from sfiformer.data.custom import load_custom, stream
from sfiformer.data.decode import in_units
from sfiformer.data.jsonl import rows
from sfiformer.data.source import read_graphs
from sfiformer.data.task import Task


@pytest.mark.parametrize("name", ["graphs.jsonl", "graphs.jsonl.gz"])
def test_json_lines_with_class_names_and_missing_labels(tmp_path, name):
    labels = ["red", "green", "blue", None]
    path = write(tmp_path, [line(i, y=labels[i % 4], colour=1) for i in range(20)] + ["\n"], name)
    dataset = load_custom(path)
    assert dataset.task == Task("graph", "classification", 3, class_names=("blue", "green", "red"))
    assert {part: len(store) for part, store in dataset.splits.items()} == {"train": 16, "val": 2, "test": 2}
    for part, store in dataset.splits.items():
        expected = [
            {"red": 2, "green": 1, "blue": 0, None: -1}[labels[int(i[1:]) % 4]] for i in dataset.ids[part]
        ]
        batch = store.batch(range(len(store)))
        assert batch.y.tolist() == expected
        assert batch.edge_attr is None
        assert batch.x[batch.ptr[:-1], 1].tolist() == [int(i[1:]) for i in dataset.ids[part]]
    assert dataset.describe() == (
        f"{path}: train 16, val 2, test 2 graphs\n"
        "task: graph classification, 3 classes (blue, green, red)\n"
        "node features: 2 numbers; edge features: none\n"
        "labels: 5 of 20 missing\n"
        "split: at random, 0.8/0.1/0.1, seed 0\n"
        "not used: colour"
    )


def test_bad_lines_stop_or_are_reported(tmp_path):
    good = [line(i, y=i % 2) for i in range(6)]
    path = write(
        tmp_path,
        [
            *good,
            line(6, y=0, edge_index=[[0], [9]], edges=None),
            "{broken\n",
            "[1, 2]\n",
            {**line(7, y=1), "x": [[1.0], [2.0]]},
            line(8, y=1, split="holdout"),
            line(9, y=1, edge_attr=[1, 2]),
            line(10, y=[1, 0, 1]),
        ],
    )
    with pytest.raises(
        ValueError, match=rf"^{path}, line 7: graph 'g6': edge_index: number 0 \(0 -> 9\) is outside"
    ):
        load_custom(path, level="graph")
    dataset = load_custom(path, level="graph", skip_bad=True)
    assert sum(map(len, dataset.splits.values())) == 6
    assert [place.split("line ")[1] for place, _ in dataset.bad] == ["7", "8", "9", "10", "11", "12", "13"]
    assert "not valid JSON" in dataset.bad[1][1]
    assert "skipped: 7 bad, the first" in dataset.describe()


def test_a_label_out_of_range_is_a_bad_row(tmp_path):
    path = write(tmp_path, [line(i, y=i % 5) for i in range(12)])
    with pytest.raises(ValueError, match=r"line 5: label '4' is not among the 4 classes"):
        load_custom(path, classes=4)
    assert len(load_custom(path, classes=4, skip_bad=True).bad) == 2


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ([], "holds no graphs"),
        (["nonsense\n"], "line 1: not valid JSON: Expecting value at character 1$"),
        ([line(0), line(1)], "^{path}: no graph has a label .* nothing to train on"),
        ([line(0, y=1), line(1, y=0)], "^{path}: only 2 to split into 3 parts"),
    ],
)
def test_useless_files(tmp_path, graphs, message):
    path = write(tmp_path, graphs)
    with pytest.raises(ValueError, match=message.format(path=path)):
        load_custom(path)


def test_all_bad(tmp_path):
    with pytest.raises(
        ValueError, match=r"holds no graphs: all 1 rows are bad, the first .*line 1: not valid JSON"
    ):
        load_custom(write(tmp_path, ["nonsense\n"]), skip_bad=True)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        load_custom(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is a folder: give a file"):
        load_custom(tmp_path)
    with pytest.raises(ValueError, match=r"must end in one of \.pt, \.jsonl"):
        load_custom(write(tmp_path, [], "graphs.dat"))
    for name in ("mols.smi", "mols.txt"):
        with pytest.raises(
            ValueError, match=r"csv\.gz; SMILES alone are read from a CSV file with a column smiles$"
        ):
            load_custom(write(tmp_path, [], name))


def test_the_graph_with_other_labels_is_the_bad_one():
    graphs = [pyg(3 + i % 2, torch.tensor([i % 2])) for i in range(10)]
    for odd in (0, 4):
        some = [*graphs[:odd], pyg(5, torch.tensor([1, 0])), *graphs[odd:]]
        with pytest.raises(ValueError, match=rf"graph {odd}: 2 targets where most graphs have 1"):
            load_custom(some)
        assert len(load_custom(some, skip_bad=True).bad) == 1


def test_regression_is_standardised_and_comes_back(tmp_path):
    path = write(
        tmp_path,
        [
            line(i, y=[10.0 * i + 0.5, None if i % 2 else 3.5 * i], split="train" if i < 8 else "test")
            for i in range(10)
        ],
    )
    dataset = load_custom(path)
    assert list(dataset.splits) == ["train", "test"]
    train, test = (
        dataset.splits[part].batch(range(len(dataset.splits[part]))).y for part in ("train", "test")
    )
    assert train[:, 0].mean().abs() < 1e-6
    assert train[:, 0].std(correction=0) == pytest.approx(1, abs=1e-5)
    assert test[:, 1].isnan().tolist() == [False, True]
    assert in_units(dataset.task, test)[:, 0].tolist() == pytest.approx([80.5, 90.5])


def pyg(nodes, y, **fields):
    edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
    return Data(x=torch.rand(nodes, 2), edge_index=edges, edge_attr=torch.ones(nodes, 1), y=y, **fields)


def test_a_list_of_data_and_its_file(tmp_path):
    graphs = [pyg(3 + i % 2, torch.tensor([i % 3])) for i in range(10)]
    torch.save(graphs, tmp_path / "graphs.pt")
    for source in (graphs, tmp_path / "graphs.pt", str(tmp_path / "graphs.pt")):
        dataset = load_custom(source, seed=3)
        assert dataset.task == Task("graph", "classification", 3)
        assert dataset.splits["train"].batch([0]).edge_attr.shape == (3 + int(dataset.ids["train"][0]) % 2, 1)
    graphs[4].x[2, 1] = float("nan")
    with pytest.raises(ValueError, match="the list, graph 4: x is nan at node 2, column 1"):
        load_custom(graphs)


def test_node_masks_limit_labels_and_standardisation():
    graph = pyg(6, torch.tensor([0.0, 2, 100, 100, 100, 5]))
    graph.train_mask = torch.tensor([1, 1, 0, 0, 0, 0], dtype=torch.bool)
    graph.test_mask = torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.bool)
    dataset = load_custom([graph])
    assert dataset.task.level == "node"
    assert dataset.task.target_mean == (1.0,)
    assert dataset.splits["train"].batch([0]).y[:, 0].nan_to_num(-9).tolist() == [-1, 1, -9, -9, -9, -9]
    assert dataset.splits["test"].batch([0]).y[:, 0].nan_to_num(-9).tolist() == [-9, -9, -9, -9, -9, 4]
    assert list(dataset.splits) == ["train", "test"]


def test_one_graph_is_split_by_its_nodes():
    dataset = load_custom([pyg(20, torch.arange(20) % 4)], fractions=(0.5, 0.25, 0.25))
    labels = torch.stack([store.batch([0]).y for store in dataset.splits.values()])
    assert (labels >= 0).sum(1).tolist() == [10, 5, 5]
    assert labels.amax(0).tolist() == [i % 4 for i in range(20)]


def test_links(tmp_path):
    path = write(tmp_path, [line(i, links=[[0, 1], [1, 0]][: i % 3]) for i in range(12)])
    dataset = load_custom(path)
    assert dataset.task == Task("link", "ranking", 1)
    batch = dataset.splits["train"].batch(range(len(dataset.splits["train"])))
    assert batch.edge_label.tolist() == [1] * batch.edge_label_index.shape[1]


def test_a_split_that_is_asked_for_must_be_there(tmp_path):
    path = write(tmp_path, [line(i, y=i % 2) for i in range(10)])
    with pytest.raises(
        ValueError, match=f"^{path}: no graph has 'split', which is to say train, val or test"
    ):
        load_custom(path, split="column")
    with pytest.raises(ValueError, match="no graph has 'fold'"):
        load_custom(path, split_column="fold")


def test_a_split_may_have_no_links_but_that_for_training():
    graphs = [pyg(4, None, links=[[0, 1]] if i % 3 != 1 else None) for i in range(9)]
    for i, graph in enumerate(graphs):
        graph.split = ["train", "val", "test"][i % 3]
    dataset = load_custom(graphs)
    assert [len(store.link["edge_label"]) for store in dataset.splits.values()] == [3, 0, 3]
    for i, graph in enumerate(graphs):
        graph.split = ["val", "train", "test"][i % 3]
    with pytest.raises(ValueError, match="no graph for training has a label; the split is as the file says"):
        load_custom(graphs)


@pytest.mark.parametrize(
    ("labels", "message"),
    [([0, 1], "no graph for training has a label"), ([0.5, 1], "target 0 has no label")],
)
def test_labels_for_testing_alone_are_refused(tmp_path, labels, message):
    graphs = [
        line(i, y=None if i < 5 else labels[i % 2], split="train" if i < 5 else "test") for i in range(9)
    ]
    path = write(tmp_path, graphs)
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        load_custom(path)


def test_a_class_that_a_split_does_not_have_is_said(tmp_path):
    parts = ["train", "val", "test"] * 4
    path = write(
        tmp_path, [line(i, y=int(i < 1 or part == "test"), split=part) for i, part in enumerate(parts)]
    )
    assert load_custom(path).notes[-2:] == ("val has no label of class 1", "test has no label of class 0")
    path = write(tmp_path, [line(i, y="abc"[i % 3], split=part) for i, part in enumerate(parts)])
    assert load_custom(path).notes[-1] == "train has no label of class b, c"


def test_masks_need_nodes(tmp_path):
    with pytest.raises(ValueError, match="node masks split the labels of nodes, and these are of graphs"):
        load_custom(write(tmp_path, [line(i, y=i % 2) for i in range(4)]), split="masks")


def test_molecules(tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    molecules = [
        "c1ccccc1C",
        "c1ccccc1O",
        "c1ccccc1N",
        "c1ccccc1CC",
        "C1CCNCC1",
        "C1CCNCC1C",
        "C1CCOC1",
        "C1CC1",
    ]
    text = "smiles,logP,MW\n" + "".join(
        f"{s},{i / 2},{'' if i == 1 else 100 + i}\n" for i, s in enumerate(molecules)
    )
    (tmp_path / "m.csv").write_text(text + "C1CC,1,1\n")
    with pytest.raises(ValueError, match=r"m.csv, line 10: RDKit cannot read the SMILES 'C1CC'"):
        load_custom(tmp_path / "m.csv")
    dataset = load_custom(tmp_path / "m.csv", split="scaffold", fractions=(0.5, 0.25, 0.25), skip_bad=True)
    assert dataset.ids == {"train": ["0", "1", "2", "3"], "val": ["4", "5"], "test": ["6", "7"]}
    assert dataset.task.target_names == ("logP", "MW")
    assert dataset.schema.node.sizes == (119, 5, 12, 12, 10, 6, 6, 2, 2)
    one = load_custom(tmp_path / "m.csv", targets=["logP"], skip_bad=True)
    assert (one.task.outputs, one.task.target_names) == (1, ("logP",))


def test_a_column_whose_rows_were_all_left_out_as_bad_is_said_with_the_first_reason(tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    rows = [f"{'C' * (1 + i)},{['active', '', 'inactive'][i % 3]},{i / 2}\n" for i in range(12)]
    (tmp_path / "m.csv").write_text("smiles,activity,logP\n" + "".join(rows))
    with pytest.raises(
        ValueError,
        match=r"m.csv: target activity has no label .*; left out as bad: 8, the first .*m.csv, line 2: 'active' in column",
    ):
        load_custom(tmp_path / "m.csv", targets=["activity", "logP"], skip_bad=True)


def test_truth_values_of_several_columns_are_labels(tmp_path):
    pytest.importorskip("rdkit", reason="SMILES need the extra [chem]")
    rows = [f"{'C' * (1 + i)},{i % 2 == 0},{'' if i == 3 else i % 3 == 0}\n" for i in range(10)]
    (tmp_path / "m.csv").write_text("smiles,toxic,soluble\n" + "".join(rows))
    dataset = load_custom(tmp_path / "m.csv")
    names = ("toxic", "soluble")
    assert dataset.task == Task("graph", "multilabel", 2, target_names=names, columns=names)


def test_streaming_for_prediction(tmp_path):
    dataset = load_custom(write(tmp_path, [line(i, y="ab"[i % 2]) for i in range(10)]))
    graphs = [line(i) for i in range(7)] + [line(7, x=[[1.0]])]
    path = write(tmp_path, graphs, "new.jsonl")
    bad = []
    chunks = list(stream(path, dataset.schema, chunk=3, bad=bad))
    assert [len(store) for _, store in chunks] == [3, 3, 1]
    assert [i for ids, _ in chunks for i in ids] == [f"g{i}" for i in range(7)]
    assert chunks[0][1].batch([0]).y is None
    assert len(bad) == 1
    labelled = write(tmp_path, [line(0, y="b"), line(1)], "labelled.jsonl")
    ((_, store),) = stream(labelled, dataset.schema, task=dataset.task)
    assert store.batch([0, 1]).y.tolist() == [1, -1]
    wrong = write(tmp_path, [line(0, y="c")], "wrong.jsonl")
    with pytest.raises(ValueError, match=r"wrong.jsonl, line 1: label 'c' is not among"):
        list(stream(wrong, dataset.schema, task=dataset.task))


def test_graphs_are_read_one_at_a_time(tmp_path):
    graphs = read_graphs(rows(write(tmp_path, [line(0), "broken\n"])))
    assert next(graphs).id == "g0"
    with pytest.raises(ValueError, match="line 2"):
        next(graphs)


def test_a_graph_without_edges_does_not_fix_the_width(tmp_path):
    graphs = [line(0, edges=[], y=0), *(line(i, edge_attr=[0.5, 1.5], y=i % 2) for i in range(1, 6))]
    dataset = load_custom(write(tmp_path, graphs))
    assert dataset.schema.edge.width == 1
    assert sum(store.num_edges for store in dataset.splits.values()) == 10
