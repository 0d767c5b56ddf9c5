"""The paper's attention figure: matrices of what one graph's attention is made of, and how the iteration nears it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sfiformer.explain.record import GraphRecord, LayerRecord
from sfiformer.figures import COLOURS, map_colours, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

SHOWN = (1, 5, 10, 50, 200)  # iterations whose flows are drawn
MEASURED = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # and whose distance to the exact flows is
SIZE = 2.3  # inches of a map
LOW = 0.01  # quantile of the positive values at which the colours begin


class Column(NamedTuple):
    """One quantity of all heads."""

    title: str
    values: Tensor  # [heads, n, n]
    scale: str  # columns of the same scale share their colours
    label: str = ""  # of the colours


def draw_maps(record: GraphRecord, layer: int, heads: Sequence[int] | None = None) -> Figure:
    """Resistance, friction, flow, and flow beside Ã of one layer: a row for each head, a column for each quantity.

    Colours are logarithmic, exact zeros are white. What a layer has not (friction in a dense one, Ã in a softmax one) is
    left out. Nodes stand in the data's order; where each has a class, by class, with lines between.

    Args:
        layer: numbered from 0.
        heads: numbered from 0; None for all.
    """
    from matplotlib.figure import Figure

    seen = record.layers[layer]
    heads = range(seen.heads) if heads is None else heads
    columns = _columns(record, layer)
    order, borders = _order(record)
    with styled():
        figure = Figure(figsize=(SIZE * len(columns) + 0.6, SIZE * len(heads) + 1.5))
        grid = figure.subplots(len(heads), len(columns), squeeze=False)
        norms = _norms(columns, heads)
        for place, column in enumerate(columns):
            for axes, head in zip(grid[:, place], heads, strict=True):
                values = column.values[head][order][:, order]
                image = _draw(axes, values, norms[column.scale], borders)
                axes.set_title(zeros(values) if column.scale == "flow" else "", fontsize=10)
            _name(grid[0, place], column.title)
            bar = figure.colorbar(
                image, ax=grid[:, place], location="bottom", pad=0.02, aspect=22, extend="min"
            )
            _tick(bar, *image.get_clim())
            bar.set_label(column.label, fontsize=9)
        for axes, head in zip(grid[:, 0], heads, strict=True):
            axes.set_ylabel(f"head {head + 1}\nquery node")
        for axes in grid[-1]:
            axes.set_xlabel("key node")
        figure.suptitle(_title(record, layer), fontsize=12, parse_math=False)
    return figure


def draw_iterations(record: GraphRecord, layer: int, heads: Sequence[int] | None = None) -> Figure:
    """The flows along the paper's iteration, the exact ones last, and the distance to those, ‖Z − Z*‖/‖Z*‖.

    Args:
        layer: numbered from 0; one that `LayerRecord.has_proximal`.
        heads: numbered from 0; None for all.
    """
    from matplotlib.figure import Figure

    seen = record.layers[layer]
    heads = list(range(seen.heads) if heads is None else heads)
    exact = seen.flows()
    along = {count: seen.proximal(count) for count in sorted({*MEASURED, *SHOWN})}
    columns = [Column(f"{count} iteration{'s' * (count > 1)}", along[count], "flow") for count in SHOWN]
    columns.append(Column("exact", exact, "flow"))
    order, borders = _order(record)
    with styled():
        figure = Figure(figsize=(SIZE * len(columns) + 0.6, SIZE * len(heads) + 3.9))
        (above,), (below,) = figure.subfigures(
            2, 1, squeeze=False, height_ratios=[SIZE * len(heads) + 1.2, 2.7]
        )
        grid = above.subplots(len(heads), len(columns), squeeze=False)
        norm = _norms(columns[-1:], heads)["flow"]
        for place, column in enumerate(columns):
            for axes, head in zip(grid[:, place], heads, strict=True):
                values = column.values[head][order][:, order]
                image = _draw(axes, values.abs(), norm, borders)  # an iterate may be negative on its way
                said = zeros(values)
                if place < len(SHOWN):
                    said = f"distance {distance(column.values[head], exact[head]):.2f}; {said}"
                axes.set_title(said, fontsize=10)
            _name(grid[0, place], column.title)
        bar = above.colorbar(
            image, ax=grid, location="right", pad=0.01, aspect=20 * len(heads), extend="both"
        )
        bar.set_label("|Z|, white: exactly zero", fontsize=9)
        for axes, head in zip(grid[:, 0], heads, strict=True):
            axes.set_ylabel(f"head {head + 1}\nquery node")
        for axes in grid[-1]:
            axes.set_xlabel("key node")
        _draw_distances(below.subplots(), along, exact, heads)
        figure.suptitle(_title(record, layer), fontsize=12, parse_math=False)
    return figure


def distance(flows: Tensor, exact: Tensor) -> float:
    """‖Z − Z*‖/‖Z*‖ of one head [n, n]."""
    return float((flows - exact).norm() / exact.norm())


def zeros(values: Tensor) -> str:
    """How many values are exactly zero, in words."""
    share = float((values == 0).double().mean())
    return f"{share:.0%} zero" if share >= 0.005 else "<1% zero" if share else "no zeros"


def _columns(record: GraphRecord, layer: int) -> list[Column]:
    seen = record.layers[layer]
    flow = "flow Z" if seen.solver == "exact" else "flow Z, iterated"
    columns = [Column("resistance r", seen.resistance(), "resistance", "r = softmax(−s)")]
    if not seen.dense:
        columns.append(Column("friction f", seen.friction(), "friction", "f = softmax(u)"))
    columns.append(Column(flow, seen.attention(), "flow", "Z, white: exactly zero"))
    if seen.gamma is not None:
        columns.append(Column("flow + Ã", record.combined(layer), "flow", "(Ã + γZ)/(1 + γ)"))
    return columns


def _order(record: GraphRecord) -> tuple[Tensor, list[float]]:
    """The order in which nodes are drawn, and where one class ends and the next begins."""
    if (
        record.task.level != "node"
        or record.task.kind not in ("classification", "binary")
        or record.target is None
    ):
        return torch.arange(record.num_nodes), []
    classes, order = record.target.reshape(-1).long().sort(stable=True)
    ends = (classes.diff() != 0).nonzero().squeeze(-1)
    return order, (ends + 0.5).tolist()


def _norms(columns: Sequence[Column], heads: Sequence[int]) -> dict[str, LogNorm]:
    """Logarithmic colours for each scale, over all heads that are drawn."""
    from matplotlib.colors import LogNorm

    norms = {}
    for scale in {column.scale for column in columns}:
        values = torch.cat(
            [column.values[list(heads)].flatten() for column in columns if column.scale == scale]
        )
        positive = values[values > 0].sort().values
        if not len(positive):  # no flow paid
            norms[scale] = LogNorm(1e-8, 1)
            continue
        low, high = float(positive[int(LOW * len(positive))]), float(positive[-1])
        norms[scale] = LogNorm(low if low < high else high / 2, high)
    return norms


def _name(axes: Axes, title: str) -> None:
    """A heading of a column, above what its first map is titled."""
    said = axes.get_title()
    axes.set_title(f"{title}\n{said}" if said else title, fontsize=11)


def _tick(bar: Colorbar, low: float, high: float) -> None:
    """Whole powers of ten, or, where the colours span too few, the ends and the middle."""
    from matplotlib.ticker import NullFormatter, NullLocator

    bar.ax.tick_params(labelsize=8)
    bar.minorformatter = NullFormatter()
    if high < 100 * low:
        bar.minorlocator = NullLocator()
        ticks = [low, (low * high) ** 0.5, high]
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])


def _draw(axes: Axes, values: Tensor, norm: LogNorm, borders: list[float]) -> AxesImage:
    shown = torch.where(values > 0, values, torch.nan).numpy()
    image = axes.imshow(shown, cmap=map_colours(), norm=norm, interpolation="nearest")
    for border in borders:
        axes.axhline(border, color="black", linewidth=0.5)
        axes.axvline(border, color="black", linewidth=0.5)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(True)
    axes.spines[:].set_linewidth(0.5)
    return image


def _draw_distances(axes: Axes, along: dict[int, Tensor], exact: Tensor, heads: Sequence[int]) -> None:
    for number, head in enumerate(heads):
        distances = [distance(along[count][head], exact[head]) for count in MEASURED]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(MEASURED, distances, marker=".", color=colour, label=f"head {head + 1}")
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)
    axes.set_ylim(0, None)
    axes.set_xticks(MEASURED, [str(count) for count in MEASURED])
    axes.set_xlabel("iterations")
    axes.set_ylabel("distance to the exact\nflows, ‖Z − Z*‖/‖Z*‖")
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(ncols=-(-len(heads) // 4))


def _title(record: GraphRecord, layer: int) -> str:
    seen = record.layers[layer]
    parts = [f"{record.title}, {record.num_nodes} nodes; layer {layer + 1} of {len(record.layers)}"]
    parts.append(_strength(seen))
    if seen.gamma is not None:
        parts.append(f"γ = {seen.gamma:.3g}")
    if _order(record)[1]:
        parts.append("nodes by class")
    return ", ".join(parts)


def _strength(seen: LayerRecord) -> str:
    if seen.dense:
        return "dense (no friction)"
    if seen.scaling == "potential":
        return f"λ* = {seen.lam_star:.3g} of the potential"
    return f"λ = {seen.lam:.3g} (λ* = {seen.lam_star:.3g}), α = {seen.alpha:.3g}"
