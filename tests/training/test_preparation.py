import pytest
import torch

from sfiformer.config import ExperimentConfig
from sfiformer.errors import UserError
from sfiformer.training import evaluate, prepare, train
from sfiformer.training.preparation import objective


def test_generated_data_are_encoded_and_settle_the_model(experiment, overrides, tmp_path):
    prepared = prepare(experiment({"data.root": str(tmp_path)}))
    assert {split: len(store) for split, store in prepared.stores.items()} == {
        "train": 17,
        "val": 6,
        "test": 6,
    }
    assert prepared.stores["test"].node["eslappe_vectors"].shape[1] == 10
    assert prepared.config.model.edge_encoder == "constant"
    assert "generated, size small, seed 0" in prepared.facts
    again = prepare(experiment({"data.root": str(tmp_path)}))  # from the disk this time
    for name, tensor in prepared.stores["train"].node.items():
        assert torch.equal(again.stores["train"].node[name], tensor)
    assert prepared.names("train", [3, 1]) == ["3", "1"]
    other = prepare(experiment({"data.root": str(tmp_path), "seed": 1}))
    assert not torch.equal(other.stores["train"].node_ptr, prepared.stores["train"].node_ptr)


def test_loss_and_metric_of_an_experiment(experiment):
    prepared = prepare(experiment())
    loss, metric = objective(prepared.config, prepared.task)
    assert (loss.weighted, metric.name) == (True, "mean_recall")
    loss, _ = objective(experiment({"optim.class_weights": False}), prepared.task)
    assert not loss.weighted


def test_numbers_of_ones_own_graphs_are_standardised_unless_one_asks(tmp_path):
    line = '{"num_nodes": 2, "edge_index": [[0], [1]], "x": [[%s], [%s]], "y": %d}'
    numbers, categories = tmp_path / "numbers.jsonl", tmp_path / "categories.jsonl"
    numbers.write_text("\n".join(line % (100.5 * i, 7.5, i % 2) for i in range(20)))
    categories.write_text("\n".join(line % (i % 3, 1, i % 2) for i in range(20)))

    def run(file, more=()):
        settings = {"data.path": str(file), "data.root": str(tmp_path), **dict(more)}
        prepared = prepare(ExperimentConfig.from_preset("custom", settings))
        return prepared, prepared.facts.splitlines()[-1], prepared.stores["train"].node["x"].float()

    prepared, fact, x = run(numbers)
    assert fact == "standardised by the training split: x (data.standardize: false leaves them as they are)"
    assert float(x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1, abs=0.05)
    assert prepared.config.data.standardize is True
    prepared, fact, x = run(numbers, {"data.standardize": False})
    assert fact == "left as they are: x (data.standardize: true standardises them)"
    assert float(x.max()) > 1000
    assert prepared.standardizer is None
    prepared, fact, _ = run(categories)
    assert prepared.standardizer is None
    assert "standardis" not in fact
    with pytest.raises(UserError, match="neither x nor edge_attr holds real numbers"):
        run(categories, {"data.standardize": True})


def _lines(path, count=20):
    line = '{"num_nodes": 2, "edges": [[0, 1]], "x": [[%s], [7.5]], "y": %s, "id": "%d"}'
    path.write_text("\n".join(line % (100.5 * i, i / 3, i) for i in range(count)))
    return path


def test_runs_of_other_seeds_share_their_test_graphs(tmp_path):
    file = _lines(tmp_path / "own.jsonl")

    def tested(settings):
        settings = {"data.path": str(file), "data.root": str(tmp_path), **settings}
        return prepare(ExperimentConfig.from_preset("custom", settings), encode=False).ids["test"]

    assert tested({"seed": 1}) == tested({"seed": 2}) == tested({})
    assert tested({"data.split_seed": 3}) != tested({})
    assert tested({"seed": 3, "data.split_seed": None}) == tested({"data.split_seed": 3})


def test_without_graphs_for_validation_patience_has_nothing_to_go_by(tmp_path):
    file = _lines(tmp_path / "own.jsonl")
    settings = {"data.path": str(file), "data.root": str(tmp_path), "data.fractions": (0.8, 0.0, 0.2)}
    prepared = prepare(ExperimentConfig.from_preset("custom", settings), encode=False)
    assert "no graphs for validation: the last epoch counts as the best" in prepared.facts
    with pytest.raises(UserError, match=r"trainer.patience is 3, but .* no graphs for validation"):
        prepare(ExperimentConfig.from_preset("custom", {**settings, "trainer.patience": 3}), encode=False)


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("custom", {}, "data.path is not set"),
        ("custom", {"data.path": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file"),
        ("cluster", {"data.path": "mine.jsonl"}, "the dataset is cluster"),
        ("mnist", {"data.size": "small"}, "mnist cannot be generated; only cluster and pattern can"),
        ("cluster", {"data.name": "clusster"}, "did you mean 'cluster'"),
        ("cluster", {"data.split_seed": 7}, "data.split_seed is 7, but the dataset is cluster"),
        ("mnist", {"data.kind": "regression"}, "data.kind is regression, but the dataset is mnist"),
        ("cluster", {"data.fractions": [0.7, 0.2, 0.1]}, "data.fractions is 0.7,0.2,0.1, but"),
        ("custom", {"data.name": "cluster", "data.skip_bad": True}, "data.skip_bad is true, but"),
    ],
)
def test_settings_that_name_no_data(tmp_path, preset, settings, message):
    config = ExperimentConfig.from_preset(preset, {"data.root": str(tmp_path), **settings})
    with pytest.raises(ValueError, match=message):
        prepare(config)


def test_what_is_not_said_of_a_file_is_no_mistake(tmp_path, experiment):
    as_of_custom = {"data.split_seed": 0, "data.root": str(tmp_path)}  # of a preset that rests on custom
    assert prepare(experiment(as_of_custom), encode=False).task.level == "node"


def test_a_run_that_was_told_of_a_file_in_vain_goes_on(tmp_path, experiment):
    run = tmp_path / "run"
    train(experiment({"trainer.epochs": 1}), run, progress=False)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("split_seed: null", "split_seed: 7"))  # as it once did
    assert evaluate(run, device="cpu").keys() == {"mean_recall"}
    again = ExperimentConfig.from_preset(str(config), {"trainer.epochs": 2})
    assert train(again, run, resume=True, progress=False).epochs == 2


def test_class_weights_are_for_classes(tmp_path):
    from sfiformer.data.task import Task

    config = ExperimentConfig.from_preset("custom", {"optim.class_weights": True})
    with pytest.raises(UserError, match=r"no loss for a regression task.*set optim.class_weights to false"):
        objective(config, Task("graph", "regression", 1))
