"""What the benchmarks share: the header of a report, timing in turns, peak memory, requirements, and writing a report whole."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from sfiformer.data.files import whole_file

Call = Callable[[], object]


def header(device: torch.device, **versions: str) -> list[str]:
    """Date, machine, load and versions, one line each."""
    machine = f"{processor()}, {torch.get_num_threads()} of them used"
    if device.type == "cuda":
        machine += f"; {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    packages = {"Python": platform.python_version(), "PyTorch": torch.__version__, **versions}
    if device.type == "cpu":
        packages["Numba"] = version("numba") if find_spec("numba") else "missing"
    return [
        f"date      {datetime.now().astimezone():%Y-%m-%d %H:%M %z}",
        f"machine   {machine}",
        f"load      {', '.join(f'{load:.2f}' for load in os.getloadavg())} over 1, 5 and 15 minutes, at the start",
        f"versions  {', '.join(f'{name} {version}' for name, version in packages.items())}",
    ]


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(call: Call, device: torch.device, count: int = 1) -> float:
    """Of one call, over ``count`` of them, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / count


def captured(call: Call) -> Call:
    """The same work as a CUDA graph, which is launched at once: its time is the device's, not the host's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # libraries prepare themselves for another stream
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timings(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    budget: float = 5.0,
    turns: tuple[int, int] = (3, 25),
    least: float = 0.02,
) -> dict[str, list[float]]:
    """Seconds of each call, one number a turn. They take turns, so that what disturbs the machine disturbs all of them.

    Args:
        calls: by name.
        device: where they run.
        budget: seconds for each call, after which it sits out.
        turns: of each call, at least and at most, whatever the budget.
        least: seconds of one measurement; a call that is faster is repeated within it.
    """
    counts = {}
    for name, call in calls.items():
        once = seconds(call, device)  # warms up
        counts[name] = 1 if once > 50 * least else max(1, round(least / max(seconds(call, device), 1e-6)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns[1]):
        for name, call in calls.items():
            if turn < turns[0] or sum(taken[name]) * counts[name] < budget:
                taken[name].append(seconds(call, device, counts[name]))
    return taken


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory that tensors made during the call held at a time.

    On a GPU that is what PyTorch's allocator says. On a CPU the profiler reports every allocation and release of tensor
    memory, also those inside operators and of what autograd saves; the peak is the largest sum of them. Process memory would
    not do: the C library keeps what is released, and hands it out again. The profiler hears of one thread alone, and so there
    is one: each further thread of attention holds a chunk of its own.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces its start and end
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
    finally:
        torch.set_num_threads(threads)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def judged(
    what: str, value: float, limit: float, *, at_least: bool = False, goal: float | None = None
) -> str:
    """One requirement, what was measured, and whether that meets it (what ran out of memory does not)."""

    def verdict(bound: float) -> str:
        return "met" if (value >= bound if at_least else value <= bound) else "not met"

    sign = "≥" if at_least else "≤"
    line = f"  {what:<52}{value:>8.2f}  {f'{sign} {limit:g}':>6}  {verdict(limit):<8}"
    return line.rstrip() if goal is None else f"{line} goal {sign} {goal:g}: {verdict(goal)}"


def publish(lines: Iterable[str], out: Path | None) -> None:
    """Prints a report line by line as it comes about and, where ``out`` is given, writes it there, all of it or nothing."""
    report = []
    for line in lines:
        print(line, flush=True)
        report.append(line + "\n")
    if out:
        with whole_file(out) as file:
            file.write("".join(report).encode())
