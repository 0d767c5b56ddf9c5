"""A first look at sparse-flow attention: solve and attend on one generated graph, report, and draw the flows.

python -m sfiformer.demo [--out DIR] [--seed N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from sfiformer.attention import Adjacency, SFiAttention
from sfiformer.data.encodings import ESLapPE
from sfiformer.data.synthetic import cluster
from sfiformer.flow import Proximal
from sfiformer.flow.problem import Solver

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

WIDTH, HEADS = 32, 8  # as the paper's model for CLUSTER
DENSE, SPARSE, SPARSER = 0.0, 1.0, 5.0  # λ*
ITERATIONS = 10


class Graph(NamedTuple):
    """One graph of CLUSTER, its nodes ordered by community."""

    x: Tensor  # [n, WIDTH], features and positions by a random linear map
    edge_index: Tensor  # [2, E]
    community: Tensor  # [n]
    ptr: Tensor  # [0, n]


def draw_graph(seed: int) -> Graph:
    batch = cluster((1, 1, 1), seed)["train"].batch([0])
    community, order = batch.y.long().sort(stable=True)
    edge_index = order.argsort()[batch.edge_index]
    vectors = torch.from_numpy(ESLapPE()(len(order), edge_index.numpy())["eslappe_vectors"])
    inputs = torch.cat(
        [batch.x[order].float(), vectors * len(order) ** 0.5], 1
    )  # [n, 7 + 10], entries of order 1
    torch.manual_seed(seed)
    with torch.no_grad():
        x = nn.Linear(inputs.shape[1], WIDTH)(inputs)
    return Graph(x, edge_index, community, batch.ptr)


def make_layer(lam: float, seed: int, solver: Solver = "exact") -> SFiAttention:
    """Untrained; the same weights for every λ* and solver."""
    torch.manual_seed(seed)
    return SFiAttention(WIDTH, HEADS, lam=lam, solver=solver).eval()


def flows(graph: Graph, lam: float, seed: int, solver: Solver = "exact") -> Tensor:
    """[heads, n, n]: row i says where node i draws its unit from."""
    return make_layer(lam, seed, solver).flows(graph.x, graph.ptr)[0]


def milliseconds(layer: SFiAttention, graph: Graph, repeats: int = 7) -> float:
    """Of a forward pass, the median."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        layer(graph.x, graph.edge_index, graph.ptr)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])  # the first warms up


@torch.no_grad()
def report(graph: Graph, seed: int) -> str:
    n, pairs = len(graph.x), graph.edge_index.shape[1]
    layer = make_layer(SPARSE, seed)
    out = layer(graph.x, graph.edge_index, graph.ptr)
    best = flows(graph, SPARSE, seed)
    iterated = flows(graph, SPARSE, seed, Proximal(ITERATIONS))
    start = flows(graph, SPARSE, seed, Proximal(0))
    slow = make_layer(SPARSE, seed, Proximal(ITERATIONS))
    exact_time, slow_time = (milliseconds(some, graph) for some in (layer, slow))
    lines = [
        f"A generated CLUSTER graph: {n} nodes in {int(graph.community.max()) + 1} communities, {pairs // 2} edges.",
        f"An untrained SFiAttention layer, {HEADS} heads of width {WIDTH}: random weights, so the flows show the",
        f"mechanism and no learned pattern. Output [{n}, {out.shape[1]}], finite: {bool(out.isfinite().all())}.",
        "",
        f"{'λ*':>4}{'exactly zero flows':>22}{'effective keys of a node':>28}",
    ]
    for lam in (DENSE, SPARSE, SPARSER):
        z = flows(graph, lam, seed)
        keys = (1 / z.square().sum(-1)).median()
        note = "   dense" if lam == DENSE else ""
        lines.append(f"{lam:>4g}{float((z == 0).float().mean()):>22.1%}{float(keys):>20.1f} of {n}{note}")
    distance, moved = (float((iterated - z).norm() / best.norm()) for z in (best, start))
    zeros = float((iterated == 0).float().mean())
    lines += [
        "(effective keys: 1/Σz², the median over nodes and heads)",
        "",
        f"Against the paper's iteration, {ITERATIONS} steps of it, at λ* = {SPARSE:g}:",
        f"  distance to the flows of least energy   {distance:.2f} of their norm (exact: 0)",
        f"  distance to where it started            {moved:.2f}",
        f"  exactly zero flows                      {zeros:.1%}",
        f"  time of the layer, forward              {slow_time:.1f} ms (exact: {exact_time:.1f} ms)",
    ]
    return "\n".join(lines)


