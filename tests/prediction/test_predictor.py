"""Predictions: the same whatever the batch, in the user's own terms, and bounded in memory."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from torch_geometric.data import Data

from sfiformer import ModelConfig, SFiFormer
from sfiformer.data import GraphStore, LapPE, Standardizer, add_encodings
from sfiformer.data.custom import MOLECULES
from sfiformer.data.schema import Features, Schema
from sfiformer.data.task import Task
from sfiformer.prediction import Predictor

CONFIG = ModelConfig(
    layers=2, dim=12, heads=2, dropout=0.3, attention_dropout=0.3, pe="lappe", pe_size=4, pe_dim=4,
    node_encoder="linear", node_features=2, edge_encoder="constant", head="graph", outputs=3,
)  # fmt: skip
SCHEMA = Schema(Features(2, "numbers"), None)


def graphs(sizes=(5, 9, 1, 7, 12, 3), seed=0, **fields) -> list[Data]:
    """Rings with random features."""
    torch.manual_seed(seed)
    made = []
    for size in sizes:
        ring = torch.arange(size)
        made.append(Data(x=torch.randn(size, 2), edge_index=torch.stack([ring, (ring + 1) % size]), **fields))
    return made


def trained(config: ModelConfig) -> SFiFormer:
    """A model with the running statistics, and the N*, of some other graphs."""
    torch.manual_seed(1)
    model = SFiFormer(config)
    store = add_encodings(GraphStore.from_pyg(graphs((6, 20, 11), 1)), [LapPE(4)], progress=False)
    model(store.batch([0, 1, 2]).replace(edge_label_index=torch.tensor([[0], [1]])))
    return model


def all_rows(predictor: Predictor, source, **options) -> dict[str, list]:
    table: dict[str, list] = {}
    for part in predictor.tables(source, **options):
        for name, column in part.items():
            table.setdefault(name, []).extend(column)
    return table


LINKS = {"edge_label_index": torch.tensor([[0, 0], [0, 0]])}
CASES = {
    "graphs": (CONFIG, Task("graph", "classification", 3), {}),
    "nodes": (replace(CONFIG, head="node"), Task("node", "classification", 3), {}),
    "links": (replace(CONFIG, head="link", outputs=1), Task("link", "ranking", 1), LINKS),
    "N*": (replace(CONFIG, lam_scaling="largest", lam=30.0), Task("graph", "classification", 3), {}),
    "proximal": (
        replace(CONFIG, lam_scaling="graph", solver="proximal"),
        Task("graph", "classification", 3),
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_predictions_do_not_depend_on_the_batch_size(case):
    config, task, fields = CASES[case]
    predictor = Predictor(trained(config), task, SCHEMA)
    source = graphs(**fields)
    alone = all_rows(predictor, source, batch_size=1)
    assert len(alone["graph"]) == {"node": 37, "link": 12, "graph": 6}[task.level]
    for batch_size in (2, 100):
        together = all_rows(predictor, source, batch_size=batch_size)
        assert together.keys() == alone.keys()
        for name, column in together.items():
            if isinstance(column[0], float):
                assert column == pytest.approx(alone[name], rel=1e-6, abs=1e-5)  # float32 has seven digits
            else:
                assert column == alone[name]


def test_rows_say_what_they_are_of():
    config, task, _ = CASES["nodes"]
    table = all_rows(Predictor(trained(config), task, SCHEMA), graphs((2, 1), id="a"))
    assert (table["graph"], table["node"]) == (["a", "a", "a"], [0, 1, 0])
    config, task, _ = CASES["links"]
    links = {"edge_label_index": torch.tensor([[0, 2], [1, 1]])}
    table = all_rows(Predictor(trained(config), task, SCHEMA), graphs((3, 4), **links))
    assert (table["source"], table["target"]) == ([0, 2, 0, 2], [1, 1, 1, 1])
    assert table["graph"] == ["0", "0", "1", "1"]


def test_class_names_units_and_standardised_features_come_back():
    source = graphs()
    scale = Standardizer({"x": torch.tensor([1.0, 0.0])}, {"x": torch.tensor([2.0, 4.0])})
    model = trained(CONFIG)
    named = Predictor(model, Task("graph", "classification", 3, class_names=("red", "green", "blue")), SCHEMA)
    table = all_rows(named, source)
    best = [max(("red", "green", "blue"), key=lambda c, i=i: table[f"probability:{c}"][i]) for i in range(6)]
    assert table["prediction"] == best
    # The same numbers twice: by the predictor's standardisation and units, and by hand.
    metres = Task(
        "graph", "regression", 3, target_names=("a", "b", "c"), target_mean=(1, 2, 3), target_std=(1, 10, 1)
    )
    table = all_rows(Predictor(model, metres, SCHEMA, scale), source)
    for graph in source:
        graph.x = (graph.x - torch.tensor([1.0, 0.0])) / torch.tensor([2.0, 4.0])
    plain = all_rows(Predictor(model, Task("graph", "regression", 3), SCHEMA), source)
    assert table["prediction:b"] == pytest.approx([10 * y + 2 for y in plain["prediction:1"]], abs=1e-5)


def test_files_of_every_format_are_read(tmp_path):
    source = graphs()
    predictor = Predictor(trained(CONFIG), CASES["graphs"][1], SCHEMA)
    torch.save(source, tmp_path / "new.pt")
    lines = [{"x": graph.x.tolist(), "edge_index": graph.edge_index.tolist()} for graph in source]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert all_rows(predictor, tmp_path / "new.pt") == all_rows(predictor, source)
    assert all_rows(predictor, tmp_path / "new.jsonl") == all_rows(predictor, source)

    pytest.importorskip("rdkit")
    config = replace(CONFIG, node_encoder="atom", edge_encoder="bond")
    with_pe = Predictor(SFiFormer(config), CASES["graphs"][1], MOLECULES, smiles_column="molecule")
    with pytest.raises(
        TypeError
    ):  # which of several texts and truth values it would be, its place does not say
        Predictor(SFiFormer(config), CASES["graphs"][1], MOLECULES, None, "molecule")
    (tmp_path / "new.csv").write_text("molecule,remark\nCCO,a\nc1ccccc1,b\n")
    assert all_rows(with_pe, tmp_path / "new.csv")["graph"] == ["0", "1"]


def test_edges_that_are_listed_otherwise_than_in_training_are_said():
    task = Task("graph", "classification", 3)
    once, lone = graphs(), Data(x=torch.ones(1, 2), edge_index=torch.zeros(2, 0, dtype=torch.int64))
    both = [Data(x=g.x, edge_index=torch.cat([g.edge_index, g.edge_index.flip(0)], 1)) for g in once]
    for both_ways, alike, other in ((True, both, once), (False, once, both)):
        predictor = Predictor(trained(CONFIG), task, SCHEMA, both_ways=both_ways)
        with warnings.catch_warnings(action="error"):
            all_rows(predictor, alike, batch_size=2)
            all_rows(predictor, [lone])
        with pytest.warns(UserWarning, match="of these graphs and .* of the training graphs have a reverse"):
            all_rows(predictor, other, batch_size=2)


def test_no_warning_comes_before_the_error_that_nothing_can_be_read(tmp_path):
    predictor = Predictor(trained(CONFIG), Task("graph", "classification", 3), SCHEMA, from_smiles=True)
    (tmp_path / "mols.smi").write_text("CCO\n")
    (tmp_path / "wide.jsonl").write_text('{"x": [[1]], "edges": []}\n')
    with warnings.catch_warnings(action="error"):
        for source, message in (
            (tmp_path / "mols.smi", "a CSV file with a column smiles"),
            (tmp_path, "is a folder: give a file"),
            ("CCO", "there is no such file"),
            (tmp_path / "wide.jsonl", "line 1: x has 1 columns"),
        ):
            with pytest.raises(ValueError, match=message):
                all_rows(predictor, source)
    with pytest.warns(UserWarning, match="these are graphs with features of their own"):
        all_rows(predictor, graphs(), batch_size=2)


def test_bad_graphs_stop_or_are_left_out(tmp_path):
    predictor = Predictor(trained(CONFIG), CASES["graphs"][1], SCHEMA)
    good = {"x": [[0.0, 1.0]], "edges": [], "split": "not one of ours"}
    path = tmp_path / "new.jsonl"
    path.write_text("\n".join(map(json.dumps, [good, {"x": [[1.0]], "edges": []}, good])))
    with pytest.raises(ValueError, match=r"new\.jsonl, line 2: x has 1 columns"):
        all_rows(predictor, path)
    bad: list = []
    assert all_rows(predictor, path, bad=bad)["graph"] == ["0", "2"]
    assert [place[-6:] for place, _ in bad] == ["line 2"]


def test_nothing_to_predict_is_told(tmp_path):
    path = tmp_path / "new.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"new\.jsonl holds no graphs"):
        all_rows(Predictor(trained(CONFIG), CASES["graphs"][1], SCHEMA), path)
    config, task, _ = CASES["links"]
    with pytest.raises(ValueError, match="lists no links to score"):
        all_rows(Predictor(trained(config), task, SCHEMA), graphs())


def test_graphs_are_read_as_they_are_needed(tmp_path):
    """The first part is there before the rest of the file is looked at."""
    predictor = Predictor(trained(CONFIG), CASES["graphs"][1], SCHEMA)
    path = tmp_path / "new.jsonl"
    path.write_text('{"x": [[0.0, 1.0]], "edges": []}\n' * 4 + "not JSON\n")
    parts = predictor.tables(path, batch_size=2)
    assert next(parts)["graph"] == ["0", "1"]
    assert next(parts)["graph"] == ["2", "3"]
    with pytest.raises(ValueError, match="line 5"):
        next(parts)
