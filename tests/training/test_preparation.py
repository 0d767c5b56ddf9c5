import pytest
import torch

from sfiformer.config import ExperimentConfig
from sfiformer.errors import UserError
from sfiformer.training import prepare
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


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("custom", {}, "data.path is not set"),
        ("custom", {"data.path": "nowhere.jsonl"}, "nowhere.jsonl: there is no such file"),
        ("cluster", {"data.path": "mine.jsonl"}, "the dataset is cluster"),
        ("mnist", {"data.size": "small"}, "mnist cannot be generated; only cluster and pattern can"),
        ("cluster", {"data.name": "clusster"}, "did you mean 'cluster'"),
    ],
)
def test_settings_that_name_no_data(tmp_path, preset, settings, message):
    config = ExperimentConfig.from_preset(preset, {"data.root": str(tmp_path), **settings})
    with pytest.raises(ValueError, match=message):
        prepare(config)


def test_class_weights_are_for_classes(tmp_path):
    from sfiformer.data.task import Task

    config = ExperimentConfig.from_preset("custom", {"optim.class_weights": True})
    with pytest.raises(UserError, match=r"no loss for a regression task.*set optim.class_weights to false"):
        objective(config, Task("graph", "regression", 1))
