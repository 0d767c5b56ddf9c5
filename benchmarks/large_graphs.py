"""One large graph on a GPU: exact flows in both scalings against SDPA's flash kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from batches import ALPHA, EXACT, FLASH, LAM, RELATIVE, Batch
from breakdown import kernel_table
from common import judged
from compiling import Case
from measured import Measured
from peaks import shares
from sfiformer.attention import kernels

HEADS, WIDTH = 8, 64


def sample() -> Case:
    """The smallest batch with the kernels of large graphs: they are compiled for multiples of 16 rows, as these are."""
    return Case([kernels.MAX_NODES + 16], HEADS, WIDTH, torch.bfloat16)


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
