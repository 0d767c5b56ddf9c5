"""Training steps: SFi-, DFi-Former and softmax attention against an ordinary training loop of PyG.

    python benchmarks/training.py [--device cpu|cuda] [--precision 32|tf32|bf16-mixed] [--shapes voc …] [--out FILE]

Ours are the paper's presets (full-width heads) in the project's own training step: on a GPU padded and replayed as a CUDA
graph, the next batch gathered beside it ("sfi-eager": without), losses read every half second as the trainer does.
"sfi-default" is the preset that we ship: bounded scores, friction against the potential. PyG's is GPSConv with its own
softmax attention (heads of width d/H) and ResGatedGraphConv, of the same depth and width (peptides: 236 in place of 235: its
heads must divide the width), with PyG's DataLoader ("pyg-workers": two worker processes), AdamW, and the loss read at every
step. Gradients are clipped to norm 1; encoders, losses and heads are the same; both have the preset's positional encoding
(ESLapPE gates every layer's messages in ours; in PyG's it is added to the node features, which is less work).

All models train on the same generated graphs, in this process, and take turns, an epoch each. The time is the median over
whole epochs, gathering of batches and reading of losses included, the device waited for at the ends only. What comes before
(compiling kernels, capturing graphs) is the warm-up, given apart. Where kernels are not compiled yet, processes of one model
and shape each (`--shapes voc --models sfi --seconds 0`) compile them in parallel and leave them in Triton's cache. The process
keeps the memory that is freed, as that of `sfi train` does, for all models.

Memory is the peak that PyTorch's allocator saw from before the model was made to the end of its warm-up, the store of graphs
and the captures included; "reserved" is what was then held from the driver on top.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch_geometric

from breakdown import Breakdown
from common import header, judged, publish, seconds, synchronize
from sfiformer.memory import keep_freed_memory
from sfiformer.training.distributed import products
from training_graphs import PRESETS, Problem
from training_loops import Loop, Ours, PyG

MIB = 2**20
PROFILED = 4  # steps, at most
LEAST = 3  # epochs of each model: what waits for its host takes longer at one time than at another
SFI, PYG = "sfi", "pyg"
ON_CPU = [SFI, "dfi", "softmax", PYG]
MODELS = [SFI, "sfi-default", "sfi-eager", "dfi", "softmax", PYG, "pyg-workers"]


def make(name: str, problem: Problem, device: torch.device) -> Loop:
    if name.startswith(PYG):
        return PyG(problem, device, workers=2 if name == "pyg-workers" else 0)
    if name == "sfi-default":
        return Ours(problem, problem.defaults, device)
    model = replace(problem.config.model, attention=name.removesuffix("-eager"))
    return Ours(problem, model, device, capture=name != "sfi-eager")


@dataclass
class Measured:
    """Of one model at one shape."""

    loop: Loop
    warm_up: float  # seconds
    allocated: int  # bytes
    reserved: int
    epochs: list[float] = field(default_factory=list)  # seconds each

    @classmethod
    def of(cls, name: str, problem: Problem, device: torch.device) -> Measured:
        """Made and warmed up."""
        gpu = device.type == "cuda"
        before = reserved = 0
        if gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        start = time.perf_counter()
        loop = make(name, problem, device)
        loop.warm_up(None if gpu else 1)
        synchronize(device)
        taken = time.perf_counter() - start
        if not gpu:
            return cls(loop, taken, 0, 0)
        peak = torch.cuda.max_memory_allocated() - before
        return cls(loop, taken, peak, torch.cuda.max_memory_reserved() - reserved)


def measure(problem: Problem, models: list[str], device: torch.device, budget: float) -> dict[str, Measured]:
    found = {}
    for name in models:
        print(f"  warming up {name} …", file=sys.stderr, flush=True)
        found[name] = Measured.of(name, problem, device)
    epoch, least = 0, LEAST if budget else 1
    while epoch < least or any(sum(one.epochs) < budget for one in found.values()):
        for one in found.values():
            if epoch < least or sum(one.epochs) < budget:
                one.epochs.append(seconds(partial(one.loop.epoch, epoch), device))
        epoch += 1
    return found


@dataclass
class Table:
    """What was measured at one shape, in words."""

    shape: str
    problem: Problem
    found: dict[str, Measured]
    device: torch.device

    def step(self, name: str) -> float:
        """Milliseconds of a step, NaN where the model was not asked for."""
        steps = len(self.problem.store) / self.problem.config.data.batch_size
        return 1e3 * statistics.median(self.found[name].epochs) / steps if name in self.found else math.nan

    def lines(self) -> list[str]:
        store, config = self.problem.store, self.problem.config
        nodes, edges = store.num_nodes / len(store), store.num_edges / len(store)
        lines = [
            "",
            f"{self.shape}: {len(store)} graphs of {nodes:.0f} nodes and {edges:.0f} edges, {config.data.batch_size} a step; "
            f"{config.model.layers} layers, d = {config.model.dim}, {config.model.heads} heads",
            f"  {'model':<13}{'parameters':>11}{'ms a step':>11}{'fastest':>9}{'graphs/s':>10}{'× faster':>10}"
            f"{'peak MiB':>10}{'reserved':>10}{'warm-up s':>11}{'epochs':>8}",
        ]
        for name, one in self.found.items():
            step = self.step(name)
            fastest = step * min(one.epochs) / statistics.median(one.epochs)
            memory = [f"{size / MIB:.0f}" if size else "" for size in (one.allocated, one.reserved)]
            lines.append(
                f"  {name:<13}{one.loop.parameters:>11,}{step:>11.2f}{fastest:>9.2f}"
                f"{1e3 * config.data.batch_size / step:>10.0f}{self.step(PYG) / step:>10.2f}"
                f"{memory[0]:>10}{memory[1]:>10}{one.warm_up:>11.1f}{len(one.epochs):>8}"
            )
        return lines

    def breakdowns(self) -> tuple[list[str], float]:
        """Of a step of SFi and of PyG; and the share of data in the former."""
        unit, on = ("kernels", "device") if self.device.type == "cuda" else ("calls", "CPU")
        steps = min(PROFILED, len(self.problem.store) // self.problem.config.data.batch_size)
        lines, share = [], math.nan
        for name in (SFI, PYG):
            if name not in self.found:
                continue
            loop, wall = self.found[name].loop, self.step(name)
            captured = partial(loop.epoch, 0, steps)
            apart = partial(loop.padded, steps) if isinstance(loop, Ours) else captured
            parts = Breakdown.of(apart, self.device, steps)
            lines += [f"  one step of {name:<12}{f'ms, {on}':>12}{'share':>9}{unit:>9}", *parts.lines()]
            if self.device.type == "cpu":
                share = parts.milliseconds["data"] / parts.total if name == SFI else share
                continue
            seen = parts
            if name == SFI:
                share = parts.milliseconds["data"] / wall
                seen = Breakdown.of(captured, self.device, steps)
            lines.append(
                f"    wall {wall:.2f} ms, of which the device is busy {seen.busy:.2f} ms with {seen.count:.0f} kernels and "
                f"waits for the host {max(0.0, 1 - seen.busy / wall):.0%}{'' if name == PYG else ' (captured)'}"
            )
        return lines, share

    def requirements(self, data_share: float) -> list[str]:
        if not {SFI, PYG} <= set(self.found):
            return []
        sfi, pyg = self.step(SFI), self.step(PYG)
        if self.device.type == "cpu":
            return [judged(f"{self.shape}: time of SFi's step / PyG's", sfi / pyg, 1)]
        memory = self.found[SFI].allocated / self.found[PYG].allocated
        return [
            judged(f"{self.shape}: time of PyG's step / SFi's", pyg / sfi, 8, at_least=True, goal=15),
            judged(f"{self.shape}: gathering of data, % of SFi's step", 100 * data_share, 5),
            judged(f"{self.shape}: peak memory of SFi / PyG's", memory, 1),
        ]


def report(arguments: argparse.Namespace) -> Iterator[str]:
    device = torch.device(arguments.device)
    yield from header(device, PyG=torch_geometric.__version__, NumPy=np.__version__)
    yield f"numbers   precision {arguments.precision}"
    torch.eye(8, device=device) @ torch.eye(
        8, device=device
    )  # work space of the library is no model's memory
    checks: list[str] = []
    for shape in arguments.shapes:
        print(f"measuring {shape} …", file=sys.stderr, flush=True)
        problem = Problem.of(shape, arguments.batches, arguments.precision, device)
        table = Table(shape, problem, measure(problem, arguments.models, device, arguments.seconds), device)
        parts, data_share = table.breakdowns()
        yield from (*table.lines(), *parts)
        checks += table.requirements(data_share)
        del table  # frees the models and their captures, ends the workers
    if checks:
        yield from ("", "requirements", *checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["32", "tf32", "bf16-mixed"], default="32")
    parser.add_argument("--shapes", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help="(default: all that make sense on the device)"
    )
    parser.add_argument("--batches", type=int, help="in an epoch (default: 40, on a CPU 4)")
    parser.add_argument("--threads", type=int, help="of a CPU (default: PyTorch's choice)")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each model and shape (default: 5)")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    arguments.models = arguments.models or (ON_CPU if on_cpu else MODELS)
    arguments.batches = arguments.batches or (4 if on_cpu else 40)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    with products(arguments.precision):
        publish(report(arguments), arguments.out)


if __name__ == "__main__":
    main()
