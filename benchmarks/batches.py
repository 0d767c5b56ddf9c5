"""Packed batches of the paper's shapes and of small molecules, and the attentions to compare on them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from common import Call
from sfiformer import sfi_attention
from sfiformer.flow import Proximal

LAM, ALPHA = 1.0, 0.1  # λ*, the paper's α
ITERATIONS = (10, 50)
EXACT, RELATIVE = "exact", "exact, potential"
SDPA, PADDED, FLASH = "SDPA", "SDPA, padded", "SDPA, flash"


@dataclass(frozen=True)
class Shape:
    """A batch: sizes of graphs from a beta distribution with this mean between these bounds."""

    graphs: int
    on_cpu: int  # graphs where a CPU is to end in minutes
    nodes: tuple[int, int, int]  # least, mean, most
    concentration: float
    heads: int
    width: int

    def sizes(self, graphs: int) -> list[int]:
        """Evenly spaced quantiles in random order, so that any number of graphs has the right mean."""
        least, mean, most = self.nodes
        share = (mean - least) / (most - least)
        law = stats.beta(share * self.concentration, (1 - share) * self.concentration)
        places = law.ppf((np.random.default_rng(0).permutation(graphs) + 0.5) / graphs)
        return (least + (most - least) * places).round().astype(int).tolist()


SHAPES = {
    "voc": Shape(14, 4, (395, 480, 500), 5, 4, 68),
    "peptides": Shape(32, 16, (8, 150, 444), 5, 4, 235),
    "mnist": Shape(256, 64, (40, 71, 75), 20, 4, 40),
    "cluster": Shape(16, 16, (41, 117, 190), 11, 8, 32),
    "molecules": Shape(32, 32, (4, 23, 38), 12, 4, 64),
}


class Batch:
    """Leaf tensors q, k, v, q̃, k̃ [N, heads, width], the gradient of the output, and the methods to compare."""

    def __init__(self, sizes: list[int], heads: int, width: int, device: torch.device, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)

        def normal() -> Tensor:
            return torch.randn(sum(sizes), heads, width, generator=generator).to(device, dtype)

        self.sizes = sizes
        self.inputs = [normal().requires_grad_() for _ in range(5)]
        self.grad = normal()
        self.ptr = torch.tensor([0, *np.cumsum(sizes).tolist()], device=device)
        self.lam = LAM / self.ptr.diff().clamp(min=1).double()

    def sfi(self, **options: object) -> Call:
        options = {"lam": self.lam, "alpha": ALPHA, "max_nodes": max(self.sizes), **options}
        return self._both(lambda: sfi_attention(*self.inputs, self.ptr, **options), self.inputs, self.grad)

    def sdpa(self, *backends: SDPBackend) -> Call:
        def attend() -> Tensor:
            graphs = zip(*(x.split(self.sizes) for x in self.inputs[:3]), strict=True)
            with sdpa_kernel(list(backends)) if backends else nullcontext():
                return torch.cat([_dense(*(x.transpose(0, 1)[None] for x in graph)) for graph in graphs])

        return self._both(attend, self.inputs[:3], self.grad)

    def padded_sdpa(self) -> Call:
        """On [graphs, heads, largest, width], with a mask that keeps the padding out."""
        padded = [
            pad_sequence(list(x.detach().split(self.sizes)), batch_first=True).transpose(1, 2).contiguous()
            for x in (*self.inputs[:3], self.grad)
        ]
        leaves, grad = [x.requires_grad_() for x in padded[:3]], padded[3]
        mask = torch.arange(max(self.sizes), device=grad.device) < self.ptr.diff()[:, None]
        return self._both(
            lambda: F.scaled_dot_product_attention(*leaves, attn_mask=mask[:, None, None]), leaves, grad
        )

    def methods(self) -> dict[str, Call]:
        cpu = self.grad.device.type == "cpu"
        methods = {EXACT: self.sfi(), RELATIVE: self.sfi(lam=LAM, scaling="potential")}
        iterations = ITERATIONS if cpu else ITERATIONS[:1]
        methods |= {proximal(count): self.sfi(solver=Proximal(count)) for count in iterations}
        if not cpu:
            methods[PLAIN] = self.sfi(solver=PlainProximal(ITERATIONS[0]))
        methods[SDPA] = self.sdpa(*[SDPBackend.MATH] * cpu)
        return methods if cpu else methods | {PADDED: self.padded_sdpa()}

    @staticmethod
    def _both(forward: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> Call:
        return lambda: torch.autograd.grad(forward(), leaves, grad)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, heads, n, width] → [n, heads, width]"""
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


class PlainProximal(Proximal):
    """The iteration in plain PyTorch on a GPU, too: the kernels are for `Proximal` itself alone."""


def proximal(iterations: int) -> str:
    return f"proximal, {iterations}"


PLAIN = f"{proximal(ITERATIONS[0])}, plain"
