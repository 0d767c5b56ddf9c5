"""Tables and figures, from run folders whose metrics are known."""

import csv
import json
import math
import statistics
from dataclasses import replace

import pytest

from sfiformer.data.source import digest
from sfiformer.errors import UserError
from sfiformer.suites.folder import SuiteFolder
from sfiformer.suites.launch import run_suite
from sfiformer.suites.pictures import curve_figure, gap_figure
from sfiformer.suites.plan import plan
from sfiformer.suites.report import report_suite
from sfiformer.suites.results import collect
from sfiformer.suites.suite import SuiteModel
from suite_folders import pretend

# Test metrics by model and seed: of CLUSTER all but one run, of PATTERN one.
TESTS = {"gps": (0.50, 0.54), "sfi": (0.60, 0.58), "plus": (0.55, None), "lam-2": (0.4, None)}


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> SuiteFolder:
    return SuiteFolder(tmp_path_factory.mktemp("reported"))


@pytest.fixture(scope="module")
def report(suite, runs, reported):
    fill(reported, runs)
    return report_suite(suite, reported.path)


def fill(folder, runs):
    for model, tests in TESTS.items():
        for seed, test in enumerate(tests):
            if test is not None:
                pretend(folder, runs[f"cluster/{model}/seed-{seed}"], test)
    record = folder.record("small")
    record.failed = {"cluster/plus/seed-1": "not finite: the loss"}
    folder.write(record)


