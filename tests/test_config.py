import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from sfiformer import ModelConfig
from sfiformer.config import DataConfig, ExperimentConfig, OptimConfig, TrainerConfig
from sfiformer.presets import preset_names

# The paper's two tables: λ*, α, dropout, attention dropout, batch size, learning rate, epochs,
# warm-up epochs, weight decay.
TABLE = {
    "pascalvoc-sp": (1, 0.1, 0.1, 0.5, 14, 1e-3, 200, 10, 0),
    "coco-sp": (1, 0.1, 0.1, 0.5, 14, 1e-3, 150, 10, 0),
    "peptides-func": (1, 0.1, 0.1, 0.5, 32, 1e-3, 250, 5, 0),
    "peptides-struct": (1, 0.1, 0.1, 0.5, 16, 1e-3, 250, 5, 0),
    "pcqm-contact": (1, 0.1, 0.0, 0.5, 512, 3e-4, 200, 10, 0),
    "mnist": (1, 0.1, 0.1, 0.1, 256, 1e-3, 150, 5, 1e-5),
    "cifar10": (1, 0.1, 0.1, 0.1, 200, 1e-3, 150, 5, 1e-5),
    "pattern": (1, 0.1, 0.0, 0.5, 32, 2e-4, 200, 5, 2e-5),
    "cluster": (1, 0.1, 0.1, 0.5, 16, 2e-4, 150, 5, 1e-5),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_papers_presets_hold_its_tables(name):
    c = ExperimentConfig.from_preset(f"{name}-paper")
    m = c.model
    row = (m.lam, m.alpha, m.dropout, m.attention_dropout, c.data.batch_size)
    row += (c.optim.lr, c.trainer.epochs, c.optim.warmup_epochs, c.optim.weight_decay)
    assert row == TABLE[name]
    assert (c.data.name, m.lam_scaling, m.qk_norm, m.attention) == (name, "largest", False, "sfi")
    ours = ExperimentConfig.from_preset(name)
    assert (ours.model.lam_scaling, ours.model.qk_norm) == ("potential", True)


@pytest.mark.parametrize("name", preset_names())
def test_a_resolved_preset_reads_back(name, tmp_path):
    config = ExperimentConfig.from_preset(name, {"model.alpha": float("inf"), "seed": 7})
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    assert ExperimentConfig.from_preset(str(file)) == config


def test_overrides_by_dotted_key():
    config = ExperimentConfig.from_preset("mnist", {"optim.lr": "3e-4", "model.attention": "dfi", "seed": 5})
    assert (config.optim.lr, config.model.attention, config.seed) == (3e-4, "dfi", 5)
    assert config.model.dim == 40
    with pytest.raises(
        ValueError, match=r"overrides: there is no key 'optim.lrr'; did you mean 'optim.lr'\?"
    ):
        ExperimentConfig.from_preset("mnist", {"optim.lrr": 1})


def test_a_mistyped_key_in_a_file_names_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: mnist\ntrainer: {epoch: 3}")
    with pytest.raises(
        ValueError, match=r"mine.yaml: there is no key 'trainer.epoch'; did you mean 'trainer.epochs'"
    ):
        ExperimentConfig.from_preset(str(file))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.batch_size", 0, "data.batch_size is 0"),
        ("data.fractions", [0.5, 0.5, 0.5], "sum to 1"),
        ("optim.lr", 0, "optim.lr is 0.0; it must be positive"),
        ("optim.warmup_epochs", -1, "must not be negative"),
        ("data.fractions", [float("nan"), 0.5, 0.5], "sum to 1"),
        ("optim.weight_decay", "nan", "must not be negative"),
        ("optim.lr", "inf", "it must be a number"),
        ("seed", 2**63, "63 bits at most"),
        ("data.split_seed", -1, "data.split_seed is -1; it must not be negative"),
        ("trainer.devices", 0, "trainer.devices is 0"),
        ("trainer.precision", 16, "is 16, not one of 32, tf32, bf16-mixed"),
        ("model.layers", 0, "layers is 0"),
    ],
)
def test_values_that_make_no_experiment(key, value, message):
    with pytest.raises(ValueError, match=message):
        ExperimentConfig.from_preset("custom", {key: value})


def test_the_seed_of_a_split_is_that_of_the_run_where_none_is_given():
    own, given = (
        ExperimentConfig.from_preset("custom", {"seed": 5, "data.split_seed": seed}) for seed in (None, 5)
    )
    assert own.split_seed == given.split_seed == 5
    assert own.settings() == given.settings()
    assert ExperimentConfig.from_preset("custom", {"seed": 5}).split_seed == 0
    assert ExperimentConfig.from_preset("cluster", {"seed": 5}).settings()["data.split_seed"] is None


@pytest.mark.parametrize("cls", [ModelConfig, DataConfig, OptimConfig, TrainerConfig])
def test_every_setting_is_documented(cls):
    (body,) = ast.parse(inspect.getsource(cls)).body
    documented = {
        statement.target.id
        for statement, following in zip(body.body, body.body[1:], strict=False)
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr)
    }
    assert documented == {field.name for field in fields(cls)}


def test_choices_are_looked_at_in_python_too():
    with pytest.raises(ValueError, match=r"data.size is 'tiny', not one of full, small"):
        DataConfig(name="cluster", size="tiny")
    with pytest.raises(ValueError, match=r"trainer.precision is 'bf16', not one of 32, tf32, bf16-mixed"):
        TrainerConfig(precision="bf16")


def test_paths_may_be_pathlibs_and_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = ExperimentConfig.from_preset("custom", {"data.path": Path("~/own.csv"), "data.root": "~/data"})
    assert (config.data.path, config.data.root) == ("/home/me/own.csv", "/home/me/data")
