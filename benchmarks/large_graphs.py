"""Large graphs on a GPU: one of them against SDPA's flash kernel, and where streaming its keys begins to pay."""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from batches import ALPHA, EXACT, FLASH, LAM, RELATIVE, Batch
from breakdown import kernel_table
from common import captured, judged, timings
from compiling import Case
from measured import Measured
from peaks import shares
from sfiformer.attention import kernels

HEADS, WIDTH = 8, 64
BORDER = 256, 512, 1024  # sizes of graphs up to the one from which they are streamed
BORDER_HEADS = (HEADS, WIDTH), (4, 68), (4, 235)  # also those of the voc and peptides shapes
SPREADS = 1, 4  # standard deviations of the scores; wide ones make rows that are measured from a pivot
NODES = 12_288  # of a batch of such graphs


def samples(dtypes: list[torch.dtype]) -> list[Case]:
    """The smallest batches with all kernels of this file: they are compiled for multiples of 16 rows, as these are."""
    sizes = [*BORDER, kernels.MAX_NODES + 16]
    at_the_border = [
        Case([nodes], *heads, dtype, kernels.MAX_NODES, (False,))
        for heads in BORDER_HEADS
        for dtype in dtypes
        for nodes in sizes
    ]
    # Single large graphs are in bfloat16 whatever is asked for.
    return [*at_the_border, Case([sizes[-1]], HEADS, WIDTH, torch.bfloat16)]


def border(dtype: torch.dtype, device: torch.device, seconds: float) -> list[str]:
    """Batches of equal graphs with the forward's rows on chip, and with its keys streaming past: replayed, taking turns."""
    from sfiformer.attention.kernels.launch import MAX_FLOAT32

    name, at = str(dtype).removeprefix("torch."), MAX_FLOAT32 if dtype == torch.float32 else kernels.MAX_NODES
    lines = ["", f"graphs of one size, {NODES} nodes a batch, {name}; the border is {at} nodes"]
    titles = (
        f"{'scores ±' + str(spread) + ': on chip, ms':>27}{'streamed':>10}{'ratio':>7}" for spread in SPREADS
    )
    lines.append(f"  {'heads':<10}{'nodes':>6}{''.join(titles)}")
    for heads, width in BORDER_HEADS:
        for nodes in BORDER:
            batch = Batch([nodes] * (NODES // nodes), heads, width, device, dtype)
            pairs = [
                _on_chip_and_streamed(batch, spread * width**-0.5, device, seconds) for spread in SPREADS
            ]
            cells = (
                f"{1e3 * chip:>27.3f}{1e3 * stream:>10.3f}{stream / chip:>7.2f}" for chip, stream in pairs
            )
            lines.append(f"  {f'{heads} × {width}':<10}{nodes:>6}{''.join(cells)}")
    return lines


def _on_chip_and_streamed(
    batch: Batch, scale: float, device: torch.device, seconds: float
) -> tuple[float, float]:
    """Median seconds of both."""
    from sfiformer.attention.kernels import launch

    call, calls, float32 = batch.sfi(scale=scale), {}, launch.MAX_FLOAT32
    try:
        for where, most in {"chip": kernels.MAX_NODES, "stream": 0}.items():
            launch.MAX_NODES = launch.MAX_FLOAT32 = most
            call()
            calls[where] = captured(call)
    finally:
        launch.MAX_NODES, launch.MAX_FLOAT32 = kernels.MAX_NODES, float32
    chip, stream = (median(times) for times in timings(calls, device, budget=seconds).values())
    return chip, stream


def one_large_graph(nodes: int, device: torch.device, seconds: float) -> tuple[list[str], list[str]]:
    """Tables and requirements of one graph in bfloat16.

    Calls take so long that the device never waits for the host: there is nothing to gain from a CUDA graph.
    """
    batch = Batch([nodes], HEADS, WIDTH, device, torch.bfloat16)
    methods = {
        EXACT: batch.sfi(),
        RELATIVE: batch.sfi(lam=LAM, scaling="potential"),
        FLASH: batch.sdpa(SDPBackend.FLASH_ATTENTION),
    }
    found = Measured.of(methods, device, budget=seconds, turns=(2, 10))
    sizes = (f"{name} {size / nodes:.0f}" for name, size in found.bytes.items())
    lines = [
        "",
        f"one graph of {nodes} nodes, {HEADS} heads of width {WIDTH}, bfloat16",
        *found.table(list(methods), FLASH),
        f"  bytes a node: {'; '.join(sizes)}",
        f"  {EXACT}: {sweeps(batch, batch.lam, potential=False)}",
        f"  {RELATIVE}: {sweeps(batch, torch.full_like(batch.lam, LAM), potential=True)}",
        *shares(batch, found.best),
        *kernel_table(methods[EXACT], device),
    ]
    ratio = found.time_ratio(EXACT, FLASH)
    return lines, [judged(f"{nodes} nodes: time of exact / {FLASH}", ratio, 6, goal=3)]


def sweeps(batch: Batch, lam: Tensor, *, potential: bool) -> str:
    """How often the forward went through all keys; before that it looks several times at a sample of them."""
    from sfiformer.attention.kernels.launch import fused_attention

    if max(batch.sizes) <= kernels.MAX_NODES:
        return "rows on chip, no sweeps"
    tensors = [x.detach() for x in batch.inputs]
    options = (ALPHA, potential, WIDTH**-0.5, 0.0, max(batch.sizes))
    stats = fused_attention(*tensors, batch.ptr, lam.float(), batch.ptr.new_zeros(()), *options)[1]
    counts, pivoted = stats[9].abs(), stats[9] < 0  # [nodes, heads]
    text = f"{float(counts.mean()):.2f} sweeps over the keys a row in the mean, at most {int(counts.max())}"
    return f"{text}; {float(pivoted.float().mean()):.3%} of the rows measured from a pivot"