def table(text: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_the_table_has_means_places_and_published_columns(report):
    rows = table(report.text)
    assert rows["model"] == ["CLUSTER, mean recall ↑: ours", "CLUSTER: published", "pattern, accuracy ↑: ours",
                             "pattern: published"]  # fmt: skip
    sd = statistics.stdev([0.50, 0.54])
    assert rows["GPS+Transformer"][:2] == [f"0.5200 ± {sd:.4f} (2nd)", "0.7802 ± 0.0018"]
    assert rows["SFi-Former"] == [
        "**0.5900 ± 0.0141** (1st)",
        "0.7828 ± 0.0015",
        "missing",
        "0.8674 ± 0.0017",
    ]
    assert rows["SFi-Former+"][0] == "0.5500 (1 of 2 seeds)"  # and no place
    assert rows["GCN"] == ["–", "0.6850 ± 0.0098", "–", "0.7189 ± 0.0033"]  # theirs alone
    assert "over 2 seeds" in report.text
    assert "Failed: cluster/plus/seed-1: not finite: the loss." in report.text
    assert "6 of the table's runs have not been finished." in report.text
    assert "[1] Published in the SFi-Former paper" in report.text


def test_the_files_are_named_and_there(report, reported):
    names = [path.name for path in report.files]
    stems = ("models-gap", "lam-lam")
    assert set(names) == {
        "report.md", "models.csv", "models.tex", "lam.csv", "lam.tex",
        *(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")),
    }  # fmt: skip
    assert {path.parent for path in report.files} == {reported.path / "report"}
    assert all(path.stat().st_size for path in report.files)
    text = (reported.path / "report" / "report.md").read_text()
    for stem in stems:
        assert f"({stem}.png)" in text


def test_csv_keeps_ours_and_theirs_in_columns_of_their_own(report, reported):
    with (reported.path / "report" / "models.csv").open(newline="") as file:
        lines = {(line["dataset"], line["model"]): line for line in csv.DictReader(file)}
    gps = lines["cluster", "GPS+Transformer"]
    assert float(gps["ours_test_mean"]) == pytest.approx(0.52)
    assert (gps["ours_place"], gps["seeds_finished"], gps["published_mean"]) == ("2", "2", "0.7802")
    assert float(gps["ours_zero_share"]) == 0.25
    gcn = lines["cluster", "GCN"]
    assert {gcn[key] for key in gcn if key.startswith("ours")} == {""}
    assert gcn["published_source"].startswith("Published in")
    assert lines["cluster", "SFi-Former+"]["ours_problems"] == "seed 1: not finite: the loss"


def test_latex_marks_places_and_is_balanced(report, reported):
    text = (reported.path / "report" / "models.tex").read_text()
    assert r"\first{0.5900 $\pm$ 0.0141}" in text
    assert r"\second{0.5200 $\pm$ 0.0283}" in text
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    assert {line.count("&") for line in body.splitlines()[1:] if line} == {4}
    assert text.count("{") == text.count("}")
    assert r"$\lambda^*$ = 2" in (reported.path / "report" / "lam.tex").read_text()


def test_runs_of_other_settings_do_not_count(suite, runs, folder):
    fill(folder, runs)
    run = runs["cluster/sfi/seed-0"]
    pretend(folder, run, 0.99, replace(run.config, trainer=replace(run.config.trainer, epochs=100)))
    text = report_suite(suite, folder.path).text
    assert table(text)["SFi-Former"][0] == "0.5800 (1 of 2 seeds)"
    assert "cluster/sfi/seed-0: the settings have changed: trainer.epochs is now 3, was 100" in text


def test_no_figure_is_made_of_two_metrics(suite, runs, folder):
    fill(folder, runs)
    pretend(folder, runs["cluster/sfi/seed-1"], 0.98, metric="accuracy")
    text = report_suite(suite, folder.path).text
    assert table(text)["SFi-Former"][0] == "0.6000 (1 of 2 seeds)"
    assert "cluster/sfi/seed-1: judged by accuracy, and others by mean_recall" in text


def test_overrides_of_the_runs_are_those_of_the_report(suite, folder):
    folder.path.mkdir()
    record = folder.record("small")
    record.overrides = {"trainer.epochs": 7}
    folder.write(record)
    report_suite(suite, folder.path)
    assert "All runs with `--trainer.epochs 7`." in (folder.path / "report" / "report.md").read_text()


def test_a_refusal_costs_no_results(suite, runs, folder, monkeypatch):
    monkeypatch.setattr("sfiformer.suites.launch.LocalEngine", None)  # nothing is to be started
    fill(folder, runs)
    before = report_suite(suite, folder.path).text
    written = (folder.path / "suite.json").read_text()
    with pytest.raises(UserError) as refusal:
        run_suite(suite, folder.path, only=["pattern"], overrides={"trainer.epochs": 5})
    assert str(refusal.value) == (
        f"the runs in {folder.path} were begun with the suite's own settings; cluster/gps/seed-0 would be another "
        "(trainer.epochs is now 5, was 3), as would 5 more: give the same settings again, or choose another --out"
    )
    assert (folder.path / "suite.json").read_text() == written
    assert report_suite(suite, folder.path).text == before


def test_what_is_no_folder_of_the_suite(suite, folder):
    with pytest.raises(UserError, match=r"sfi suite run .*small.yaml makes it"):
        report_suite(suite, folder.path)
    folder.path.mkdir()
    folder.write(folder.record("other"))
    with pytest.raises(UserError, match="holds the runs of the suite other, not of small"):
        report_suite(suite, folder.path)


def test_settings_are_judged_by_the_validation_graphs(suite, runs, folder):
    fill(folder, runs)
    by_val = replace(suite, groups=tuple(replace(group, split="val") for group in suite.groups))
    report = report_suite(by_val, folder.path)
    expected = folder.run("cluster/lam-2/seed-0").result()["val"]
    rows = table(report.text)
    assert rows["model"][0] == "CLUSTER, mean recall ↑ (validation): ours"
    with (folder.path / "report" / "lam.csv").open() as file:
        lines = {line["model"]: line for line in csv.DictReader(file)}
    assert float(lines["SFi-Former, λ* = 2"]["ours_val_mean"]) == expected


def about(folder, run, **values):
    (folder.run(run.name).path / "about.json").write_text(json.dumps(values))


def test_a_run_that_started_from_another_does_not_count(suite, runs, folder):
    fill(folder, runs)
    plus, gps = runs["cluster/plus/seed-0"], runs["cluster/gps/seed-0"]
    about(folder, plus, init_from="/elsewhere/runs/cluster/dfi/seed-0: loaded 9 tensors; started fresh: none")
    about(folder, gps, versions={})
    assert folder.objections(plus) == folder.objections(gps) == []
    about(folder, plus, init_from="out/runs/cluster/dfi-2/seed-0: loaded 9 tensors")
    expected = "init_from is now cluster/dfi/seed-0, was cluster/dfi-2/seed-0"
    assert (
        f"cluster/plus/seed-0: the settings have changed: {expected}."
        in report_suite(suite, folder.path).text
    )
    about(folder, plus, versions={})
    assert folder.objections(plus)[0].endswith("was nothing")
    about(folder, gps, init_from="out/runs/cluster/dfi/seed-0: loaded 9 tensors")
    assert folder.objections(gps)[0].endswith("init_from is now nothing, was cluster/dfi/seed-0")


def test_runs_on_a_file_that_was_changed_since_do_not_count(runs, folder, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text("one")
    run = runs["cluster/gps/seed-0"]
    run = replace(run, config=replace(run.config, data=replace(run.config.data, path=str(own))))
    pretend(folder, run, 0.5)
    about(folder, run, data_sha256=digest(own))
    assert folder.objections(run) == []
    own.write_text("another")
    assert f"{own} was changed since the run" in folder.objections(run)[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("result.json", '{"metric": "acc', "result.json is damaged, it is not readable JSON"),
        ("result.json", "{}", "result.json is damaged: it has no metric"),
        ("metrics.jsonl", "\0\0\n", "metrics.jsonl is damaged"),
        ("config.yaml", None, "has a result, but no settings"),
        ("config.yaml", "model: [1", "config.yaml"),
    ],
)
def test_a_damaged_file_costs_its_run_alone(suite, runs, folder, name, text, message):
    fill(folder, runs)
    path = folder.run("cluster/sfi/seed-0").path / name
    path.unlink() if text is None else path.write_text(text)
    report = report_suite(suite, folder.path).text
    assert table(report)["SFi-Former"][0] == "0.5800 (1 of 2 seeds)"
    (line,) = [line for line in report.splitlines() if "cluster/sfi/seed-0" in line]
    assert message in line


@pytest.mark.parametrize("part", ["overrides", "failed"])
def test_a_damaged_record_is_named(suite, folder, part):
    folder.path.mkdir()
    (folder.path / "suite.json").write_text(json.dumps({"suite": "small", part: 3}))
    with pytest.raises(UserError, match=r"suite.json is damaged: .*; remove it, the runs beside it are kept"):
        report_suite(suite, folder.path)


def test_figures_of_several_published_tables_stand_in_the_rows_of_our_models(suite, runs, folder):
    fill(folder, runs)
    group = replace(suite.groups[0], published=("lrgb", "gnn-benchmark"))
    text = report_suite(replace(suite, groups=(group,)), folder.path).text
    assert table(text)["SFi-Former"][1] == "0.7828 ± 0.0015 [2]"
    assert text.count("| SFi-Former ") == 1


def test_marks_of_markdown_and_latex_in_a_label_are_text(suite, runs, folder):
    fill(folder, runs)
    label = r"a|b {x} $y$ ~z^2 <w> \v"
    odd = replace(suite, models=suite.models | {"gps": replace(suite.models["gps"], label=label)})
    report = report_suite(odd, folder.path)
    (line,) = [line for line in report.text.splitlines() if "0.5200" in line]
    assert line.startswith(r"| a\|b {x} $y$")
    tex = (folder.path / "report" / "models.tex").read_text()
    assert (
        r"a|b \{x\} \$y\$ \textasciitilde{}z\textasciicircum{}2 \textless{}w\textgreater{} \textbackslash{}v"
        in tex
    )


def test_a_curve_through_zero_and_infinity_and_more_gaps_than_colours(suite, runs, folder):
    models = {f"lam-{lam}": SuiteModel(f"λ* = {lam}", settings={"model.lam": lam}) for lam in (0.0, 0.5, 2.0)}
    models |= {
        f"alpha-{a}": SuiteModel(f"α = {a}", settings={"model.alpha": a}) for a in (0.1, 1.0, math.inf)
    }
    models |= {"two": SuiteModel("a label of two lines at least in any legend that has room for it")}
    curves = {key: [name for name in models if name.startswith(key)] for key in ("lam", "alpha")}
    group = replace(
        suite.groups[1],
        models=tuple(models),
        gap=tuple(models),
        curves={f"model.{key}": names for key, names in curves.items()},
    )
    odd = replace(suite, models=suite.models | models, groups=(group,))
    planned = plan(odd)
    for place, name in enumerate(models):
        pretend(folder, planned[f"cluster/{name}/seed-0"], 0.3 + 0.1 * place)
    results = collect(odd, group, planned, folder, folder.record("small"))
    for key, ticks in (("model.lam", ["0", "0.5", "2"]), ("model.alpha", ["0.1", "1", "∞"])):
        top, bottom = curve_figure(results, key, planned).axes
        for axis in (top, bottom):
            assert [label.get_text() for label in axis.get_xticklabels()] == ticks
        assert top.lines[0].get_xdata().tolist() == [0, 1, 2]
    (axis,) = gap_figure(results, folder).axes
    looks = {(line.get_color(), line.get_linestyle()) for line in axis.lines[:7]}
    assert len(looks) == len(axis.get_legend().get_texts()) == 7
