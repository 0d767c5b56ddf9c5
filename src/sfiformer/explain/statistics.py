"""How sparse attention is and how far it reaches, over many graphs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfiformer.errors import UserError
from sfiformer.explain.record import GraphRecord
from sfiformer.files import whole_file

UNREACHABLE = "unreachable"


@dataclass(frozen=True, eq=False)
class Statistics:
    """Of the flows Z of all layers and heads, on G graphs; Ã, where a layer adds it, is not counted.

    Zero is a flow that friction stops, not one too small to be told from zero: dense attention has none.
    """

    name: str  # of the run
    graphs: list[str]
    nodes: np.ndarray  # [G]
    support: np.ndarray  # [G, layers, heads] mean number of keys that a query of the graph draws from
    # Share of all flow that comes from keys so many hops away, [layers, heads, hops]; the last is of those out of reach.
    mass: np.ndarray
    # Share of all pairs of nodes that are so many hops apart, [hops]: the mass of uniform attention.
    pairs: np.ndarray

    @property
    def zeros(self) -> np.ndarray:
        """The share of zero flows over all pairs of nodes, [layers, heads]."""
        pairs = self.nodes.astype(float) ** 2
        carrying = (self.support * self.nodes[:, None, None]).sum(0)
        return 1 - carrying / pairs.sum()

    @property
    def hops(self) -> list[int | str]:
        """What the last dimension of `mass` counts."""
        return [*range(len(self.pairs) - 1), UNREACHABLE]

    @property
    def mean_hops(self) -> np.ndarray:
        """How far a unit of flow comes on average, of what comes from reachable keys, [layers, heads]."""
        return _mean_hops(self.mass)


def collect(name: str, records: Iterable[GraphRecord]) -> Statistics:
    """The statistics of a run called `name` over the records of some graphs, one in memory at a time."""
    graphs, nodes, supports, masses, pairs = [], [], [], [], []
    for record in records:
        bins = hop_distances(record.edge_index, record.num_nodes).flatten() + 1  # 0: unreachable
        # In float64 no flow is so small that it reads as zero.
        flows = [layer.attention(torch.float64) for layer in record.layers]
        masses.append(_by_bin(torch.stack(flows).abs(), bins))
        pairs.append(bins.bincount().double())
        supports.append(
            torch.stack([_keys(layer.dense, z) for layer, z in zip(record.layers, flows, strict=True)])
        )
        graphs.append(record.name)
        nodes.append(record.num_nodes)
    if not graphs:
        raise UserError("there are no graphs to take statistics of")
    mass, apart = _joined(masses), _joined(pairs)
    total = mass.sum(-1, keepdims=True)
    return Statistics(
        name=name,
        graphs=graphs,
        nodes=np.array(nodes),
        support=torch.stack(supports).numpy(),
        mass=np.divide(mass, total, out=np.zeros_like(mass), where=total > 0),
        pairs=apart / apart.sum(),
    )


def hop_distances(edge_index: Tensor, nodes: int) -> Tensor:
    """Edges on the shortest path between every two nodes, whatever their direction, [n, n]; −1 where there is none."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import shortest_path

    source, target = edge_index.numpy()
    graph = csr_array((np.ones(len(source)), (source, target)), shape=(nodes, nodes))
    hops = shortest_path(graph, method="D", directed=False, unweighted=True)
    return torch.from_numpy(np.where(np.isfinite(hops), hops, -1).astype(np.int64))


def write_statistics(statistics: Sequence[Statistics], stem: Path) -> list[Path]:
    """Write the numbers of some runs: STEM.json, and STEM-graphs.csv and STEM-hops.csv with a row for each of them.

    Layers and heads are numbered from 1.
    """
    summary = [
        {
            "run": each.name,
            "graphs": len(each.graphs),
            "mean_nodes": float(each.nodes.mean()),
            "zero_share": each.zeros.tolist(),  # [layers][heads]
            "mean_support": each.support.mean(0).tolist(),
            "mean_hops": each.mean_hops.tolist(),
            "mean_hops_of_pairs": _mean_hops(each.pairs).tolist(),
        }
        for each in statistics
    ]
    graphs, hops = [], []
    for each in statistics:
        for layer, head in np.ndindex(each.support.shape[1:]):
            place = {"run": each.name, "layer": layer + 1, "head": head + 1}
            for name, nodes, support in zip(
                each.graphs, each.nodes, each.support[:, layer, head], strict=True
            ):
                share = 1 - support / nodes
                graphs.append(
                    {**place, "graph": name, "nodes": nodes, "support": support, "zero_share": share}
                )
            for hop, mass, pairs in zip(each.hops, each.mass[layer, head], each.pairs, strict=True):
                hops.append({**place, "hops": hop, "mass": mass, "pairs": pairs})
    return [
        _write(stem.with_name(f"{stem.name}.json"), json.dumps(summary, indent=1) + "\n"),
        _write(stem.with_name(f"{stem.name}-graphs.csv"), _csv(graphs)),
        _write(stem.with_name(f"{stem.name}-hops.csv"), _csv(hops)),
    ]


def _keys(dense: bool, flows: Tensor) -> Tensor:
    """How many keys a query draws from on average, for each head of the flows [heads, n, n]."""
    carrying = torch.ones_like(flows) if dense else (flows != 0).double()
    return carrying.sum(-1).mean(-1)


def _by_bin(flows: Tensor, bins: Tensor) -> Tensor:
    """Sums of the flows [layers, heads, n, n] over the pairs [n · n] of each bin: [layers, heads, bins]."""
    sums = flows.new_zeros(*flows.shape[:2], int(bins.max()) + 1)
    return sums.index_add(-1, bins, flows.flatten(-2))


def _joined(parts: list[Tensor]) -> np.ndarray:
    """The sum of tensors [..., bins] whose numbers of bins differ; the first bin, the unreachable, comes last."""
    most = max(part.shape[-1] for part in parts)
    total = sum(torch.nn.functional.pad(part, (0, most - part.shape[-1])) for part in parts)
    assert isinstance(total, Tensor)
    return total.roll(-1, -1).numpy()


def _mean_hops(mass: np.ndarray) -> np.ndarray:
    """The mean number of hops of a mass [..., hops, then unreachable], of its reachable part."""
    near = mass[..., :-1]
    total = near.sum(-1)
    return (near * np.arange(near.shape[-1])).sum(-1) / np.where(total > 0, total, np.nan)


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(
        {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
        for row in rows
    )
    return text.getvalue()


def _write(path: Path, text: str) -> Path:
    with whole_file(path) as file:
        file.write(text.encode())
    return path
