"""Time to gather a mini-batch: the graph store against PyG's DataLoader, at the mnist shape.

    python benchmarks/data.py [--device cpu|cuda] [--out FILE]

256 superpixel graphs of about 70 nodes with 8 neighbours each, in random order, the same graphs for all. The
loaders run in this process, on one thread, and take turns; the figure is the median over all batches. On a
GPU, PyG's time includes the copy to the device, without which a model could not use its batches; "padded" is
the store's batch padded to one of a few shapes, the choice of the shape included; and "replayed" is that as
training has it: the gathering captured as a CUDA graph for each shape, so that the host sends numbers of graphs only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch_geometric
from torch_geometric.loader import DataLoader

from common import header, publish, synchronize
from sfiformer.data import GraphStore, Ladder
from sfiformer.training.replay import Replay

BATCH = 256
GRAPHS = 16 * BATCH
FIELDS = ("x", "edge_index", "edge_attr", "y", "batch", "ptr")


def real_graphs() -> tuple[GraphStore, str] | None:
    """MNIST superpixels from `mnist-superpixels.npz`, where that file is at hand."""
    shared = os.environ.get("SFIFORMER_SHARED", Path(__file__).parents[1].parent / "shared")
    path = Path(shared) / "data" / "mnist-superpixels.npz"
    if not path.exists():
        return None
    with np.load(path) as archive:
        node_ptr = archive["node_ptr"][: GRAPHS + 1].astype(np.int64)
        x = archive["x"][: node_ptr[-1]] / np.float32(65535)
        neighbours = archive["nbr"][: node_ptr[-1]].astype(np.int64)  # [N, 8], local ids
        y = archive["y"][:GRAPHS]
    return build(node_ptr, x, neighbours, y), f"MNIST superpixels, the first {GRAPHS} graphs"


def generated_graphs() -> tuple[GraphStore, str]:
    rng = np.random.default_rng(0)
    nodes = rng.integers(66, 76, GRAPHS)
    node_ptr = np.concatenate([[0], np.cumsum(nodes)])
    size = np.repeat(nodes, nodes)[:, None]
    neighbours = rng.integers(0, size, (size.size, 8))
    x = rng.random((size.size, 3), dtype=np.float32)
    return build(node_ptr, x, neighbours, rng.integers(0, 10, GRAPHS)), f"{GRAPHS} generated graphs"


def build(node_ptr: np.ndarray, x: np.ndarray, neighbours: np.ndarray, y: np.ndarray) -> GraphStore:
    """A store of the edges i → neighbours[i], with the distance of the centres as edge feature."""
    first = np.repeat(node_ptr[:-1], np.diff(node_ptr))  # [N]
    source = np.repeat(np.arange(first.size) - first, neighbours.shape[1])
    offset = np.repeat(first, neighbours.shape[1])
    destination = neighbours.ravel()
    step = x[source + offset, 1:] - x[destination + offset, 1:]
    return GraphStore(
        node_ptr=torch.from_numpy(node_ptr),
        edge_ptr=torch.from_numpy(node_ptr * neighbours.shape[1]),
        edge_index=torch.from_numpy(np.stack([source, destination])),
        node={"x": torch.from_numpy(x)},
        edge={"edge_attr": torch.from_numpy(np.linalg.norm(step, axis=1, keepdims=True))},
        graph={"y": torch.from_numpy(y)},
    )


def epoch_times(batches: Callable[[], Iterable], device: torch.device) -> list[float]:
    """Seconds for each batch of a pass, the device's work included."""
    times = []
    iterator = iter(batches())
    while True:
        synchronize(device)
        start = time.perf_counter()
        batch = next(iterator, None)
        synchronize(device)
        if batch is None:
            return times
        times.append(time.perf_counter() - start)


def measure(store: GraphStore, device: torch.device, rounds: int) -> dict[str, float]:
    """Median milliseconds a batch by each loader."""
    order = torch.randperm(len(store), generator=torch.Generator().manual_seed(0))
    picks = order.split(BATCH)
    graphs = store.to_pyg()
    loader = DataLoader([graphs[i] for i in order.tolist()], batch_size=BATCH)
    held, ladder = store.to(device), Ladder(store, BATCH)
    with tempfile.TemporaryDirectory() as folder:
        store.save(Path(folder) / "store")
        mapped = GraphStore.load(Path(folder) / "store")
        loaders: dict[str, Callable[[], Iterable]] = {
            "PyG DataLoader": lambda: (batch.to(device) for batch in loader),
            f"GraphStore on {device.type}": lambda: (held.batch(pick) for pick in picks),
            "GraphStore on disk": lambda: (mapped.batch(pick).to(device) for pick in picks),
        }
        if device.type == "cuda":
            loaders["GraphStore, padded"] = lambda: (
                held.batch(pick, ladder.shape(pick.numpy())) for pick in picks
            )
            replay = Replay(held, BATCH, lambda batches: tuple(getattr(batches[0], name) for name in FIELDS))
            loaders["GraphStore, replayed"] = lambda: (replay([pick.numpy()]) for pick in picks)
        check_equal(next(iter(loader)), held.batch(picks[0]))
        times: dict[str, list[float]] = {name: [] for name in loaders}
        for turn in range(rounds + 1):
            for name, batches in loaders.items():
                seconds = epoch_times(batches, device)
                times[name] += seconds if turn else []  # the first turn warms up
    return {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}


def check_equal(expected, got) -> None:
    for name in FIELDS:
        if not torch.equal(getattr(got, name).cpu(), getattr(expected, name)):
            raise AssertionError(f"the two batches differ in {name}")


def report(store: GraphStore, source: str, device: torch.device, rounds: int) -> list[str]:
    milliseconds = measure(store, device, rounds)
    baseline = milliseconds["PyG DataLoader"]
    per_graph = f"{store.num_nodes / len(store):.1f} nodes and {store.num_edges / len(store):.1f} edges each"
    batches = rounds * len(store) // BATCH
    lines = [
        *header(device, PyG=torch_geometric.__version__, NumPy=np.__version__),
        f"graphs    {source}; {per_graph}; {store.nbytes / 2**20:.0f} MiB",
        f"batch     {BATCH} graphs; median of {batches} batches; delivered on {device.type}",
        "",
        f"{'loader':<22}{'ms a batch':>12}{'times faster':>14}",
    ]
    return lines + [f"{name:<22}{ms:>12.3f}{baseline / ms:>14.1f}" for name, ms in milliseconds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=10, help="passes over the graphs (default: 10)")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store, source = real_graphs() or generated_graphs()
    publish(report(store, source, torch.device(arguments.device), arguments.rounds), arguments.out)


if __name__ == "__main__":
    main()
