"""Sparse-flow attention, forward and backward: exact flows against proximal iterations and PyTorch's SDPA.

    python benchmarks/attention.py [--device cpu|cuda] [--dtype float32|bfloat16] [--shapes voc …] [--graphs N] [--out FILE]

Packed ragged batches of the paper's shapes, with seeded sizes and normal queries, keys and values, λ = 1/n and α = 0.1. All
methods run in this process and take turns; the time is the median over the turns of one forward and backward. SDPA stands
for dense attention on the same graphs, one after the other without padding; on the CPU by its math path. On a GPU there is
also SDPA on the padded batch with its padding mask, which is what PyG's GPSConv does; the time to pad is not counted.

Memory is the peak of what tensors hold during one forward and backward, inputs not counted: gradients, work space and
all that autograd saves. On a GPU PyTorch's allocator says it. On the CPU it is the running sum of the allocations and
releases that PyTorch's profiler reports, which sees inside operators too.

Proximal iterations only approach the flows of least energy. The second table of a shape says how far they got, in float64, on
the first graphs of the batch: energy above the least, distance of the flows to the best ones and to where they
started (both relative to the norm of the best), and how many flows are exactly zero.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend

from batches import ALPHA, EXACT, ITERATIONS, LAM, PADDED, SDPA, SHAPES, Batch, proximal
from common import Call, header, judged, peak_bytes, publish, timings
from sfiformer.flow import Proximal, flows_from_scores

MIB = 2**20


@dataclass
class Measured:
    """Of one shape: seconds and bytes by method; those that ran out of memory have none."""

    seconds: dict[str, float]  # the median
    fastest: dict[str, float]  # of the same turns: far from the median where the machine was busy
    bytes: dict[str, int]

    @classmethod
    def of(cls, methods: dict[str, Call], device: torch.device, **options: Any) -> Measured:
        peaks = {}
        for name, call in methods.items():
            try:
                peaks[name] = peak_bytes(call, device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        taken = timings({name: methods[name] for name in peaks}, device, **options)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        return cls(medians, {name: min(times) for name, times in taken.items()}, peaks)

    def time_ratio(self, name: str, to: str) -> float:
        return _ratio(self.seconds, name, to)

    def memory_ratio(self, name: str, to: str) -> float:
        return _ratio(self.bytes, name, to)

    def table(self, methods: list[str], reference: str) -> list[str]:
        against = f"× {reference}"
        lines = [
            f"  {'forward + backward':<20}{'median ms':>11}{'fastest':>10}{'× exact':>9}{against:>15}"
            f"{'peak MiB':>11}{'× exact':>9}"
        ]
        for name in methods:
            if name not in self.seconds:
                lines.append(f"  {name:<20}   out of memory")
                continue
            lines.append(
                f"  {name:<20}{1e3 * self.seconds[name]:>11.2f}{1e3 * self.fastest[name]:>10.2f}"
                f"{self.time_ratio(name, EXACT):>9.2f}{self.time_ratio(name, reference):>15.2f}"
                f"{self.bytes[name] / MIB:>11.1f}{self.memory_ratio(name, EXACT):>9.2f}"
            )
        return lines


def _ratio(values: dict, name: str, to: str) -> float:
    return values[name] / values[to] if name in values and to in values else math.nan


def distances(batch: Batch, graphs: int = 4) -> list[str]:
    """How far proximal iterations are from the flows of least energy."""
    solvers = {proximal(count): Proximal(count) for count in ITERATIONS}
    solvers = {EXACT: "exact", "the start itself": Proximal(0), **solvers}
    energy, error, moved, zeros = (dict.fromkeys(solvers, 0.0) for _ in range(4))
    norm = flows_in_all = rows = 0.0
    parts = zip(*(x.detach().cpu().double().split(batch.sizes) for x in batch.inputs), strict=True)
    for (q, k, _, qf, kf), lam in list(zip(parts, batch.lam.tolist(), strict=True))[:graphs]:
        s, u = (torch.einsum("ihd,jhd->hij", a, b) / a.shape[-1] ** 0.5 for a, b in ((q, k), (qf, kf)))
        r, f = (-s).softmax(-1), u.softmax(-1)  # [heads, n, n]
        found = {
            name: flows_from_scores(s, u, lam=lam, alpha=ALPHA, solver=solver)
            for name, solver in solvers.items()
        }
        best, start = found[EXACT], found["the start itself"]
        norm += float(best.square().sum())
        flows_in_all += best.numel()
        rows += best.numel() / best.shape[-1]
        for name, z in found.items():
            friction = 0.5 * (r * z * z).sum() + lam * (f * z.abs()).sum()
            energy[name] += float(friction + ALPHA / 2 * (z.sum(-1) - 1).square().sum())
            error[name] += float((z - best).square().sum())
            moved[name] += float((z - start).square().sum())
            zeros[name] += float((z == 0).sum())
    lines = [
        f"  {'flows':<20}{'energy a row':>13}{'above least':>13}{'|Z − Z*|/|Z*|':>15}{'|Z − Z⁰|/|Z*|':>15}{'zeros':>8}"
    ]
    for name in solvers:
        gap = energy[name] / energy[EXACT] - 1
        lines.append(
            f"  {name:<20}{energy[name] / rows:>13.3e}{gap:>13.2%}{(error[name] / norm) ** 0.5:>15.3f}"
            f"{(moved[name] / norm) ** 0.5:>15.3f}{zeros[name] / flows_in_all:>8.1%}"
        )
    return lines


def requirements(name: str, found: Measured, device: torch.device) -> list[str]:
    ten = proximal(10)
    speed, memory = found.time_ratio(ten, EXACT), found.memory_ratio(ten, EXACT)
    of_speed = f"{name}: time of 10 proximal iterations / exact"
    of_memory = f"{name}: memory of 10 proximal iterations / exact"
    if device.type == "cpu":
        return [
            judged(of_speed, speed, 2.5 if name == "peptides" else 5, at_least=True),
            judged(of_memory, memory, 5, at_least=True),
            judged(f"{name}: time of exact / SDPA's math path", found.time_ratio(EXACT, SDPA), 6, goal=3),
        ]
    limit, goal = {"voc": (3.0, 2.0), "peptides": (2.0, 1.0)}.get(name, (2.0, None))
    lines = [
        judged(f"{name}: time of exact / SDPA, padded", found.time_ratio(EXACT, PADDED), limit, goal=goal),
        judged(of_speed, speed, 30, at_least=True),
    ]
    return lines + ([judged(of_memory, memory, 20, at_least=True)] if name == "voc" else [])


def one_large_graph(nodes: int, device: torch.device) -> tuple[list[str], list[str]]:
    """Table and requirements of one graph, 8 heads of width 64 in bfloat16, against SDPA's flash kernel."""
    batch = Batch([nodes], 8, 64, device, torch.bfloat16)
    flash = "SDPA, flash"
    methods = {EXACT: batch.sfi(), flash: batch.sdpa(SDPBackend.FLASH_ATTENTION)}
    found = Measured.of(methods, device, turns=(1, 10))
    lines = [
        "",
        f"one graph of {nodes} nodes, 8 heads of width 64, bfloat16",
        *found.table(list(methods), flash),
    ]
    sizes = (f"{name} {size / nodes:.0f}" for name, size in found.bytes.items())
    lines.append(f"  bytes a node: {'; '.join(sizes)}")
    ratio = found.time_ratio(EXACT, flash)
    return lines, [judged(f"{nodes} nodes: time of exact / SDPA, flash", ratio, 6, goal=3)]


