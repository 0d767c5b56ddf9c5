"""The paper's iteration over all graphs of a batch at once, each padded to the largest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sfiformer.attention.iteration import FusedProximal
from sfiformer.attention.kept_flows import Settings, attend_padded
from sfiformer.flow.precision import wide

MOST_PADDED = 4  # times as many nodes as there are
MOST_KEPT = 1 << 30  # numbers that are held at a time
BESIDE_STEPS = 8  # blocks of scores that are, besides one for each step


def in_one_block(q: Tensor, ptr: Tensor, solver: FusedProximal, max_nodes: int | None) -> bool:
    """Whether all graphs are iterated at once: where the size of the largest is known, and most are not much smaller."""
    if max_nodes is None or not q.numel() or max_nodes < 1:
        return False
    nodes = (len(ptr) - 1) * max_nodes
    steps = solver.iterations if torch.is_grad_enabled() else 2  # without a derivative two are kept
    kept = nodes * max_nodes * q.shape[1] * (steps + BESIDE_STEPS)
    return 0 < nodes <= MOST_PADDED * len(q) and kept <= MOST_KEPT


def attention_in_one_block(
    inputs: tuple[Tensor, ...], ptr: Tensor, lam: Tensor, settings: Settings, max_nodes: int
) -> Tensor:
    """Attention [N, heads, width of v] of q, k, v, q̃ and k̃. Unless values are checked nothing waits for the device."""
    like = inputs[2]
    padding = _Padding(ptr, len(like), max_nodes)
    with torch.autocast(like.device.type, enabled=False):
        padded = [padding.padded(wide(x)) for x in inputs]
        out, _ = attend_padded(padded, padding.real, lam, settings)
        return padding.packed(out).to(like.dtype)


class _Padding:
    """Packed nodes as graphs side by side, each of n nodes, and back."""

    def __init__(self, ptr: Tensor, nodes: int, size: int) -> None:
        places = ptr[:-1].unsqueeze(1) + torch.arange(size, device=ptr.device)
        self.real = places < ptr[1:].unsqueeze(1)  # [graphs, n]
        packed = torch.arange(nodes, device=ptr.device)
        graph = torch.searchsorted(ptr[1:], packed, right=True)
        within = graph < len(ptr) - 1  # nodes may stand behind the last graph
        graph = graph.clamp(max=len(ptr) - 2)
        self.owned = within & (packed - ptr[graph] < size)
        # Where a row comes from: places stand for none where `real` and `owned` say so.
        self.of_padded = torch.where(self.real, places, 0).flatten()  # [graphs · n]
        self.of_packed = torch.where(self.owned, graph * size + packed - ptr[graph], 0)  # [N]

    def padded(self, x: Tensor) -> Tensor:
        """[N, heads, width] → [graphs, heads, n, width]."""
        rows = _Rows.apply(x, self.of_padded, self.real.flatten(), self.of_packed, self.owned)
        return rows.view(*self.real.shape, *x.shape[1:]).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """[graphs, heads, n, width] → [N, heads, width]; 0 for a node of no graph."""
        rows = x.transpose(1, 2).flatten(0, 1)
        return _Rows.apply(rows, self.of_packed, self.owned, self.of_padded, self.real.flatten())


class _Rows(torch.autograd.Function):
    """Rows from where ``index`` says, 0 where ``there`` does not hold; of two such that undo each other, so that each is the
    other's derivative, without atomics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, there: Tensor, back: Tensor, there_back: Tensor
    ) -> Tensor:
        ctx.save_for_backward(back, there_back, index, there)
        return torch.where(there[:, None, None], x.index_select(0, index), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Rows.apply(grad, *ctx.saved_tensors), None, None, None, None
