"""The tables of docs/results.md are those of the committed runs: every model has its row, and every row its model."""

import csv
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "results.md").read_text()


def _runs(suite: str) -> dict[str, list[dict]]:
    """Results by DATASET/MODEL, in the order of their seeds."""
    found = defaultdict(list)
    for path in sorted((ROOT / "results" / suite / "runs").glob("*/*/*/result.json")):
        found["/".join(path.parts[-4:-2])].append(json.loads(path.read_text()))
    return dict(found)


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its two first lines."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


def _spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


def _shares(runs: list[dict]) -> list[str]:
    """What all tables give of several seeds: the mean gap, and the mean share of zeros, if there are any to count."""
    zeros = [run["zero_share"] for run in runs if run["zero_share"] is not None]
    return [
        f"{statistics.mean(run['gap'] for run in runs):.3f}",
        f"{statistics.mean(zeros):.0%}".replace("%", " %") if zeros else "",
    ]


def _summary(runs: list[dict]) -> list[str]:
    scores = [_spread([run[split] for run in runs]) for split in ("val", "test")]
    return [*scores, *_shares(runs), f"{runs[0]['parameters']:,}"]


def _trial(runs: list[dict]) -> list[str]:
    """A row of the settings: every seed, and means."""
    each = ", ".join(f"{run['val']:.4f}" for run in runs)
    means = [f"{statistics.mean(run[split] for run in runs):.4f}" for split in ("val", "test")]
    return [each, *means, *_shares(runs)]


@pytest.mark.parametrize(
    ("suite", "heading", "row"),
    [
        ("lrgb", "Peptides-func, the paper's schedule", _summary),
        ("settings", "Settings of the sparse attention", _trial),
        ("tuned", "Settings found since the paper", _summary),
        ("gnn-plus", "In the settings of GCN+", _summary),
        ("gnn-benchmark", "MNIST, PATTERN and CLUSTER", _summary),
    ],
)
def test_tables_are_of_the_runs(suite, heading, row):
    expected = {model: row(runs) for model, runs in _runs(suite).items()}
    rows = _rows(heading)
    assert len(rows) == len(expected)
    for model, cells in expected.items():
        fitting = [found for found in rows if _in_order(cells, found)]
        assert len(fitting) == 1, f"{model} should have a row with {cells}"


def _in_order(cells: list[str], row: list[str]) -> bool:
    rest = iter(row)
    return all(any(cell == other for other in rest) for cell in cells)


def test_seeds_and_minutes_of_long_runs():
    by_scores = {" ".join(_summary(runs)[:2]): runs for runs in _runs("lrgb").values()}
    for row in _rows("Peptides-func, the paper's schedule"):
        runs = by_scores[f"{row[2]} {row[3]}"]
        minutes = sorted(run["seconds"] / 60 for run in runs)
        least, most = (f"{minutes[place]:.1f}" for place in (0, -1))
        assert int(row[1]) == len(runs), row[0]
        assert row[-1] == (least if least == most else f"{least} to {most}"), row[0]


def test_seeds_in_the_settings_of_gcn_plus():
    by_scores = {" ".join(_summary(runs)[:2]): runs for runs in _runs("gnn-plus").values()}
    for row in _rows("In the settings of GCN+"):
        assert int(row[1]) == len(by_scores[f"{row[2]} {row[3]}"]), row[0]


def test_the_readme_has_figures_of_that_page():
    section = (ROOT / "README.md").read_text().split("What our own runs gave so far")[1].split("\n## ")[0]
    figures = re.findall(r"0\.\d{4}(?: ± 0\.\d{4})?", section)
    assert len(figures) > 10
    assert [figure for figure in figures if figure not in PAGE] == []


