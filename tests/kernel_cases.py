"""Inputs for the fused kernels, and the error of kernel and plain twin against float64.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on small graphs; its bfloat16 is wrong).
"""

import math

import pytest
import torch

GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="the kernels need Triton")

from packing import margins, poisoned  # noqa: E402
from sfiformer.attention.kernels import launch  # noqa: E402
from sfiformer.attention.packed import packed_attention  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
SCALINGS = [(0.1, False), (math.inf, False), (0.1, True)]  # alpha, potential


@pytest.fixture(autouse=not GPU)
def few_programs(monkeypatch):
    """So few that each looks through several tiles for rows that are not gentle."""
    monkeypatch.setattr(launch, "FEW", 2)


def make(sizes, heads=2, width=20, value_width=24, spread=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(sizes) + sum(sizes) + width)
    ptr = torch.tensor([0, *sizes]).cumsum(0).to(DEVICE)
    widths = (width, width, value_width, width, width)
    scales = (spread, spread, 1.0, spread, spread)
    tensors = [
        (torch.randn(sum(sizes), heads, w, generator=generator) * c).to(DEVICE, dtype).requires_grad_()
        for w, c in zip(widths, scales, strict=True)
    ]
    grad = torch.randn(sum(sizes), heads, value_width, generator=generator).to(DEVICE, dtype)
    return tensors, ptr, grad


def attend(op, tensors, ptr, lam, alpha, potential, max_nodes, dropout_p=0.0, seed=0):
    width = tensors[0].shape[-1]
    seed = torch.tensor(seed, device=ptr.device)
    tail = (max_nodes,) if op is launch.fused_attention else (None, False)
    return op(*tensors, ptr, lam, seed, alpha, potential, width**-0.5, dropout_p, *tail)[0]


def both(sizes, alpha, potential, margin=0.0, **kwargs):
    """Errors of kernel and plain twin for the output and each gradient, relative to float64.

    Rows within ``margin`` of a jump of the gradient have none.
    """
    tensors, ptr, grad = make(sizes, **kwargs)
    if margin:
        grad = grad * (margins(tensors, ptr, alpha, potential) > margin).unsqueeze(-1)
    counts = torch.tensor(sizes, device=DEVICE).clamp(min=1)
    lam = (torch.ones(len(sizes), device=DEVICE) / (1 if potential else counts)).requires_grad_()

    def run(op, cast):
        inputs = [x.detach().to(cast(x.dtype)).requires_grad_() for x in (*tensors, lam)]
        out = attend(op, inputs[:5], ptr, inputs[5], alpha, potential, max(sizes))
        return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    truth = run(packed_attention, lambda _: torch.float64)
    with poisoned():
        fused = run(launch.fused_attention, lambda d: d)
    results = (fused, run(packed_attention, lambda d: d))
    return [
        [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(r, truth, strict=True)]
        for r in results
    ]


def assert_close_to_twin(kernel, plain, floor):
    assert all(math.isfinite(error) for error in kernel)
    limits = [2 * plain[0] + floor] + [3 * error + floor for error in plain[1:]]
    assert all(error <= limit for error, limit in zip(kernel, limits, strict=True)), (kernel, plain)
