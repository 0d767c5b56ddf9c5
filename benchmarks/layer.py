"""One GPS layer, forward and backward: `SFiGPSConv` in place of PyG's `GPSConv`, as the README swaps them.

    python benchmarks/layer.py [--device cpu|cuda] [--out FILE]

64 channels, 4 heads, a GINConv beside the attention, untrained weights, rings with as many chords as nodes. Every head has
the full width unless it is "narrow", 16, as PyG's are; "dense" is softmax attention with narrow heads and nothing besides
(no hard-wired adjacency, LayerNorm, or normalised queries and keys), which computes what PyG's layer does. All layers run in
this process and take turns; times are medians, of plain calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch_geometric
from torch import Tensor, nn
from torch_geometric.nn import GINConv, GPSConv

from common import header, publish, timings
from sfiformer import SFiGPSConv

CHANNELS, HEADS = 64, 4
BATCHES = (1, 20), (32, 25), (64, 70), (16, 150)  # graphs, and nodes of each
NARROW = {"head_width": CHANNELS // HEADS}
DENSE = {**NARROW, "mode": "dfi", "adjacency": False, "norm": False, "qk_norm": False}
LAYERS = {
    "GPSConv": lambda conv: GPSConv(CHANNELS, conv, heads=HEADS),
    "SFiGPSConv": lambda conv: SFiGPSConv(CHANNELS, conv, heads=HEADS),
    "narrow": lambda conv: SFiGPSConv(CHANNELS, conv, heads=HEADS, attn_kwargs=NARROW),
    "dense": lambda conv: SFiGPSConv(CHANNELS, conv, heads=HEADS, attn_kwargs=DENSE),
}


def edges(graphs: int, nodes: int) -> Tensor:
    """Of rings with a random chord at each node, [2, E]."""
    ring = torch.arange(nodes).repeat(graphs)
    first = torch.arange(graphs).repeat_interleave(nodes) * nodes
    others = [(ring + 1) % nodes, torch.randint(nodes, ring.shape)]
    pairs = torch.cat([torch.stack([ring, other]) + first for other in others], dim=1)
    return torch.cat([pairs, pairs.flip(0)], dim=1)


def step(layer: nn.Module, given: list[Tensor]) -> None:
    layer(*given).sum().backward()


def report(device: torch.device) -> Iterator[str]:
    yield from header(device, PyG=torch_geometric.__version__)
    yield f"ms, forward and backward; {CHANNELS} channels, {HEADS} heads, float32"
    yield f"  {'batch':<12}{''.join(f'{name:>22}' for name in LAYERS)}"
    for graphs, nodes in BATCHES:
        torch.manual_seed(0)
        x, edge_index = torch.randn(graphs * nodes, CHANNELS), edges(graphs, nodes)
        batch = torch.arange(graphs).repeat_interleave(nodes)
        given = [tensor.to(device) for tensor in (x, edge_index, batch)]
        layers = {name: make(GINConv(nn.Linear(CHANNELS, CHANNELS))) for name, make in LAYERS.items()}

        calls = {name: partial(step, layer.to(device), given) for name, layer in layers.items()}
        times = {name: 1e3 * median(taken) for name, taken in timings(calls, device, budget=3.0).items()}
        cells = (f"{time:>13.2f} ({time / times['GPSConv']:>4.1f}×)" for time in times.values())
        yield f"  {f'{graphs} × {nodes}':<12}{''.join(f'{cell:>22}' for cell in cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    publish(report(torch.device(arguments.device)), arguments.out)


if __name__ == "__main__":
    main()
