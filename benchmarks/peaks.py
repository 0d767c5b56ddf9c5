"""What a device can do at best, and what share of that an attention reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batches import EXACT, FLASH, PADDED, RELATIVE, Batch


@dataclass(frozen=True)
class Peak:
    """Of one device: operations a second in products of each kind of number, bytes a second to and from memory."""

    operations: dict[str, float]
    bandwidth: float


PEAKS = {"H200": Peak({"bfloat16": 989e12, "tf32": 494e12, "float32": 67e12}, 4.8e12)}  # as published, dense


@dataclass(frozen=True)
class Work:
    """The least that a forward and backward need: products with n² scores, and passes over a tensor [N, heads, width]."""

    products: int
    passes: int


# Forward: s, u and z·v; five inputs and the output. Backward: s, u and dO·v again, dq, dk, dv, dq̃ and dk̃; the five
# inputs again, dO and five gradients.
FLOWS = Work(3 + 8, 6 + 11)
# Forward: s and p·v; three inputs and the output. Backward: s and dO·v again, dq, dk and dv; those four again, dO and three
# gradients.
SOFTMAX = Work(2 + 5, 4 + 8)
WORK = {EXACT: FLOWS, RELATIVE: FLOWS, PADDED: SOFTMAX, FLASH: SOFTMAX}


def shares(batch: Batch, seconds: dict[str, float]) -> list[str]:
    """A table of what each method needs at least, padding not counted, and reaches; none for a device not known."""
    name = torch.cuda.get_device_name() if batch.grad.is_cuda else ""
    peak = next((peak for known, peak in PEAKS.items() if known in name), None)
    if peak is None:
        return []
    nodes, heads, width = batch.grad.shape
    kind = str(batch.grad.dtype).removeprefix("torch.")
    kind = "tf32" if kind == "float32" and torch.backends.cuda.matmul.allow_tf32 else kind
    most = peak.operations[kind]
    lines = [
        f"  {f'at best {most / 1e12:.0f} TFLOP/s ({kind}), {peak.bandwidth / 1e12:.1f} TB/s':<41}"
        f"{'GFLOP':>11}{'of peak':>9}{'MB':>9}{'of peak':>9}"
    ]
    for method, work in WORK.items():
        if method in seconds:
            operations = work.products * 2 * heads * width * sum(n * n for n in batch.sizes)
            moved = work.passes * nodes * heads * width * batch.grad.element_size()
            lines.append(
                f"  {method:<41}{operations / 1e9:>11.1f}{operations / most / seconds[method]:>9.1%}"
                f"{moved / 1e6:>9.1f}{moved / peak.bandwidth / seconds[method]:>9.1%}"
            )
    return lines
