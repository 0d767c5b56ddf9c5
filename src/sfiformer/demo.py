"""Trains SFi-Former and its dense twin, DFi-Former, on a small generated CLUSTER, and compares the two.

python -m sfiformer.demo [--out DIR] [--epochs N] [--seed N]
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfiformer.config import ExperimentConfig
from sfiformer.data.batch import GraphBatch
from sfiformer.data.task import Task
from sfiformer.errors import UserError
from sfiformer.explain.record import record
from sfiformer.nn import SFiFormer
from sfiformer.training import Result, prepare, train

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MODELS = {"SFi-Former": "sfi", "DFi-Former": "dfi"}
COLOURS = {"SFi-Former": "tab:blue", "DFi-Former": "tab:orange"}
COMMUNITIES = 6
# The paper's model for CLUSTER has 20 layers of width 32 and 8 heads; this one is trained in two minutes.
SETTINGS = {
    "data.size": "small",
    "data.batch_size": 4,
    "model.layers": 3,
    "model.dim": 16,
    "model.heads": 2,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "optim.lr": 1.5e-3,
    "optim.warmup_epochs": 1,
}


def settings(out: Path, epochs: int, seed: int) -> ExperimentConfig:
    """The experiment, of which only the attention differs between the two models."""
    own = {"data.root": str(out / "data"), "trainer.epochs": epochs, "seed": seed}
    return ExperimentConfig.from_preset("cluster", SETTINGS | own)


def train_both(config: ExperimentConfig, out: Path) -> dict[str, Result]:
    """Train each model into a run folder of its own; a run that was begun there before is continued."""
    results = {}
    for name, attention in MODELS.items():
        print(f"\n{name} (attention: {attention})", flush=True)
        results[name] = train(_with_attention(config, attention), out / name.lower(), resume=True)
    return results


def report(results: dict[str, Result]) -> str:
    """The comparison as a table, and how far it is from guessing."""
    lines = [
        f"{'':12}{'test accuracy':>15}{'train-test gap':>16}{'zero attention':>16}{'parameters':>12}{'time':>8}"
    ]
    for name, result in results.items():
        zeros = "dense" if result.zero_share is None else f"{result.zero_share:.1%}"
        lines.append(
            f"{name:12}{result.test:>15.1%}{result.gap:>16.1%}{zeros:>16}{result.parameters:>12,}"
            f"{result.seconds:>6.0f} s"
        )
    best = max(results.values(), key=lambda result: result.test or 0.0)
    lines += [
        "",
        "accuracy: mean recall of the six communities, at the epoch that was best on the validation graphs;",
        f"guessing scores 1/6 = {1 / COMMUNITIES:.1%}, so {best.test:.1%} is {(best.test or 0) * COMMUNITIES:.1f} times that",
        "zero attention: share of flows that are exactly zero, over all layers, heads and pairs of nodes",
        "(accuracy leaps between epochs while the learning rate is high: batch norm's averages trail the weights)",
    ]
    return "\n".join(lines)


def draw(config: ExperimentConfig, results: dict[str, Result]) -> "Figure":
    """Learning curves of both models, and the attention of both on one test graph."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 10), layout="constrained")
    axes = figure.subplots(2, 2)
    _draw_curves(axes[0, 0], "loss", results, {"loss": "-"})
    _draw_curves(axes[0, 1], "accuracy (mean recall)", results, {"train": ":", "test": "-"})
    axes[0, 1].axhline(1 / COMMUNITIES, color="grey", linewidth=0.8)
    axes[0, 1].annotate("guessing", (1, 1 / COMMUNITIES), va="bottom", color="grey")

    prepared = prepare(config)
    batch = prepared.stores["test"].batch([0])
    maps = {}
    for name, result in results.items():
        model = SFiFormer.from_pretrained(result.run / "best")
        community, maps[name] = attention_map(model, batch, prepared.task)
    positive = torch.cat([flows[flows > 0] for flows in maps.values()])
    low, high = positive.quantile(torch.tensor([0.02, 0.999])).tolist()
    for axis, (name, flows) in zip(axes[1], maps.items(), strict=True):
        image = _draw_map(axis, f"{name}, last layer, head 1", flows, community, LogNorm(low, high))
    bar = figure.colorbar(image, ax=axes[1], extend="both", shrink=0.8)
    bar.set_label("flow from key to query; white: exactly zero")
    figure.suptitle(f"Sparse and dense flows on CLUSTER; below, a test graph of {batch.num_nodes} nodes")
    return figure


