"""Reading suites: what comes with the package, and mistakes in one's own."""

import pytest
import yaml

from sfiformer.suites.plan import places, plan
from sfiformer.suites.published import read_published
from sfiformer.suites.suite import read_suite, suite_names

NAMES = ["ablation", "generalization", "gnn-benchmark", "gnn-plus", "lrgb", "quick", "settings", "tuned"]


def test_these_suites_come_with_the_package():
    assert suite_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_a_shipped_suite_is_one(name):
    suite = read_suite(name)
    runs = plan(suite)  # builds the settings of every run, strictly
    assert len(runs) == len(places(suite))
    for group in suite.groups:
        for table in map(read_published, group.published):
            assert set(group.datasets) <= set(table.metrics)
            # The paper's own models are matched by their labels.
            labels = {suite.models[model].label for model in group.models}
            assert {"SFi-Former", "GPS+Transformer"} <= labels


def test_the_ablation_has_the_paper_s_values():
    configs = {run.model: run.config.model for run in plan(read_suite("ablation")).values()}
    default = configs["sfi"]
    assert (default.lam, default.alpha, default.solver, default.friction) == (1.0, 0.1, "exact", "learned")
    assert {config.lam for config in configs.values()} == {0.5, 1, 2, 5}
    assert {config.alpha for config in configs.values()} == {0.01, 0.1, 0.5, 1}
    assert not configs["sp"].adjacency
    assert configs["adjacency"].attention == "adjacency"
    assert configs["tied"].friction == "tied"
    assert configs["proximal"].solver == "proximal"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("title:", "titel:", "there is no key 'titel'; did you mean 'title'?"),
        ("seeds: [0, 1]", "seed: [0, 1]", "runs[0]: there is no key 'seed'; did you mean 'seeds'?"),
        ("init_from: dfi", "init: dfi", "models.plus: there is no key 'init'; did you mean 'init_from'?"),
        ("init_from: dfi", "init_from: dif", "models.plus.init_from: there is no 'dif'; did you mean 'dfi'?"),
        (
            "models: [gps, sfi, plus]",
            "models: [gsp]",
            "runs[0].models: there is no 'gsp'; did you mean 'gps'?",
        ),
        ("gap: [gps, sfi]", "gap: [dfi]", "runs[0].gap: there is no 'dfi'; did you mean 'sfi'?"),
        (
            "seeds: [0, 1]",
            "seeds: [0, 1], curves: {model.lm: [gps]}",
            "runs[0].curves: there is no 'model.lm'; did you mean 'model.lam'?",
        ),
        (
            "published: [gnn-benchmark]",
            "published: [lrbg]",
            "runs[0].published: there is no 'lrbg'; did you mean 'lrgb'?",
        ),
        ("seeds: [0, 1]", "seeds: [zero]", "runs[0]: seeds[0] must be a whole number"),
        ("seeds: [0, 1]", "seeds: []", "runs[0].seeds must be a list of at least one"),
        ("name: lam", "name: models", "runs[0].name is 'models', as that of another entry"),
        ("lam-2: {label", "a/b: {label", "models: 'a/b' is to name a folder"),
        ("cluster: {label: CLUSTER}", "cluster: [1]", "datasets.cluster must be a mapping"),
        ("runs:", "runs: {}\nnone:", "there is no key 'none'"),
    ],
)
def test_a_mistake_names_its_place(suite_file, before, after, message):
    text = suite_file.read_text()
    assert before in text
    suite_file.write_text(text.replace(before, after))
    with pytest.raises(ValueError, match=r"small\.yaml: ") as error:
        read_suite(str(suite_file))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("model.lam: 2", "model.lm: 2", "models.lam-2.settings: there is no key 'model.lm'"),
        ("model.lam: 2", "seed: 2", "models.lam-2.settings: seed is 2, but seeds are set by"),
        ("data.size: small", "data.size: tiny", "small.yaml: settings: data.size is 'tiny', not one of"),
    ],
)
def test_a_wrong_setting_names_its_place(suite_file, before, after, message):
    suite_file.write_text(suite_file.read_text().replace(before, after))
    with pytest.raises(ValueError, match="settings") as error:
        plan(read_suite(str(suite_file)))
    assert message in str(error.value)