def test_what_is_said_of_the_tuned_runs():
    runs = {model.split("/")[1]: run for model, (run,) in _runs("tuned").items()}
    minutes = [f"{runs[name]['seconds'] / 60:.1f}" for name in ("rwse", "dropout", "average", "narrow")]
    batch, *others = sorted(run["train"] for run in runs.values())
    assert batch == runs["batch"]["train"]
    words = " ".join(PAGE.split())
    assert "RWSE and dropout took {} and {} minutes".format(*minutes) in words
    assert "averaged weights and narrow heads {2} and {3} beside".format(*minutes) in words
    assert f"({batch:.2f}, the others {others[0]:.2f} to {others[-1]:.2f})" in words


def test_the_error_of_a_difference_on_mnist():
    shares = [
        run["test"] for model in ("sfi-potential", "dfi") for run in _runs("gnn-benchmark")[f"mnist/{model}"]
    ]
    error = (sum(share * (1 - share) for share in shares) / 10_000) ** 0.5
    assert f"10,000 images: the error of such a difference is about {error:.2%}".replace(
        "%", " %"
    ) in " ".join(PAGE.split())


def test_first_epochs_of_most_runs():
    """What docs/commands.md says of kernels that were compiled one after the other."""
    firsts = []
    for suite in ("lrgb", "gnn-benchmark"):
        for path in (ROOT / "results" / suite / "runs").glob("*/*/*/metrics.csv"):
            with path.open() as file:
                firsts.append(round(float(next(csv.DictReader(file))["seconds"])))
    page = " ".join((ROOT / "docs" / "commands.md").read_text().split())
    least, most = map(int, re.search(r"it made first epochs of (\d+) to (\d+) s", page).groups())
    compiled = [first for first in firsts if first >= least]
    assert (min(compiled), max(compiled)) == (least, most)
    assert len(compiled) > 0.7 * len(firsts)
    assert "as in most of the runs" in page


def test_how_long_a_run_takes():
    folder = ROOT / "results" / "peptides-func"
    result = json.loads((folder / "result.json").read_text())
    with (folder / "metrics.csv").open() as file:
        epochs = list(csv.DictReader(file))
    first, *others = (float(row["seconds"]) for row in epochs)
    step = 32 / statistics.median(float(row["graphs_per_second"]) for row in epochs)
    section = PAGE.split("\nHow long a run takes")[1].split("\n## ")[0]
    for text in (
        f"{result['seconds']:.1f} s for SFi-Former's {result['epochs']} epochs",
        f"{first:.1f} s for the first",
        f"{statistics.mean(others):.2f} s for each of the others",
        f"{340 * step:.2f} s for 340 steps, {1e3 * step:.2f} ms each",
        f"{result['val']:.4f} on the validation graphs and {result['test']:.4f} on the test graphs",
    ):
        assert text in " ".join(section.split())


def test_the_best_epochs_on_the_test_graphs():
    """What the page says of choosing epochs by the test graphs: of SFi-, DFi-Former with bounded scores, SFi-Former+."""
    found = []
    for model in ("sfi-potential", "dfi-bounded", "sfi-plus-potential"):
        best = []
        for path in (ROOT / "results/lrgb/runs/peptides-func" / model).glob("*/metrics.csv"):
            with path.open() as file:
                best.append(max(float(row["test"]) for row in csv.DictReader(file)))
        assert len(best) == 4
        found.append(f"{statistics.mean(best):.4f}")
    assert "would be {}, {} (bounded scores) and {} in the mean".format(*found) in " ".join(PAGE.split())


def test_what_is_said_of_runs_that_were_ended():
    def last(folder, epoch=27):
        with (ROOT / "results/settings" / folder / "metrics.csv").open() as file:
            return next(row for row in csv.DictReader(file) if row["epoch"] == str(epoch))

    ours, paper = (last(f"unfinished/{name}") for name in ("proximal", "paper-proximal"))
    exact = last("runs/peptides-func/sfi/seed-0")
    words = " ".join(PAGE.split())
    assert f"{float(ours['val']):.4f} and {float(paper['val']):.4f} after 27 of 60 epochs" in words
    zeros = [f"{float(row['zero_share']):.1%}" for row in (ours, paper)]
    assert f"{zeros[0][:-1]} and {zeros[1][:-1]} % of flows at zero" in words
    assert f"had {float(exact['val']):.4f} with the same seed" in words