def attention_map(model: SFiFormer, batch: GraphBatch, task: Task) -> tuple[Tensor, Tensor]:
    """The communities [n], ascending, and the flows [n, n] between nodes in that order: last layer, first head."""
    community, order = batch.y.long().sort(stable=True)
    flows = record(model, batch, task=task).layers[-1].flows()[0]
    return community, flows[order][:, order]


def _with_attention(config: ExperimentConfig, attention: str) -> ExperimentConfig:
    return replace(config, model=replace(config.model, attention=attention))  # type: ignore[arg-type]


def _draw_curves(axis: "Axes", title: str, results: dict[str, Result], styles: dict[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, result in results.items():
        lines = (result.run / "metrics.jsonl").read_text().splitlines()
        history = [json.loads(line) for line in lines]
        for column, style in styles.items():
            label = name if len(styles) == 1 else f"{name}, {column}"
            epochs = [record["epoch"] for record in history]
            values = [record[column] for record in history]
            axis.plot(epochs, values, style, color=COLOURS[name], marker=".", label=label)
    axis.set_title(title)
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_map(axis: "Axes", title: str, values: Tensor, community: Tensor, norm: "LogNorm") -> "AxesImage":
    """A matrix on a logarithmic scale, exact zeros white, with the borders of the communities."""
    import matplotlib

    shown = torch.where(values > 0, values, torch.nan).numpy()
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="white")
    image = axis.imshow(shown, cmap=colours, norm=norm, interpolation="nearest")
    sizes = community.bincount()
    ends = sizes.cumsum(0)
    for end in ends[:-1].tolist():
        axis.axhline(end - 0.5, color="black", linewidth=0.6)
        axis.axvline(end - 0.5, color="black", linewidth=0.6)
    names = [str(number + 1) for number in range(len(sizes))]
    centres = (ends - sizes / 2 - 0.5).tolist()
    axis.set_xticks(centres, names)
    axis.set_yticks(centres, names)
    axis.tick_params(length=0)
    axis.set_xlabel("key node, by community")
    axis.set_ylabel("query node, by community")
    zeros = float((values == 0).float().mean())
    axis.set_title(f"{title}\n{f'{zeros:.0%} exactly zero (white)' if zeros else 'no zeros'}", fontsize=11)
    return image


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sfiformer.demo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for runs and picture (default: demo-out)"
    )
    parser.add_argument("--epochs", type=int, default=6, help="for each of the models (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="of the graphs and the weights (default: 0)")
    arguments = parser.parse_args()
    # Two threads on two cores that are not idle wait for each other far longer than they compute.
    torch.set_num_threads(1)
    out: Path = arguments.out
    config = settings(out, arguments.epochs, arguments.seed)
    try:
        results = train_both(config, out)
    except UserError as error:
        sys.exit(f"{error} (--out), or remove {out}")
    print(f"\n{report(results)}\n")
    for name, result in results.items():
        print(f"{name}: {result.run} (metrics.csv, best/, config.yaml, …)")
    try:
        figure = draw(config, results)
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'sfiformer[plot]')")
        return
    figure.savefig(out / "demo.png", dpi=130)
    print(f"learning curves and attention maps: {out / 'demo.png'}")


if __name__ == "__main__":
    main()
