"""Tables and figures, from run folders whose metrics are known."""

import csv
import statistics
from dataclasses import replace

import pytest

from sfiformer.errors import UserError
from sfiformer.suites.folder import SuiteFolder
from sfiformer.suites.launch import run_suite
from sfiformer.suites.report import report_suite
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
    with pytest.raises(UserError, match="sfi suite run small makes it"):
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
