"""From a suite to the commands of its runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sfiformer.config import ExperimentConfig
from sfiformer.errors import UserError
from sfiformer.nn import SFiFormer, load_dense
from sfiformer.schema import as_text
from sfiformer.suites.plan import differences, plan, restoring, select
from sfiformer.suites.suite import read_suite, suite_names


def test_runs_are_the_products_once_each_and_sources_come_first(runs):
    names = list(runs)
    assert len(names) == 2 * 2 * 4 + 1  # dfi for plus is added; lam-2 has one seed on one dataset
    assert len(set(names)) == len(names)
    for name, run in runs.items():
        if run.model == "plus":
            assert run.needs == name.replace("plus", "dfi")
            assert names.index(run.needs) < names.index(name)


@pytest.mark.parametrize("name", suite_names())
def test_what_a_run_of_ours_starts_from_fits_it(name):
    runs = plan(read_suite(name))
    pairs = {(run.dataset, run.model): run for run in runs.values() if run.needs}
    for run in pairs.values():
        with torch.device("meta"):
            model, dense = SFiFormer(run.config.model), SFiFormer(runs[run.needs].config.model)
        sparse = run.config.model.attention == "sfi"
        assert ("friction" in str(load_dense(model, dense.state_dict()))) == sparse, run.name


def test_later_settings_win(suite):
    run = plan(suite, {"model.lam": 3.0, "trainer.epochs": 9})["cluster/lam-2/seed-0"]
    assert (run.config.model.lam, run.config.trainer.epochs, run.config.seed) == (3.0, 9, 0)
    assert run.config.data.size == "small"


def test_the_command_line_gives_the_same_settings(runs):
    from sfiformer.cli.options import parse

    for run in runs.values():
        _, preset, *rest = run.arguments(Path("out"))
        options = dict(zip(rest[::2], rest[1::2], strict=False))
        assert rest[-1] == "--resume"
        assert options["--out"] == f"out/runs/{run.name}"
        assert ("--init-from" in options) == (run.model == "plus")
        dotted = {key[2:]: parse(key[2:], text) for key, text in options.items() if key[2:] in run.settings}
        assert ExperimentConfig.from_preset(preset, dotted) == run.config


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (True, "true"), ([0.5, 1], "0.5,1"), (1e-5, "1e-05"), ("a b", "a b")]
)
def test_values_as_options(value, text):
    assert as_text(value) == text


def test_only_selects_by_part_or_pattern_with_what_they_start_from(runs):
    assert set(select(runs, ["pattern/plus/seed-1"])) == {"pattern/dfi/seed-1", "pattern/plus/seed-1"}
    assert {run.dataset for run in select(runs, ["cluster/*"]).values()} == {"cluster"}
    assert select(runs, []) == runs
    with pytest.raises(UserError, match="no run's name fits nothing; the names are like cluster/gps/seed-0"):
        select(runs, ["nothing"])


def test_only_what_makes_another_experiment_differs(runs):
    config = runs["cluster/sfi/seed-0"].config
    elsewhere = replace(config, data=replace(config.data, root="/elsewhere"))
    settled = replace(config, model=replace(config.model, edge_categories=(3,)))
    longer = replace(config, trainer=replace(config.trainer, epochs=4))
    assert differences(elsewhere, config) == []
    assert differences(settled, config) == []
    assert differences(longer, config) == ["trainer.epochs is now 3, was 4"]


def test_a_file_is_the_same_by_whatever_path(runs, tmp_path, monkeypatch):
    config = runs["cluster/sfi/seed-0"].config
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before, now, other = (
        replace(config, data=replace(config.data, path=path))
        for path in (str(tmp_path / "a.csv"), "../here/../a.csv", "a.csv")
    )
    assert differences(before, now) == []
    assert differences(before, other) == [f"data.path is now a.csv, was {tmp_path / 'a.csv'}"]


def test_a_number_that_is_no_more_is_a_change(runs):
    config = runs["cluster/sfi/seed-0"].config
    patient = replace(config, trainer=replace(config.trainer, patience=1))
    assert differences(patient, config) == ["trainer.patience is now null, was 1"]


def test_the_settings_that_bring_a_run_back(tmp_path):
    """A suite on a file of one's own, from before its split had a seed of its own."""
    text = "datasets: {own: {preset: custom}}\nmodels: {sfi: {settings: {data.path: a.csv}}}\nsettings: {SETTINGS}\n"
    text += "runs: [{name: a, title: A, datasets: [own], models: [sfi], seeds: [0, 1]}]\n"

    def planned(settings):
        file = tmp_path / "mine.yaml"
        file.write_text(f"title: Mine\n{text.replace('SETTINGS', settings)}")
        return plan(read_suite(str(file)))["own/sfi/seed-1"].config

    old, now = planned("data.split_seed: null, data.fractions: [0.7, 0.2, 0.1]"), planned("")
    assert differences(old, now)[1] == "data.split_seed is now 0, was 1"
    settings = restoring(old, now)
    assert settings == ["data.fractions: [0.7,0.2,0.1]", "data.split_seed: null"]
    assert planned(", ".join(settings)) == old


def test_what_others_start_from_has_to_be_dense(suite_file):
    suite_file.write_text(suite_file.read_text().replace("init_from: dfi", "init_from: sfi"))
    with pytest.raises(
        ValueError, match=r"models.plus.init_from: cluster/sfi/seed-0 has attention sfi; .* dfi"
    ):
        plan(read_suite(str(suite_file)))
