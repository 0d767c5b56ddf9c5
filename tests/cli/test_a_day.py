"""Train, kill, resume, evaluate, predict: on a user's own file and on generated graphs."""

import csv
import json
import re
from pathlib import Path

import pytest

from sfiformer.data import cluster

# Models that are trained in seconds.
TINY = {"model.layers": 1, "model.dim": 8, "model.heads": 1, "optim.warmup_epochs": 1}
OWN = {**TINY, "model.pe_size": 2, "model.pe_dim": 2, "trainer.epochs": 40, "data.batch_size": 4}
GENERATED = {
    **TINY, "model.pe": "none", "model.local": "gcn", "trainer.epochs": 2, "trainer.measure_zeros": "false",
    "data.size": "small", "data.batch_size": 100,
}  # fmt: skip


def options(settings: dict[str, object]) -> list[object]:
    return [part for key, value in settings.items() for part in (f"--{key}", value)]


def epochs(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def own_run(sfi, killed_after_an_epoch, own_graphs, tmp_path_factory) -> Path:
    """A run on the user's file that was killed and resumed."""
    root = tmp_path_factory.mktemp("runs")
    run = root / "own"
    settings = {**OWN, "data.path": own_graphs, "data.root": root / "data"}
    train = ["train", "custom", *options(settings), "--out", run]
    killed_after_an_epoch(run, *train)
    assert len(epochs(run)) < 40
    assert not (run / "result.json").exists()
    resumed = sfi(*train, "--resume")
    assert "resuming after epoch" in resumed.stdout
    assert [record["epoch"] for record in epochs(run)] == list(range(1, 41))
    return run


@pytest.fixture(scope="module")
def generated_run(sfi, killed_after_an_epoch, tmp_path_factory) -> Path:
    """A run on a small CLUSTER that was killed and resumed."""
    root = tmp_path_factory.mktemp("runs")
    run = root / "cluster"
    train = ["train", "cluster", *options({**GENERATED, "data.root": root / "data"}), "--out", run]
    killed_after_an_epoch(run, *train)
    sfi(*train, "--resume")
    assert len(epochs(run)) == 2
    return run


def test_own_graphs_from_training_to_predictions(sfi, own_run, own_graphs, tmp_path):
    best = json.loads((own_run / "result.json").read_text())
    scores = json.loads(sfi("eval", own_run, "--json").stdout)
    assert scores["roc_auc"] == pytest.approx(best["test"], abs=1e-6)

    out = tmp_path / "predictions.csv"
    said = sfi("predict", own_run, own_graphs, "--out", out, "--batch-size", 3)
    assert said.stdout == f"{out}: 40 rows\n"
    rows = table(out)
    assert [row["graph"] for row in rows] == [f"graph {number}" for number in range(40)]
    assert {row["prediction"] for row in rows} <= {"ring", "path"}

    # A second model of the day: one row is bad, and the table is wanted in another format.
    broken = tmp_path / "broken.jsonl"
    broken.write_text(own_graphs.read_text() + "{oops\n" * 9)
    done = sfi("predict", own_run, broken, "--out", tmp_path / "p.parquet", "--skip-bad")
    lines = done.stderr.splitlines()
    assert len(lines) == 9
    for number, line in enumerate(lines, 41):
        assert re.fullmatch(rf"skipped .*broken\.jsonl, line {number}: not valid JSON.*", line)
    parquet = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "p.parquet").to_pydict()
    column = "probability:ring"
    assert parquet[column] == pytest.approx([float(row[column]) for row in rows], abs=1e-5)


def test_generated_graphs_from_training_to_predictions(sfi, generated_run, tmp_path):
    best = json.loads((generated_run / "result.json").read_text())
    line = sfi("eval", generated_run, "--split", "val", "--batch-size", 7).stdout
    name, score = line.split()
    assert (name, float(score)) == ("mean_recall", pytest.approx(best["val"], abs=1e-4))

    graphs = tmp_path / "graphs.jsonl"
    batch = cluster((1, 1, 1), seed=9)["train"].batch([0])
    graphs.write_text(json.dumps({"x": batch.x.tolist(), "edge_index": batch.edge_index.tolist()}))
    sfi("predict", generated_run, graphs, "--out", tmp_path / "nodes.csv")
    rows = table(tmp_path / "nodes.csv")
    assert [int(row["node"]) for row in rows] == list(range(batch.num_nodes))
    assert sum(float(rows[0][f"probability:{c}"]) for c in range(6)) == pytest.approx(1)


def test_mistakes_with_runs_are_one_line(refused, own_run, own_graphs, generated_run, tmp_path):
    message = refused("predict", own_run, tmp_path / "absent.jsonl", "--out", tmp_path / "p.csv")
    assert message == f"{tmp_path / 'absent.jsonl'}: there is no such file"
    assert not (tmp_path / "p.csv").exists()

    message = refused("predict", generated_run, own_graphs)  # graphs of another dataset
    assert "graphs.jsonl, line 1: x has 2 columns" in message

    other = tmp_path / "other.jsonl"
    other.write_text(own_graphs.read_text())
    message = refused("train", "custom", "--resume", "--out", own_run, "--data.path", other)
    assert message.startswith(f"the run in {own_run} has ")

    message = refused("eval", tmp_path)
    assert message == f"{tmp_path} is no run: it has no config.yaml"

    weights = own_run / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    message = refused("eval", own_run)
    assert "model.safetensors is damaged" in message
