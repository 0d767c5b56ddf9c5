"""Where the time of a training step goes, by PyTorch's profiler: kernels on a GPU, operators on a CPU.

A kernel belongs where it was launched from: its group is the first whose pattern is found in the names of the kernel and
of the operators and ranges around its launch. On a CPU an operator counts with the time that it does not spend in others.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from common import Call, synchronize

DATA = "gathering a batch"  # a range around it, in all loops
GROUPS = {
    "data": DATA,
    "optimiser, clipping": r"Optimizer\.|_foreach_|multi_tensor_apply|squares_kernel|update_kernel",
    "attention": r"(fused|packed)_attention|scaled_dot_product|fmha|flash_fwd|flash_bwd",
    "GatedGCN, adjacency": r"gated_sum|distance_gate|neighbour_sum|segment_sum|index_?add|index_?select|scatter|gather|sort",
    "norms": r"(batch|layer|rms|mixed)_?norm",
    "matrix products": r"gemm|gemv|nvjet|cutlass|aten::(add|b|badd)?mm\b|addmm|linear",
    "rest": "",
}
PATTERNS = {group: re.compile(pattern, re.IGNORECASE) for group, pattern in GROUPS.items()}
RANGES = ("cpu_op", "user_annotation")
LAUNCHES = ("cuda_runtime", "cuda_driver")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
KERNELS_SHOWN = 12  # in the table of one call


@dataclass
class Breakdown:
    """Of one step: milliseconds and numbers of kernels (or operators) by group."""

    milliseconds: dict[str, float]
    counts: dict[str, float]
    busy: float  # milliseconds in which there was any: kernels on several streams overlap

    @classmethod
    def of(cls, call: Call, device: torch.device, steps: int) -> Breakdown:
        """From a call that does so many steps."""
        events = _trace(call, device)
        pieces = _kernels(events) if device.type == "cuda" else _operators(events)
        milliseconds, counts = dict.fromkeys(GROUPS, 0.0), dict.fromkeys(GROUPS, 0.0)
        for where, microseconds in pieces:
            group = next(group for group, pattern in PATTERNS.items() if pattern.search(where))
            milliseconds[group] += microseconds / 1e3 / steps
            counts[group] += 1 / steps
        kernels = [(event["ts"], event["dur"]) for event in events if event.get("cat") in KERNELS]
        return cls(milliseconds, counts, covered(kernels) / 1e3 / steps)

    @property
    def total(self) -> float:
        return sum(self.milliseconds.values())

    @property
    def count(self) -> float:
        return sum(self.counts.values())

    def lines(self) -> Iterator[str]:
        for group, spent in self.milliseconds.items():
            yield f"    {group:<22}{spent:>10.3f}{spent / max(self.total, 1e-9):>9.1%}{self.counts[group]:>9.0f}"
        yield f"    {'sum':<22}{self.total:>10.3f}{'':>9}{self.count:>9.0f}"


def kernel_table(call: Call, device: torch.device, steps: int = 1) -> list[str]:
    """The kernels of a call by their time, those of one name and grid (of threads) together."""
    call()

    def several() -> None:
        for _ in range(steps):
            call()

    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in _trace(several, device):
        if event.get("cat") in KERNELS:
            name = re.split(r"[<(]", event["name"])[0].rsplit("::", 1)[-1].removeprefix("void ")
            sizes = event.get("args", {})
            grid = "×".join(str(size) for size in sizes.get("grid", ()) if size > 1) or "1"
            spent[name[:34], f"{grid} of {math.prod(sizes.get('block', ()))}"].append(
                event["dur"] / 1e3 / steps
            )
    total = sum(map(sum, spent.values()))
    lines = [f"  {'kernels of exact':<36}{'grid':>16}{'number':>8}{'ms':>10}{'share':>8}"]
    for (name, grid), times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:KERNELS_SHOWN]:
        number = len(times) / steps
        lines.append(f"  {name:<36}{grid:>16}{number:>8.0f}{sum(times):>10.3f}{sum(times) / total:>8.1%}")
    return [*lines, f"  {'all':<52}{sum(map(len, spent.values())) / steps:>8.0f}{total:>10.3f}"]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans (start, length)."""
    total, end = 0.0, -math.inf
    for start, length in sorted(spans):
        total += max(0.0, start + length - max(start, end))
        end = max(end, start + length)
    return total


def _trace(call: Call, device: torch.device) -> list[dict[str, Any]]:
    """The profiler's events during a call, those with a duration."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces its start and end
    on_gpu = [ProfilerActivity.CUDA] * (device.type == "cuda")
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiler:
        call()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and "dur" in event]


def _nested(events: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each event of a host thread with those around it, outermost first."""
    threads = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for thread in threads.values():
        around: list[dict[str, Any]] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while around and event["ts"] >= around[-1]["ts"] + around[-1]["dur"]:
                around.pop()
            yield event, around
            around.append(event)


def _kernels(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """(names of what a kernel was launched from and its own, microseconds)"""
    launched = {}
    for event, around in _nested(event for event in events if event.get("cat") in RANGES + LAUNCHES):
        if event["cat"] in LAUNCHES:
            launched[event["args"].get("correlation")] = " > ".join(outer["name"] for outer in around)
    for event in events:
        if event.get("cat") in KERNELS:
            place = launched.get(event["args"].get("correlation"), "")
            yield f"{place} > {event['name']}", event["dur"]


def _operators(events: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """(names of the operators around one and its own, microseconds spent in none of those within)"""
    spent: dict[int, float] = {}
    names: dict[int, str] = {}
    for event, around in _nested(event for event in events if event.get("cat") in RANGES):
        spent[id(event)] = event["dur"]
        names[id(event)] = " > ".join(outer["name"] for outer in (*around, event))
        if around:
            spent[id(around[-1])] -= event["dur"]
    return [(names[key], spent[key]) for key in spent]
