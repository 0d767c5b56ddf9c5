"""The paper's iteration over all graphs of a batch at once: side by side in few blocks, by size, and never waiting.

On a GPU asking for the sizes of graphs would wait. What is known without asking: no graph exceeds the largest, and of N nodes
there can be no more than N/n graphs with n nodes or more. So the graph that comes r-th by its size, from 0, has at most
N/(r + 1), and the blocks that hold them all can be laid out before anything is known of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfiformer.attention.iteration import FusedProximal
from sfiformer.attention.kept_flows import Settings, attend_padded
from sfiformer.flow.precision import wide

MOST_KEPT = 1 << 30  # numbers that a layer holds at a time
BESIDE_STEPS = 8  # blocks of scores that are, besides one for each step
WORTH = 1 << 23  # flows that another block has to save: it is some fifty kernels more


class Block(NamedTuple):
    """Graphs by their places in descending order of size, and what none of them exceeds."""

    first: int
    end: int
    size: int

    @property
    def flows(self) -> int:
        """Of a head."""
        return (self.end - self.first) * self.size**2


def blocks_of(nodes: int, graphs: int, max_nodes: int, heads: int) -> list[Block]:
    """The blocks of a batch: from each to the next sizes halve at least, where that saves enough."""
    blocks, first = [], 0
    while first < graphs:
        size = min(max_nodes, nodes // (first + 1))
        halved = -(-2 * nodes // max(size, 1)) - 1  # from this place on they have half of that at most
        end = max(first + 1, halved)
        saved = (graphs - end) * (size**2 - (size // 2) ** 2) * heads
        blocks.append(Block(first, end if saved > WORTH else graphs, size))
        first = blocks[-1].end
    return [block for block in blocks if block.size]


def have_room(blocks: list[Block], heads: int, steps: int) -> bool:
    """Whether so many steps of all flows can be kept at a time."""
    flows = sum(block.flows for block in blocks) * heads
    return 0 < flows * (steps + BESIDE_STEPS) <= MOST_KEPT


def kept_steps(iterations: int, learning: bool) -> int:
    """All, for a derivative, else no more than two."""
    return iterations if learning else min(iterations, 2)


def side_by_side(q: Tensor, ptr: Tensor, solver: FusedProximal, max_nodes: int | None) -> list[Block]:
    """The blocks of a batch; none where the size of the largest graph is not known, or all would not have room."""
    if max_nodes is None or max_nodes < 1 or not q.numel() or len(ptr) < 2:
        return []
    blocks = blocks_of(len(q), len(ptr) - 1, min(max_nodes, len(q)), q.shape[1])
    steps = kept_steps(solver.iterations, torch.is_grad_enabled())
    return blocks if have_room(blocks, q.shape[1], steps) else []


def attention_side_by_side(
    inputs: tuple[Tensor, ...], ptr: Tensor, lam: Tensor, settings: Settings, blocks: list[Block]
) -> Tensor:
    """Attention [N, heads, width of v] of q, k, v, q̃ and k̃. Unless values are checked nothing waits for the device."""
    like = inputs[2]
    product = torch.matmul if torch.finfo(like.dtype).bits > 16 else _InTF32.apply
    places = _Places.of(ptr, len(like))
    out = torch.zeros((), dtype=like.dtype, device=like.device)
    with torch.autocast(like.device.type, enabled=False):
        for block in blocks:
            padding = _Padding(ptr, places, block)
            padded = [padding.padded(wide(x)) for x in inputs]
            own = lam.index_select(0, padding.graphs)
            found, _ = attend_padded(padded, padding.real, own, settings, product)
            out = out + padding.packed(found).to(like.dtype)
    return out


class _Places(NamedTuple):
    """Where nodes are among the graphs in descending order of size."""

    order: Tensor  # [graphs]
    rank: Tensor  # [N], of a node's graph in that order; behind them all for nodes behind the last graph
    within: Tensor  # [N], a node's place in its graph

    @classmethod
    def of(cls, ptr: Tensor, nodes: int) -> _Places:
        order = ptr.diff().argsort(descending=True, stable=True)
        ranks = torch.cat([order.argsort(), order.new_full((1,), len(order))])
        packed = torch.arange(nodes, device=ptr.device)
        graph = torch.searchsorted(ptr[1:], packed, right=True)
        return cls(order, ranks.index_select(0, graph), packed - ptr.index_select(0, graph))


class _Padding:
    """Packed nodes as the graphs of a block side by side, each of n nodes, and back."""

    def __init__(self, ptr: Tensor, places: _Places, block: Block) -> None:
        self.graphs, size = places.order[block.first : block.end], block.size  # [b]
        rows = ptr.index_select(0, self.graphs).unsqueeze(1) + torch.arange(size, device=ptr.device)
        self.real = rows < ptr.index_select(0, self.graphs + 1).unsqueeze(1)  # [b, n]
        rank = places.rank - block.first
        inside = (places.within >= 0) & (places.within < size)
        self.owned = (rank >= 0) & (rank < len(self.graphs)) & inside  # [N]
        # Where a row comes from: places stand for none where `real` and `owned` say so.
        self.of_padded = torch.where(self.real, rows, 0).flatten()  # [b · n]
        self.of_packed = torch.where(self.owned, rank * size + places.within, 0)  # [N]

    def padded(self, x: Tensor) -> Tensor:
        """[N, heads, width] → [b, heads, n, width]."""
        rows = _Rows.apply(x, self.of_padded, self.real.flatten(), self.of_packed, self.owned)
        return rows.view(*self.real.shape, *x.shape[1:]).transpose(1, 2).contiguous()

    def packed(self, x: Tensor) -> Tensor:
        """[b, heads, n, width] → [N, heads, width]; 0 for a node of other graphs, or of none."""
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


class _InTF32(torch.autograd.Function):
    """A product of matrices in TF32, and its derivatives: as good as in float32 where factors were in half precision."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with _tf32():
            return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        with _tf32():
            return grad @ b.mT, a.mT @ grad


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
