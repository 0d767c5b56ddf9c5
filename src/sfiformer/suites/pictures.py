"""The figures of a report: the train-test gap over the epochs, and the metric against a setting."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from sfiformer.figures import COLOURS, styled
from sfiformer.suites.folder import SuiteFolder
from sfiformer.suites.plan import Run, run_name
from sfiformer.suites.published import Figure as Mean
from sfiformer.suites.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SYMBOLS = {"model.lam": "λ*", "model.alpha": "α"}


def gap_figure(results: Results, folder: SuiteFolder) -> Figure | None:
    """How far the training metric is ahead of the test's, epoch by epoch; None where no run is finished."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in results.rows if row.model in results.group.gap]
    panels = [dataset for dataset in results.labels if any(row.ours[dataset].results for row in rows)]
    if not panels:
        return None
    with styled():
        figure = Figure(figsize=(1 + 3.6 * len(panels), 3.2))
        for axis, dataset in zip(_axes(figure, 1, len(panels))[0], panels, strict=True):
            for (style, colour), row in zip(product(("-", "--", ":", "-."), COLOURS), rows, strict=False):
                curves = [
                    _gaps(folder, run_name(dataset, str(row.model), seed), result["higher_is_better"])
                    for seed, result in row.ours[dataset].results.items()
                ]
                _draw_band(axis, curves, f"{_wrapped(row.label)} ({_seeds(len(curves))})", colour, style)
            axis.axhline(0, color="grey", linewidth=0.8, zorder=0)
            axis.set_title(results.labels[dataset])
            axis.set_xlabel("epoch")
            axis.set_ylabel(f"train-test gap, {results.metrics[dataset][:-2]}")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.legend(loc="best", fontsize=9)
    return figure


def curve_figure(results: Results, key: str, runs: Mapping[str, Run]) -> Figure | None:
    """The metric, and below it the share of zero attention, against a setting; None without runs."""
    from matplotlib.figure import Figure

    chosen = [row for row in results.rows if row.model in results.group.curves[key]]
    panels = [dataset for dataset in results.labels if any(row.ours[dataset].figure() for row in chosen)]
    if not panels:
        return None
    with styled():
        figure = Figure(figsize=(1 + 3.4 * len(panels), 5.0))
        axes = _axes(figure, 2, len(panels))
        for column, dataset in enumerate(panels):
            seed = results.group.seeds[0]
            value = {
                row.label: float(runs[run_name(dataset, str(row.model), seed)].config.settings()[key])
                for row in chosen
            }
            rows = sorted(chosen, key=lambda row: value[row.label])
            ticks = sorted(set(value.values()))
            logarithmic = all(0 < tick < math.inf for tick in ticks)  # else one step from each to the next
            at = value if logarithmic else {label: ticks.index(tick) for label, tick in value.items()}
            _draw_curve(axes[0][column], rows, at, dataset)
            _draw_zeros(axes[1][column], rows, at, dataset)
            axes[0][column].set_title(results.labels[dataset])
            axes[0][column].set_ylabel(
                f"{results.group.split} {results.metrics[dataset]}".replace(" (validation)", "")
            )
            axes[1][column].set_ylabel("zero attention")
            for axis in (axes[0][column], axes[1][column]):
                axis.set_xscale("log" if logarithmic else "linear")
                axis.set_xticks(sorted(set(at.values())), [f"{tick:g}".replace("inf", "∞") for tick in ticks])
                axis.minorticks_off()
                axis.set_xlabel(SYMBOLS.get(key, key))
            axes[0][column].legend(loc="best", fontsize=9)
        figure.align_ylabels()
    return figure


def _draw_curve(axis: Axes, rows: Sequence[Row], at: Mapping[str, float], dataset: str) -> None:
    """Ours as a solid line, what is published as a dashed one with open marks."""
    ours = [(at[row.label], figure) for row in rows if (figure := row.ours[dataset].figure())]
    theirs = [(at[row.label], row.published[dataset]) for row in rows if dataset in row.published]
    seeds = max(len(row.ours[dataset].values(row.ours[dataset].split)) for row in rows)
    for points, label, style in (
        (ours, f"ours ({_seeds(seeds)})", {"color": COLOURS[0], "fmt": "o-"}),
        (theirs, "published", {"color": "grey", "fmt": "s--", "markerfacecolor": "white"}),
    ):
        if points:
            axis.errorbar(
                [x for x, _ in points],
                [figure.mean for _, figure in points],
                yerr=_spread(points),
                label=label,
                capsize=3,
                **style,  # type: ignore[arg-type]
            )


def _draw_zeros(axis: Axes, rows: Sequence[Row], at: Mapping[str, float], dataset: str) -> None:
    from matplotlib.ticker import PercentFormatter

    points = [(at[row.label], figure) for row in rows if (figure := row.ours[dataset].figure("zero_share"))]
    axis.errorbar(
        [x for x, _ in points],
        [figure.mean for _, figure in points],
        yerr=_spread(points),
        color=COLOURS[2],
        fmt="o-",
        capsize=3,
    )
    axis.set_ylim(0, 1.2 * max((figure.mean + (figure.sd or 0) for _, figure in points), default=0) or 1)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))


def _draw_band(axis: Axes, curves: Sequence[Sequence[float]], label: str, colour: str, style: str) -> None:
    """The mean over the seeds, and a band of one standard deviation, over the epochs that all seeds have."""
    if not curves:
        return
    columns = list(zip(*curves, strict=False))
    epochs = range(1, len(columns) + 1)
    means = [statistics.fmean(column) for column in columns]
    marker = "o" if len(columns) < 20 else ""
    axis.plot(epochs, means, style, color=colour, label=label, marker=marker, markersize=4)
    if len(curves) > 1:
        spread = [statistics.stdev(column) for column in columns]
        low = [mean - sd for mean, sd in zip(means, spread, strict=True)]
        high = [mean + sd for mean, sd in zip(means, spread, strict=True)]
        axis.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)


def _gaps(folder: SuiteFolder, name: str, higher_is_better: bool) -> list[float]:
    """Positive where the model is better on what it was trained on."""
    sign = 1 if higher_is_better else -1
    epochs = [record for record in folder.epochs(name) if None not in (record["train"], record["test"])]
    return [sign * (record["train"] - record["test"]) for record in epochs]


def _spread(points: Sequence[tuple[float, Mean]]) -> list[float] | None:
    """Error bars, where there is a standard deviation at all."""
    if all(figure.sd is None for _, figure in points):
        return None
    return [figure.sd or 0.0 for _, figure in points]


def _axes(figure: Figure, rows: int, columns: int) -> list[list[Axes]]:
    return figure.subplots(rows, columns, squeeze=False).tolist()


def _wrapped(label: str) -> str:
    """A label of a legend, which a long line would leave no room beside."""
    return textwrap.fill(label, 32)


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count != 1 else ''}"
