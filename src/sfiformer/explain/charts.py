"""The statistics of one or more runs as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sfiformer.explain.statistics import Statistics
from sfiformer.figures import COLOURS, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAR = 0.97  # of the pairs of nodes: how far out distances are drawn


def draw_statistics(statistics: Sequence[Statistics]) -> Figure:
    """Zero shares by layer and head, support by graph size, and mass by hop distance: a colour for each run."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(13, 4.2))
        zeros, support, reach = figure.subplots(1, 3)
        _draw_zeros(zeros, statistics)
        _draw_support(support, statistics)
        _draw_reach(reach, statistics)
        first = statistics[0]
        place = first.graphs[0].split("[")[0]
        figure.suptitle(
            f"{len(first.graphs)} graphs of {place}, {first.nodes.mean():.0f} nodes on average", fontsize=12
        )
    return figure


def _draw_zeros(axes: Axes, statistics: Sequence[Statistics]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for number, each in enumerate(statistics):
        layers, heads = each.zeros.shape
        # A little apart, so that heads and runs of like share do not hide each other.
        places = np.arange(1, layers + 1) + (number - (len(statistics) - 1) / 2) * 0.3  # [layers]
        apart = (np.arange(heads) - (heads - 1) / 2) * 0.2 / heads  # [heads]
        style: dict[str, Any] = {"color": COLOURS[number], "linewidths": 0, "alpha": 0.7}
        axes.scatter((places[:, None] + apart).ravel(), each.zeros.ravel(), s=30, **style)
        axes.plot(places, each.zeros.mean(1), "_-", ms=22, color=COLOURS[number], lw=0.8, label=each.name)
    axes.set_ylim(-0.03, 1.03)
    axes.margins(x=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("layer")
    axes.set_title("attention that is exactly zero\n(a dot for each head, a bar for their mean)", fontsize=10)
    axes.legend()


def _draw_support(axes: Axes, statistics: Sequence[Statistics]) -> None:
    most = max(int(each.nodes.max()) for each in statistics)
    axes.plot([0, most], [0, most], color="grey", linewidth=1, linestyle="--", label="all keys")
    for number, each in enumerate(statistics):
        keys = each.support.mean((1, 2))  # [G]
        axes.scatter(each.nodes, keys, s=14, color=COLOURS[number], alpha=0.6, linewidths=0, label=each.name)
    axes.set_xlim(0, None)
    axes.set_ylim(0, None)
    axes.set_xlabel("nodes of the graph")
    axes.set_title(
        "keys that a query draws from\n(a dot for each graph, mean of layers and heads)", fontsize=10
    )
    axes.legend()


def _draw_reach(axes: Axes, statistics: Sequence[Statistics]) -> None:
    from matplotlib.ticker import PercentFormatter

    shares = statistics[0].pairs
    end = int(np.searchsorted(shares[:-1].cumsum() / shares[:-1].sum(), FAR)) + 1
    hops, nowhere = np.arange(end), end * 1.08
    lines: list[tuple[np.ndarray, dict[str, Any]]] = [
        (shares[None], {"color": "grey", "linewidth": 1, "linestyle": "--", "label": "uniform attention"})
    ]
    lines += [
        (each.mass.mean(1), {"color": COLOURS[number], "label": each.name})  # [layers, hops]
        for number, each in enumerate(statistics)
    ]
    for by_layer, style in lines:
        mean, low, high = by_layer.mean(0), by_layer.min(0), by_layer.max(0)
        axes.plot(hops, mean[:end], marker="." if end < 20 else "", **style)
        axes.fill_between(hops, low[:end], high[:end], color=style["color"], alpha=0.2, linewidth=0)
        if shares[-1]:
            axes.errorbar(
                nowhere,
                mean[-1],
                [[mean[-1] - low[-1]], [high[-1] - mean[-1]]],
                fmt="s",
                ms=4,
                color=style["color"],
            )
    if shares[-1]:
        axes.text(nowhere, 0, "no\npath", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    axes.set_xlabel("hops from query to key")
    axes.set_title("attention by distance\n(mean of layers and heads, band: range of layers)", fontsize=10)
    axes.legend()