def report(arguments: argparse.Namespace) -> str:
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    tf32 = ", TF32 allowed" if arguments.tf32 else ""
    lines = [
        *header(device, NumPy=np.__version__),
        f"numbers   {arguments.dtype}{tf32}; λ = {LAM:g}/n, α = {ALPHA}",
    ]
    checks: list[str] = []
    for name in arguments.shapes:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        shape = SHAPES[name]
        graphs = min(
            shape.graphs, arguments.graphs or (shape.on_cpu if device.type == "cpu" else shape.graphs)
        )
        sizes = shape.sizes(graphs)
        batch = Batch(sizes, shape.heads, shape.width, device, dtype)
        methods = batch.methods()
        found = Measured.of(methods, device, budget=arguments.seconds)
        lines += [
            "",
            f"{name}: {graphs} of {shape.graphs} graphs, {np.mean(sizes):.0f} nodes each ({min(sizes)} to {max(sizes)}), "
            f"{shape.heads} heads of width {shape.width}",
            *found.table(list(methods), SDPA if device.type == "cpu" else PADDED),
            *distances(batch),
        ]
        checks += requirements(name, found, device)
    for nodes in (16_384, 131_072) if arguments.large else ():
        print(f"measuring {nodes} nodes …", file=sys.stderr, flush=True)
        table, large_checks = one_large_graph(nodes, device)
        lines, checks = lines + table, checks + large_checks
    return "\n".join([*lines, "", "requirements", *checks])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--graphs", type=int, help="at most this many in a batch (default: the paper's, fewer on a CPU)"
    )
    parser.add_argument("--threads", type=int, help="of a CPU (default: PyTorch's choice)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each method and shape (default: 2)")
    parser.add_argument(
        "--tf32", action="store_true", help="allow TF32 in float32 products on a GPU, for all methods"
    )
    parser.add_argument(
        "--large", action="store_true", help="also one graph of 16,384 and of 131,072 nodes (GPU)"
    )
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    if arguments.graphs is not None and arguments.graphs < 1:
        parser.error(f"--graphs must be at least 1, got {arguments.graphs}")
    if arguments.large and arguments.device != "cuda":
        parser.error("--large needs --device cuda")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    publish(report(arguments), arguments.out)


if __name__ == "__main__":
    main()
