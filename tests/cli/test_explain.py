"""`sfi explain` as a user calls it."""

import csv
import json
from pathlib import Path

import pytest

from sfiformer.cli import main

TINY = {
    "model.layers": 2, "model.dim": 8, "model.heads": 2, "model.pe": "none", "model.lam": 4.0,
    "model.lam_scaling": "graph",
    "optim.warmup_epochs": 1, "trainer.epochs": 1, "data.batch_size": 40, "trainer.measure_zeros": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(own_graphs, tmp_path_factory):
    """run("none"): a run on a user's file with this attention."""
    from sfiformer import ExperimentConfig, train

    root = tmp_path_factory.mktemp("runs")

    def make(attention):
        settings = {
            "data.path": str(own_graphs),
            "data.root": str(root / "data"),
            "model.attention": attention,
        }
        train(ExperimentConfig.from_preset("custom", {**TINY, **settings}), root / attention, progress=False)
        return root / attention

    return make


@pytest.mark.parametrize(
    ("text", "graph"), [("7", 7), ("-1", -1), ("007", "007"), ("0", 0), ("00", "00"), ("C7", "C7")]
)
def test_leading_zeros_belong_to_an_id(monkeypatch, text, graph):
    asked = []
    monkeypatch.setattr("sfiformer.explain.explain_graph", lambda run, graph, **_: asked.append(graph) or [])
    with pytest.raises(SystemExit):
        main(["explain", "run", "--graph", text])
    assert asked == [graph]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_pictures_numbers_and_mistakes(sfi, refused, run, tmp_path):
    sparse, dense, local = run("sfi"), run("softmax"), run("none")
    said = sfi(
        "explain", sparse, "--graph", 1, "--split", "val", "--layer", 2, "--no-page",
        "--statistics", "--against", dense, "--graphs", 3,
    ).stdout.splitlines()  # fmt: skip
    stem = sparse / "explain" / "val"
    suffixes = [
        "-1-maps-layer2.png",
        "-1-maps-layer2.svg",
        "-1-iterations-layer2.png",
        "-1-iterations-layer2.svg",
    ]
    suffixes += [f"-statistics{end}" for end in (".png", ".svg", ".json", "-graphs.csv", "-hops.csv")]
    assert said[3:] == [f"{stem}{suffix}" for suffix in suffixes]
    ids = {(row["split"], row["graph"]): row["id"] for row in table(sparse / "splits.csv")}
    assert sorted(ids.values()) == sorted(f"graph {number}" for number in range(40))
    own = ids["val", "1"]
    assert said[0] == f"val[1], id {own}: {4 + int(own.split()[1]) % 5} nodes"
    assert said[1].startswith("sfi: ")
    assert said[2].startswith("softmax: 0.0% of attention exactly zero; ")
    summary = json.loads((sparse / "explain" / "val-statistics.json").read_text())
    assert [each["run"] for each in summary] == ["sfi", "softmax"]

    last = sfi("explain", sparse, "--graph", own, "--split", "val", "--layer", 1).stdout.splitlines()[-1]
    assert f"<title>val[1], id {own}</title>" in Path(last).read_text()

    out = tmp_path / "out"
    out.touch()
    message = refused("explain", sparse, "--graph", 0, "--out", out, code=2)
    assert message == f"{out} is a file; choose a folder for the pictures"
    out.unlink()
    message = refused("explain", local, "--graph", 0, "--out", out)
    assert message == (
        f"{local}: the model has attention: none, so there are no flows to look at; "
        "train one with attention sfi, dfi or softmax"
    )
    message = refused("explain", sparse)
    assert message == "say what to explain: --graph I for one graph, --statistics for the split"
    message = refused("explain", tmp_path, "--graph", 0, "--out", out)
    assert message == f"{tmp_path} is no run: it has no config.yaml"
    assert not out.exists()
