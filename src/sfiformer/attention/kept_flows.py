"""Attention with every flow kept, and autograd through all of it: for pictures, the paper's iteration, a test's oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sfiformer.attention.iteration import FusedProximal
from sfiformer.flow import Proximal
from sfiformer.flow.precision import wide
from sfiformer.flow.problem import Scaling, Solver, flows_from_scores

# Of the sizes of graphs that are iterated together, at most. On a GPU what counts is the number of operations; on a CPU it is
# also what padding costs.
RATIOS = {"cpu": 1.1, "cuda": 4.0}


class Settings(NamedTuple):
    """Of flows and attention: arguments of `sfi_attention`."""

    alpha: float
    scaling: Scaling
    scale: float
    dropout_p: float
    solver: Solver
    check: bool


def attention_and_flows(
    inputs: tuple[Tensor, ...], ptr: Tensor, lam: Tensor, settings: Settings
) -> tuple[Tensor, list[Tensor]]:
    """Attention [N, heads, width of v] of q, k, v, q̃ and k̃, and the flows before dropout, [heads, n, n] for each graph.

    Exact flows are solved for graph by graph. An iteration is many small operations, and so goes over graphs of like sizes at
    once, unless it ends by a tolerance, which is a graph's own.
    """
    q, _, v, *_ = inputs
    sizes, work = ptr.diff().tolist(), torch.promote_types(q.dtype, torch.float32)
    solver = settings.solver
    iterated = solver == "proximal" or (isinstance(solver, Proximal) and not solver.tolerance)
    outs, places = [v[:0]], [ptr[:0]]
    flows = [q.new_zeros((q.shape[1], 0, 0), dtype=work)] * len(sizes)
    with torch.autocast(q.device.type, enabled=False):
        for graphs in _alike(sizes, RATIOS.get(q.device.type, 1.0) if iterated else 0.0):
            block = _Block(ptr, graphs, max(sizes[graph] for graph in graphs))
            padded = [wide(block.padded(x)) for x in inputs]
            out, z = attend_padded(padded, block.real, lam[graphs], settings)
            for graph, own in zip(graphs, z, strict=True):
                flows[graph] = own[:, : sizes[graph], : sizes[graph]]
            outs.append(block.packed(out).to(v.dtype))
            places.append(block.nodes)
    return torch.cat(outs)[torch.cat(places).argsort()], flows


def attend_padded(
    padded: list[Tensor],
    real: Tensor,
    lam: Tensor,
    settings: Settings,
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> tuple[Tensor, Tensor]:
    """Attention and flows before dropout, [b, heads, n, width of v] and [b, heads, n, n], of graphs side by side.

    Args:
        padded: q, k, v, q̃, k̃, [b, heads, n, width].
        real: [b, n], which nodes there are.
        lam: λ of each graph, [b].
        product: of matrices, in all that is not the solver's.
    """
    alpha, scaling, scale, dropout_p, solver, check = settings
    q, k, v, q_friction, k_friction = padded
    s, u = product(q, k.mT), product(q_friction, k_friction.mT)
    if isinstance(solver, FusedProximal) and solver.serves(s.shape[-1], alpha, scale, scaling, check):
        z = solver.of_scores(s, u, lam, real.sum(1), alpha=alpha, scale=scale)
    else:
        links = (real.unsqueeze(1) & real.unsqueeze(2)).unsqueeze(1).expand_as(s)
        z = flows_from_scores(
            s * scale,
            u * scale,
            lam=lam.view(-1, 1, 1),
            alpha=alpha,
            scaling=scaling,
            mask=links,
            solver=solver,
            check=check,
        )
    return product(F.dropout(z, dropout_p) if dropout_p else z, v), z


def _alike(sizes: list[int], ratio: float) -> Iterator[list[int]]:
    """All graphs with nodes, those together whose sizes have no more than this ratio; less than 1: each alone."""
    some: list[int] = []
    for graph in sorted((g for g, size in enumerate(sizes) if size), key=lambda g: sizes[g]):
        if some and sizes[graph] > ratio * sizes[some[0]]:
            yield some
            some = []
        some.append(graph)
    if some:
        yield some


class _Block:
    """Some graphs side by side, b of them, padded to n nodes each."""

    def __init__(self, ptr: Tensor, graphs: list[int], size: int) -> None:
        starts, ends = ptr[:-1][graphs], ptr[1:][graphs]
        nodes = starts.unsqueeze(1) + torch.arange(size, device=ptr.device)
        self.real = nodes < ends.unsqueeze(1)  # [b, n]
        self.nodes = nodes[self.real]  # in their order in the block

    def padded(self, packed: Tensor) -> Tensor:
        """[N, heads, width] → [b, heads, n, width]."""
        own, (count, size) = packed.index_select(0, self.nodes), self.real.shape
        at = self.real.flatten().nonzero().squeeze(1)
        rows = own.new_zeros((count * size, *own.shape[1:])).index_copy(0, at, own)
        return rows.view(count, size, *own.shape[1:]).transpose(1, 2)

    def packed(self, padded: Tensor) -> Tensor:
        """[b, heads, n, width] → [nodes, heads, width]."""
        return padded.transpose(1, 2)[self.real]