def test_an_unknown_preset_names_its_place(suite_file):
    text = suite_file.read_text().replace("cluster: {label: CLUSTER}", "cluster: {preset: clutser}")
    suite_file.write_text(text)
    message = r"small\.yaml: datasets\.cluster\.preset: there is no preset 'clutser'; did you mean 'cluster'"
    with pytest.raises(ValueError, match=message):
        plan(read_suite(str(suite_file)))


def test_paths_in_a_file_are_from_its_folder(suite_file, monkeypatch, tmp_path):
    text = yaml.safe_load(suite_file.read_text())
    text["settings"] |= {"data.path": "graphs.jsonl", "data": {"root": "cache"}}
    text["datasets"]["pattern"] = {"preset": "own.yaml", "settings": {"data.path": "/elsewhere/graphs.jsonl"}}
    text["models"]["sfi"]["settings"] = {"data.mirror": "https://example.org"}
    suite_file.write_text(yaml.safe_dump(text))
    suite_file.with_name("own.yaml").write_text("base: pattern\n")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    runs = plan(read_suite(f"../{suite_file.name}"), {"data.mirror": "zips"})
    data = runs["cluster/sfi/seed-0"].config.data
    assert (data.path, data.root, data.mirror) == ("../graphs.jsonl", "../cache", "zips")
    assert runs["pattern/gps/seed-0"].preset == "../own.yaml"
    assert runs["pattern/gps/seed-0"].config.data.path == "/elsewhere/graphs.jsonl"


def test_published_figures_are_the_paper_s():
    table = read_published("lrgb")
    assert str(table.figures["SFi-Former"]["pascalvoc-sp"]) == "0.4737 ± 0.0096"
    assert str(table.figures["SFi-Former+"]["coco-sp"]) == "0.3991"  # a single run
    assert "coco-sp" not in table.figures["SPN"]
    assert str(read_published("ablation").figures["SFi-Former, λ* = 5"]["peptides-func"]) == "0.7025 ± 0.0019"
    with pytest.raises(ValueError, match="did you mean 'lrgb'"):
        read_published("lrbg")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "label: SFi-Former}",
            "label: GPS+Transformer}",
            r"runs\[0\].models: their labels: 'GPS\+Transformer' stands",
        ),
        ("seeds: [0, 1]", "seeds: [0, 0]", r"runs\[0\].seeds: 0 stands there 2 times"),
        ("models: [gps, sfi, plus]", "models: [gps, gps]", r"runs\[0\].models: 'gps' stands there 2 times"),
        (
            "curves: {model.lam:",
            "curves: {model.attention:",
            "against a number, which model.attention is not",
        ),
        (
            "curves: {model.lam:",
            "curves: {trainer.patience:",
            "against a number, which trainer.patience is not",
        ),
        ("curves: {model.lam:", "curves: {model:", "against a number, which model is not"),
    ],
)
def test_what_no_table_or_curve_can_be_made_of_is_refused_before_any_training(suite_file, old, new, message):
    text = suite_file.read_text()
    assert old in text
    suite_file.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_suite(str(suite_file))


def test_a_file_that_is_called_without_its_ending_is_named(suite_file, monkeypatch):
    monkeypatch.chdir(suite_file.parent)
    with pytest.raises(ValueError, match=r"there is no suite 'small'; did you mean 'small.yaml'"):
        read_suite("small")


def test_paths_in_a_file_are_from_its_folder_or_from_home(suite_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    text = suite_file.read_text()
    for given, expected in (
        ("~/data", "/home/me/data"),
        ("data", str(suite_file.parent / "data")),
        ("https://example.org/data", "https://example.org/data"),
    ):
        suite_file.write_text(
            text.replace("{data.size: small,", f"{{data.size: small, data.mirror: {given!r},")
        )
        assert read_suite(str(suite_file)).settings["data"]["mirror"] == expected


def test_a_label_is_one_line(suite_file):
    suite_file.write_text(suite_file.read_text().replace("label: SFi-Former}", 'label: "SFi-\\n  Former"}'))
    assert read_suite(str(suite_file)).models["sfi"].label == "SFi- Former"
