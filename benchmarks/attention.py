"""Sparse-flow attention, forward and backward: exact flows against proximal iterations and PyTorch's SDPA.

    python benchmarks/attention.py [--device cpu|cuda] [--dtype float32 bfloat16] [--shapes voc …] [--graphs N]
                                   [--large 16384 …] [--out FILE]

Packed ragged batches of the paper's shapes, with seeded sizes and normal queries, keys and values, λ = 1/n and α = 0.1. All
methods run in this process and take turns; the time is the median over the turns of one forward and backward. SDPA stands
for dense attention on the same graphs, one after the other without padding; on the CPU by its math path. On a GPU there is
also SDPA on the padded batch with its padding mask, which is what PyG's GPSConv does; the time to pad is not counted.

On a GPU each method is also captured as a CUDA graph and replayed: of batches this small plain calls measure the host.
Ratios, requirements and shares are those of the replays. The iteration goes by kernels of ours, and once more as the paper has
it, in plain PyTorch: that asks the device for the sizes of the graphs and is not captured, so that plain calls stand beside it.

Memory is the peak of what tensors hold during one forward and backward, inputs not counted: gradients, work space and
all that autograd saves. On a GPU PyTorch's allocator says it. On the CPU it is the running sum of the allocations and
releases that PyTorch's profiler reports, which sees inside operators too.

Proximal iterations only approach the flows of least energy. On a CPU the second table of a shape says how far they got, in
float64, on the first graphs of the batch: energy above the least, distance of the flows to the best ones and to where they
started (both relative to the norm of the best), and how many flows are exactly zero.

On a GPU the second table says what share of the device's peaks a method reaches, counting the least that it has to compute and
to move (`peaks`), and the third which kernels take its time. Single large graphs follow, in both scalings, with the
number of sweeps over their keys; then graphs around the size from which keys are streamed, done both ways.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from batches import ALPHA, EXACT, ITERATIONS, LAM, PADDED, PLAIN, RELATIVE, SDPA, SHAPES, Batch, proximal
from breakdown import kernel_table
from common import header, judged, publish
from compiling import Case, compile_kernels
from large_graphs import border, one_large_graph, samples
from measured import Measured
from peaks import shares
from sfiformer.flow import Proximal, flows_from_scores


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
    ten = proximal(10) if device.type == "cpu" else PLAIN
    speed, memory = found.time_ratio(ten, EXACT), found.memory_ratio(ten, EXACT)
    of_speed = f"{name}: time of {ten.replace('proximal, 10', '10 proximal iterations')} / exact"
    of_memory = of_speed.replace("time", "memory")
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


def one_shape(name: str, dtype: torch.dtype, arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Tables and requirements of one batch."""
    device, shape = torch.device(arguments.device), SHAPES[name]
    on_cpu = device.type == "cpu"
    sizes = _sizes(name, arguments)
    batch = Batch(sizes, shape.heads, shape.width, device, dtype)
    methods = batch.methods()
    replay = () if on_cpu else (EXACT, RELATIVE, SDPA, PADDED, proximal(10))
    found = Measured.of(methods, device, replay, budget=arguments.seconds)
    lines = [
        "",
        f"{name}: {len(sizes)} of {shape.graphs} graphs, {np.mean(sizes):.0f} nodes each ({min(sizes)} to {max(sizes)}), "
        f"{shape.heads} heads of width {shape.width}, {_name(dtype)}",
        *found.table(list(methods), SDPA if on_cpu else PADDED),
    ]
    if on_cpu:
        lines += distances(batch)
    else:
        lines += shares(batch, found.best)
        lines += kernel_table(methods[EXACT], device, steps=5)
    return lines, requirements(name, found, device)


def report(arguments: argparse.Namespace) -> Iterator[str]:
    device = torch.device(arguments.device)
    tf32 = ", TF32 allowed" if arguments.tf32 else ""
    versions = {"NumPy": np.__version__}
    if device.type == "cuda":
        import triton

        versions["Triton"] = triton.__version__
    yield from header(device, **versions)
    yield f"numbers   {', '.join(arguments.dtype)}{tf32}; λ = {LAM:g}/n, α = {ALPHA}"
    if device.type == "cuda":
        yield "ratios    of replayed CUDA graphs; to and of plain proximal iterations, of plain calls"
        print("compiling …", file=sys.stderr, flush=True)
        compile_kernels(_cases(arguments), device)
    checks: list[str] = []
    for dtype in arguments.dtype:
        checks += ["", f"requirements, {dtype}"]
        for name in arguments.shapes:
            print(f"measuring {name}, {dtype} …", file=sys.stderr, flush=True)
            tables, met = one_shape(name, getattr(torch, dtype), arguments)
            yield from tables
            checks += met
    if arguments.large:
        checks += ["", "requirements, one large graph"]
    for nodes in arguments.large:
        print(f"measuring {nodes} nodes …", file=sys.stderr, flush=True)
        tables, met = one_large_graph(nodes, device, arguments.seconds)
        yield from tables
        checks += met
    for dtype in arguments.dtype if arguments.large else []:
        yield from border(getattr(torch, dtype), device, arguments.seconds)
    yield from checks


def _sizes(name: str, arguments: argparse.Namespace) -> list[int]:
    shape = SHAPES[name]
    graphs = arguments.graphs or (shape.on_cpu if arguments.device == "cpu" else shape.graphs)
    return shape.sizes(min(shape.graphs, graphs))


def _cases(arguments: argparse.Namespace) -> list[Case]:
    """All that a report on a GPU compiles kernels for."""
    shapes = {name: SHAPES[name] for name in arguments.shapes}
    cases = [
        Case(_sizes(name, arguments), shape.heads, shape.width, getattr(torch, dtype))
        for name, shape in shapes.items()
        for dtype in arguments.dtype
    ]
    return cases + (samples([getattr(torch, dtype) for dtype in arguments.dtype]) if arguments.large else [])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", nargs="+", choices=["float32", "bfloat16"], help="(default: float32; on a GPU both)"
    )
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--graphs", type=int, help="at most this many in a batch (default: the paper's, fewer on a CPU)"
    )
    parser.add_argument("--threads", type=int, help="of a CPU (default: PyTorch's choice)")
    parser.add_argument("--seconds", type=float, help="for each method and shape (default: 2; on a GPU 0.5)")
    parser.add_argument(
        "--tf32", action="store_true", help="allow TF32 in float32 products on a GPU, for all methods"
    )
    parser.add_argument(
        "--large",
        nargs="*",
        type=int,
        metavar="NODES",
        help="single graphs of these sizes, on a GPU (default there: 16384 131072)",
    )
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if arguments.graphs is not None and arguments.graphs < 1:
        parser.error(f"--graphs must be at least 1, got {arguments.graphs}")
    if arguments.large and not on_gpu:
        parser.error("--large needs --device cuda")
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    if arguments.dtype is None:
        arguments.dtype = ["float32", "bfloat16"] if on_gpu else ["float32"]
    if arguments.large is None:
        arguments.large = [16_384, 131_072] if on_gpu else []
    if arguments.seconds is None:
        arguments.seconds = 0.5 if on_gpu else 2.0
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    publish(report(arguments), arguments.out)


if __name__ == "__main__":
    main()