@torch.no_grad()
def draw(graph: Graph, seed: int, head: int = 0) -> Figure:
    """Resistance, friction and flows of one head as maps over pairs of nodes, and flows by rank."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layer = make_layer(SPARSE, seed)
    q, k, q_friction, k_friction = (x[:, head] for x in layer._scores(graph.x))
    resistance = (-q @ k.T * WIDTH**-0.5).softmax(-1)
    friction = (q_friction @ k_friction.T * WIDTH**-0.5).softmax(-1)
    dense, sparse, sparser = (flows(graph, lam, seed)[head] for lam in (DENSE, SPARSE, SPARSER))
    near = Adjacency.of(graph.edge_index, len(graph.x)).matmul(torch.eye(len(graph.x)))
    gamma = float(layer.gamma)
    mixed = (near + gamma * sparse) / (1 + gamma)

    figure = Figure(figsize=(13, 9), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.08))
    axes = figure.subplots(2, 3)
    figure.suptitle(
        f"Sparse-flow attention on a CLUSTER graph of {len(graph.x)} nodes: head {head + 1} of an untrained layer",
        fontsize=14,
    )
    maps = {
        "Resistance r": resistance,
        "Friction f": friction,
        "Dense flow, λ* = 0": dense,
        f"Sparse flow, λ* = {SPARSE:g}": sparse,
        f"Sparse flow + Ã, λ* = {SPARSE:g}, γ = {gamma:g}": mixed,
    }
    positive = torch.cat([values[values > 0] for values in maps.values()])
    low, high = positive.quantile(torch.tensor([0.01, 0.999])).tolist()
    norm = LogNorm(low, high)  # one scale for all: the rows of each map but the last sum to 1, or nearly so
    for axis, (title, values) in zip(axes.flat, maps.items(), strict=False):
        image = _draw_map(axis, title, values, graph.community, norm)
    bar = figure.colorbar(image, ax=axes, extend="both", shrink=0.6, aspect=35, pad=0.02)
    bar.set_label("resistance, friction or flow; white: exactly zero")
    _draw_ranks(axes.flat[-1], {DENSE: dense, SPARSE: sparse, SPARSER: sparser})
    return figure


def _draw_map(axis: Axes, title: str, values: Tensor, community: Tensor, norm: LogNorm) -> AxesImage:
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


def _draw_ranks(axis: Axes, by_lam: dict[float, Tensor]) -> None:
    """How many flows a node draws, and how large: the mean over nodes of the largest flow, the second, and so on."""
    import matplotlib

    colours = matplotlib.colormaps["viridis"]([0.0, 0.45, 0.8])
    for colour, (lam, z) in zip(colours, by_lam.items(), strict=True):
        ranked = z.sort(-1, descending=True).values.mean(0)
        ranked = ranked[ranked > 0]
        axis.plot(range(1, len(ranked) + 1), ranked.numpy(), color=colour, linewidth=2, label=f"λ* = {lam:g}")
    axis.set_xlim(1, z.shape[-1])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rank of the key")
    axis.set_ylabel("flow, mean over query nodes")
    axis.set_box_aspect(1)
    axis.set_title(
        "Flows of a node, largest first\npast the end of a curve all are exactly zero", fontsize=11
    )
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sfiformer.demo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for the picture (default: demo-out)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the graph and the weights (default: 0)")
    arguments = parser.parse_args()
    graph = draw_graph(arguments.seed)
    print(report(graph, arguments.seed))
    try:
        figure = draw(graph, arguments.seed)
    except ImportError:
        print("\nNo picture: matplotlib is not installed (pip install 'sfiformer[plot]').")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "flows.png"
    figure.savefig(path, dpi=130)
    print(f"\nThe flows are drawn in {path}")


if __name__ == "__main__":
    main()
