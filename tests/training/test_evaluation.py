"""One's own data of every kind, from file to metric."""

import json

import numpy as np
import pytest
import torch

from sfiformer import SFiFormer
from sfiformer.cli import main
from sfiformer.config import ExperimentConfig
from sfiformer.errors import UserError
from sfiformer.training import RunFolder, evaluate, prepare, train

SMALL = {
    "model.layers": 1,
    "model.dim": 12,
    "model.pe_dim": 4,
    "model.heads": 1,
    "data.batch_size": 8,
    "trainer.epochs": 2,
    "optim.warmup_epochs": 0,
    "trainer.accelerator": "cpu",
}


def graphs(count, label, seed=0):
    rng = np.random.default_rng(seed)
    for number in range(count):
        n = int(rng.integers(4, 9))
        ring = [[i, (i + 1) % n] for i in range(n)]
        graph = {"id": f"g{number}", "x": rng.normal(size=(n, 2)).round(3).tolist(), "edges": ring}
        yield {**graph, **label(n, rng)}


KINDS = {
    "regression": lambda n, rng: {"y": [100.0 * n + float(rng.normal()), -1.0 * n]},
    "binary": lambda n, rng: {"y": int(n > 6)},
    "node": lambda n, rng: {"y": [["a", "b", "c"][i % 3] for i in range(n)]},
    "ranking": lambda n, rng: {"links": [[0, 2], [1, 3]]},
}


@pytest.fixture
def run_on(tmp_path):
    """run_on(kind): a trained run on a JSON-lines file of that kind of labels, and the file."""

    def make(kind, more=()):
        file = tmp_path / f"{kind}.jsonl"
        file.write_text("".join(json.dumps(graph) + "\n" for graph in graphs(30, KINDS[kind])))
        settings = {**SMALL, "data.path": str(file), "data.root": str(tmp_path / "root"), **dict(more)}
        config = ExperimentConfig.from_preset("custom", settings)
        return train(config, tmp_path / kind, progress=False), file

    return make


@pytest.mark.parametrize(
    ("kind", "metrics"),
    [
        ("regression", ["relative_mae", "mae:0", "mae:1"]),
        ("binary", ["roc_auc"]),
        ("node", ["accuracy"]),
        ("ranking", ["mrr", "mrr_filtered", "mrr_filtered_self"]),
    ],
)
def test_runs_on_ones_own_data_evaluate_to_what_training_recorded(run_on, kind, metrics):
    result, _ = run_on(kind)
    assert result.metric == metrics[0]
    found = evaluate(result.run, split="val", device="cpu")
    assert list(found) == metrics
    assert found[metrics[0]] == pytest.approx(result.val, rel=1e-6, nan_ok=True)
    one_by_one = evaluate(result.run, split="val", batch_size=1, device="cpu")
    assert one_by_one == pytest.approx(found, rel=1e-5, nan_ok=True)
    for name in ("best", "last"):
        assert evaluate(result.run, split="train", checkpoint=name, device="cpu").keys() == found.keys()


def test_errors_are_in_the_targets_own_units(run_on):
    result, file = run_on("regression", {"data.standardize": True})
    task, schema, standardizer = RunFolder(result.run).task()
    config = RunFolder(result.run).config()
    prepared = prepare(config)
    assert (task, schema) == (prepared.task, prepared.schema)
    assert torch.equal(standardizer.mean["x"], prepared.standardizer.mean["x"])

    # By hand, graph by graph, from the file's own numbers.
    lines = {graph["id"]: graph for graph in map(json.loads, file.read_text().splitlines())}
    model = SFiFormer.from_pretrained(result.run / "best")
    errors = []
    for number, name in enumerate(prepared.ids["test"]):
        with torch.no_grad():
            out = model(prepared.stores["test"].batch([number]))[0]
        predicted = out * torch.tensor(task.target_std) + torch.tensor(task.target_mean)
        errors.append((predicted - torch.tensor(lines[name]["y"])).abs())
    by_target = torch.stack(errors).mean(0)
    found = evaluate(result.run, device="cpu")
    assert [found["mae:0"], found["mae:1"]] == pytest.approx(by_target.tolist(), rel=1e-4)
    assert result.test == pytest.approx(float((by_target / torch.tensor(task.target_std)).mean()), rel=1e-4)
    # The same graphs as another file.
    other = file.with_name("test.jsonl")
    other.write_text("".join(json.dumps(lines[name]) + "\n" for name in prepared.ids["test"]))
    assert evaluate(result.run, data=other, device="cpu") == pytest.approx(found, rel=1e-5)


def test_a_metric_that_is_not_defined_is_told_and_null(run_on, tmp_path, capsys):
    result, file = run_on("binary", {"trainer.epochs": 1})
    one_class = tmp_path / "one.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    one_class.write_text("".join(json.dumps({**graph, "y": lines[0]["y"]}) + "\n" for graph in lines))
    with pytest.raises(SystemExit) as caught:
        main(["eval", str(result.run), "--data", str(one_class), "--device", "cpu", "--json"])
    assert caught.value.code == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1], parse_constant=pytest.fail) == {"roc_auc": None}
    assert said.err.endswith("warning: roc_auc: not defined, the labels are of one class\n")


def test_what_cannot_be_evaluated_is_told(run_on, tmp_path):
    with pytest.raises(
        UserError, match=r"there is no folder .*nowhere: a run is a folder that sfi train makes"
    ):
        evaluate(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is no run: it has no config.yaml"):
        evaluate(tmp_path)
    result, file = run_on("binary", {"data.fractions": [0.8, 0.2, 0.0]})
    with pytest.raises(UserError, match=r"is no run: it has no config.yaml; did you mean "):
        evaluate(result.run / "best")
    assert result.test is None
    unlabelled = tmp_path / "unlabelled.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    unlabelled.write_text("".join(json.dumps({**graph, "y": None}) + "\n" for graph in lines))
    with pytest.raises(UserError, match=r"unlabelled.jsonl has no labels to evaluate against"):
        evaluate(result.run, data=unlabelled, device="cpu")
    for size in (0, -3):
        with pytest.raises(UserError, match=f"the batch size is {size}; it must be at least 1"):
            evaluate(result.run, batch_size=size, device="cpu")
    with pytest.raises(UserError, match="there is no device 'gpu'; choose auto, cpu or cuda"):
        evaluate(result.run, device="gpu")
    with pytest.raises(UserError, match="has no split 'test'; it has train, val"):
        evaluate(result.run, device="cpu")
    (result.run / "task.json").write_text("{}")
    with pytest.raises(UserError, match=r"task.json is damaged"):
        evaluate(result.run, device="cpu")
    fresh, _ = run_on("node")
    wide = tmp_path / "wide.jsonl"
    wide.write_text(json.dumps({"x": [[1.0, 2.0, 3.0]], "edges": [], "y": ["a"]}) + "\n")
    with pytest.raises(ValueError, match=r"wide.jsonl.* x has 3 columns"):
        evaluate(fresh.run, data=wide, device="cpu")
