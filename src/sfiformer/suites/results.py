"""What came of a suite's runs: means and standard deviations over seeds, ranks, what is missing and why."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sfiformer.suites.folder import Record, SuiteFolder
from sfiformer.suites.plan import Run, run_name
from sfiformer.suites.published import Figure, Published, read_published
from sfiformer.suites.suite import Group, Suite

ABBREVIATIONS = {"f1": "F1", "ap": "AP", "mae": "MAE", "mrr": "MRR", "auc": "AUC", "roc": "ROC"}


@dataclass(frozen=True)
class Cell:
    """The runs of one model on one dataset."""

    seeds: tuple[int, ...]
    """Those that were asked for."""
    results: dict[int, dict[str, Any]]
    """What result.json holds, by seed, of the finished runs."""
    problems: dict[int, str]
    """Why the others have none, by seed: "missing", or the reason of a failure."""
    split: str = "test"
    """The graphs whose metric counts."""

    def values(self, key: str) -> list[float]:
        """A figure of the finished runs, where it is defined."""
        found = [result.get(key) for result in self.results.values()]
        return [value for value in found if value is not None]

    def figure(self, key: str | None = None) -> Figure | None:
        """Mean and standard deviation (n − 1) over the seeds, of the metric by default."""
        values = self.values(key or self.split)
        if not values:
            return None
        return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    @property
    def whole(self) -> bool:
        """Whether every seed has the metric."""
        return len(self.values(self.split)) == len(self.seeds)


@dataclass
class Row:
    """A model's line in a table: our figures and, apart from them, published ones."""

    label: str
    model: str | None
    """None for a model that only others have figures of."""
    ours: dict[str, Cell] = field(default_factory=dict)
    published: dict[str, Figure] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    """Which of the table's sources each of them is from."""


@dataclass(frozen=True)
class Results:
    """A group of a suite as a table."""

    group: Group
    labels: dict[str, str]
    """Of the datasets, in order."""
    metrics: dict[str, str]
    """Of the datasets: the metric, with ↑ or ↓ for what is better; "" where nothing is known yet."""
    rows: list[Row]
    sources: list[str]

    def compared(self, dataset: str) -> bool:
        """Whether there are published figures for the dataset."""
        return any(dataset in row.published for row in self.rows)

    def ranks(self, dataset: str) -> dict[str, int]:
        """The places of the best three of our models, among those with all their seeds."""
        means = {
            row.label: figure.mean
            for row in self.rows
            if dataset in row.ours and row.ours[dataset].whole and (figure := row.ours[dataset].figure())
        }
        if len(means) < 2:
            return {}
        worse = -1 if "↓" in self.metrics[dataset] else 1
        places = {
            label: 1 + sum(worse * other > worse * mean for other in means.values())
            for label, mean in means.items()
        }
        return {label: place for label, place in places.items() if place <= 3}


def collect(
    suite: Suite, group: Group, runs: Mapping[str, Run], folder: SuiteFolder, record: Record
) -> Results:
    """Read the run folders of a group."""
    rows = []
    for model in group.models:
        row = Row(suite.models[model].label, model)
        for dataset in group.datasets:
            row.ours[dataset] = _cell(dataset, model, group, runs, folder, record)
        rows.append(row)
    for dataset in group.datasets:
        _require_one_metric([row.ours[dataset] for row in rows])
    tables = [read_published(name) for name in group.published]
    _add_published(rows, tables, group)
    return Results(
        group=group,
        labels={dataset: suite.datasets[dataset].label for dataset in group.datasets},
        metrics={dataset: _metric(dataset, rows, tables, group) for dataset in group.datasets},
        rows=rows,
        sources=[table.source for table in tables],
    )


def _cell(
    dataset: str,
    model: str,
    group: Group,
    runs: Mapping[str, Run],
    folder: SuiteFolder,
    record: Record,
) -> Cell:
    results, problems = {}, {}
    for seed in group.seeds:
        name = run_name(dataset, model, seed)
        if objections := folder.objections(runs[name]):
            problems[seed] = objections[0]
        elif folder.finished(name):
            results[seed] = folder.result(name)
            if results[seed].get(group.split) is None:
                problems[seed] = f"the {group.split} metric is not defined"
        else:
            problems[seed] = record.failed.get(name, "missing")
    return Cell(tuple(group.seeds), results, problems, group.split)


def _require_one_metric(cells: Sequence[Cell]) -> None:
    """Results that were judged by another metric than the first ones count as problems: no figure is made of both."""
    names = [result["metric"] for cell in cells for result in cell.results.values()]
    for cell in cells:
        for seed, result in list(cell.results.items()):
            if result["metric"] != names[0]:
                cell.problems[seed] = f"judged by {result['metric']}, and others by {names[0]}"
                del cell.results[seed]


def _add_published(rows: list[Row], tables: Sequence[Published], group: Group) -> None:
    """The published figures of our models go to their rows, of each dataset those of the first table that has them; others,
    and models that we do not run, get rows above ours."""
    own = {row.label: row for row in rows}
    others = []
    for number, table in enumerate(tables):
        for label, figures in table.figures.items():
            shown = {dataset: figures[dataset] for dataset in group.datasets if dataset in figures}
            row = own.get(label)
            if row is None or row.published.keys() & shown.keys():
                row = Row(label, None)
                if shown:
                    others.append(row)
            row.published |= shown
            row.sources |= dict.fromkeys(shown, number)
    rows[:0] = others


def _metric(dataset: str, rows: Sequence[Row], tables: Sequence[Published], group: Group) -> str:
    graphs = " (validation)" if group.split == "val" else ""
    for row in rows:
        for result in row.ours[dataset].results.values() if dataset in row.ours else ():
            words = (ABBREVIATIONS.get(word, word) for word in result["metric"].split("_"))
            return f"{' '.join(words)} {'↑' if result['higher_is_better'] else '↓'}{graphs}"
    return next((table.metrics[dataset] for table in tables if dataset in table.metrics), "")
