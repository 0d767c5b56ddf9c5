"""GatedGCN's gated mean fused over the edges of each node: one kernel forward, one backward (`sfiformer.nn.gated_sum`).

A program owns a node and all its channels, and walks over EDGES edges at a time. Sums stay in the program, in float32: there
are no atomics, and two runs agree to the bit. Widths are known when compiling, so that rows load in the widest pieces that
their alignment allows. A program is one warp where the channels allow it: warps that shared a sum would wait for one another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sfiformer.attention import EdgeOrder
from sfiformer.attention.kernels.rows import tile_edges, tile_warps


@triton.jit
def load_rows(base, rows, columns, inside, STRIDE: tl.constexpr):
    """[rows, columns] float32 of a matrix whose rows are STRIDE apart; 0 outside."""
    place = base + rows[:, None] * STRIDE + columns[None, :]
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    nodes, edges, pe_gate, source, by_target, ptr, x_hat, e_hat, stats,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """ê of the edges into one node, and its x̂."""
    i = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    own = tl.load(nodes + i * 4 * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    query = tl.load(nodes + i * 4 * WIDTH + WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    flow = tl.zeros([EDGES, COLUMNS], tl.float32)
    weight = tl.zeros([EDGES, COLUMNS], tl.float32)
    start, end = tl.load(ptr + i), tl.load(ptr + i + 1)
    for first in range(start, end, EDGES):
        edge = first + tl.arange(0, EDGES)
        is_edge = edge < end
        if by_target is not None:
            edge = tl.load(by_target + edge, mask=is_edge, other=0)
        j = tl.load(source + edge, mask=is_edge, other=0)
        inside = is_edge[:, None] & is_column[None, :]
        message = load_rows(nodes + 2 * WIDTH, j, columns, inside, 4 * WIDTH)
        key = load_rows(nodes + 3 * WIDTH, j, columns, inside, 4 * WIDTH)
        e = query[None, :] + key + load_rows(edges, edge, columns, inside, WIDTH)
        e = e.to(e_hat.dtype.element_ty)  # the gate is that of the rounded ê, which the backward sees
        tl.store(e_hat + edge[:, None] * WIDTH + columns[None, :], e, mask=inside)
        gate = tl.sigmoid(e.to(tl.float32))
        if pe_gate is not None:
            gate *= tl.load(pe_gate + edge, mask=is_edge, other=0.0).to(tl.float32)[:, None]
        gate = tl.where(inside, gate, 0.0)
        flow += gate * message
        weight += gate
    total = tl.sum(weight, 0) + 1e-6
    mean = tl.sum(flow, 0) / total
    tl.store(x_hat + i * WIDTH + columns, own + mean, mask=is_column)
    tl.store(stats + i * 2 * WIDTH + columns, mean, mask=is_column)
    tl.store(stats + i * 2 * WIDTH + WIDTH + columns, 1 / total, mask=is_column)


@triton.jit
def edge_gradient(
    e_hat, of_e_hat, pe_gate, edge, is_edge, columns, inside, pull, offset, WIDTH: tl.constexpr
):
    """Of some edges: ∂L/∂ê, the gate η, and ∂L/∂η ⊙ σ(ê), from pull = ∂L/∂x̂_i / Σ η and offset = B x_j − mean_i."""
    sigmoid = tl.sigmoid(load_rows(e_hat, edge, columns, inside, WIDTH))
    of_gate = pull * offset * sigmoid
    gate = sigmoid
    of_e = of_gate * (1 - sigmoid)
    if pe_gate is not None:
        factor = tl.load(pe_gate + edge, mask=is_edge, other=0.0).to(tl.float32)[:, None]
        gate *= factor
        of_e *= factor
    if of_e_hat is not None:
        of_e += load_rows(of_e_hat, edge, columns, inside, WIDTH)
    return of_e, gate, of_gate


@triton.jit
def target_gradients(
    i, nodes, pe_gate, e_hat, stats, of_x_hat, of_e_hat, of_nodes, of_edges, of_pe_gate, source, by_target, ptr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """∂L/∂(A x_i), ∂L/∂(D x_i), and ∂L/∂(C e) and that of the positional gate for the edges into i."""
    columns = tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    given = tl.load(of_x_hat + i * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    mean = tl.load(stats + i * 2 * WIDTH + columns, mask=is_column, other=0.0)
    share = tl.load(stats + i * 2 * WIDTH + WIDTH + columns, mask=is_column, other=0.0)
    pull = (given * share)[None, :]
    of_query = tl.zeros([EDGES, COLUMNS], tl.float32)
    start, end = tl.load(ptr + i), tl.load(ptr + i + 1)
    for first in range(start, end, EDGES):
        edge = first + tl.arange(0, EDGES)
        is_edge = edge < end
        if by_target is not None:
            edge = tl.load(by_target + edge, mask=is_edge, other=0)
        j = tl.load(source + edge, mask=is_edge, other=0)
        inside = is_edge[:, None] & is_column[None, :]
        offset = load_rows(nodes + 2 * WIDTH, j, columns, inside, 4 * WIDTH) - mean[None, :]
        of_e, gate, of_gate = edge_gradient(
            e_hat, of_e_hat, pe_gate, edge, is_edge, columns, inside, pull, offset, WIDTH
        )
        of_query += tl.where(inside, of_e, 0.0)
        place = of_edges + edge[:, None] * WIDTH + columns[None, :]
        tl.store(place, of_e.to(of_edges.dtype.element_ty), mask=inside)
        if pe_gate is not None:
            whole = tl.sum(tl.where(inside, of_gate, 0.0), 1)
            tl.store(of_pe_gate + edge, whole.to(of_pe_gate.dtype.element_ty), mask=is_edge)
    place = of_nodes + i * 4 * WIDTH + columns
    tl.store(place, given.to(of_nodes.dtype.element_ty), mask=is_column)
    tl.store(place + WIDTH, tl.sum(of_query, 0).to(of_nodes.dtype.element_ty), mask=is_column)


@triton.jit
def source_gradients(
    j, nodes, pe_gate, e_hat, stats, of_x_hat, of_e_hat, of_nodes, target, by_source, ptr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """∂L/∂(B x_j) and ∂L/∂(E x_j), from the edges out of j; ∂L/∂ê is made anew, so that nothing waits for the targets."""
    columns = tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    message = tl.load(nodes + j * 4 * WIDTH + 2 * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    of_message = tl.zeros([EDGES, COLUMNS], tl.float32)
    of_key = tl.zeros([EDGES, COLUMNS], tl.float32)
    start, end = tl.load(ptr + j), tl.load(ptr + j + 1)
    for first in range(start, end, EDGES):
        place = first + tl.arange(0, EDGES)
        is_edge = place < end
        edge = tl.load(by_source + place, mask=is_edge, other=0)
        i = tl.load(target + edge, mask=is_edge, other=0)
        inside = is_edge[:, None] & is_column[None, :]
        offset = message[None, :] - load_rows(stats, i, columns, inside, 2 * WIDTH)
        share = load_rows(stats + WIDTH, i, columns, inside, 2 * WIDTH)
        pull = load_rows(of_x_hat, i, columns, inside, WIDTH) * share
        of_e, gate, of_gate = edge_gradient(
            e_hat, of_e_hat, pe_gate, edge, is_edge, columns, inside, pull, offset, WIDTH
        )
        of_message += pull * gate
        of_key += of_e
    place = of_nodes + j * 4 * WIDTH + 2 * WIDTH + columns
    tl.store(place, tl.sum(of_message, 0).to(of_nodes.dtype.element_ty), mask=is_column)
    tl.store(place + WIDTH, tl.sum(of_key, 0).to(of_nodes.dtype.element_ty), mask=is_column)


@triton.jit
def backward_kernel(
    nodes, pe_gate, e_hat, stats, of_x_hat, of_e_hat, of_nodes, of_edges, of_pe_gate,
    source, target, by_target, target_ptr, by_source, source_ptr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """All gradients: of a node as a target, or of a node as a source."""
    node = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        target_gradients(
            node, nodes, pe_gate, e_hat, stats, of_x_hat, of_e_hat, of_nodes, of_edges, of_pe_gate,
            source, by_target, target_ptr, WIDTH, COLUMNS, EDGES,
        )  # fmt: skip
    else:
        source_gradients(
            node, nodes, pe_gate, e_hat, stats, of_x_hat, of_e_hat, of_nodes, target, by_source, source_ptr,
            WIDTH, COLUMNS, EDGES,
        )  # fmt: skip


def forward(
    nodes: Tensor, edges: Tensor, pe_gate: Tensor | None, order: EdgeOrder
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sfiformer.nn.gated_sum.forward`."""
    nodes, edges, pe_gate = nodes.contiguous(), edges.contiguous(), _contiguous(pe_gate)
    count, width = nodes.size(0), edges.size(1)
    x_hat = nodes.new_empty((count, width), dtype=torch.float32)
    e_hat = torch.empty_like(edges)
    stats = nodes.new_empty((count, 2 * width), dtype=torch.float32)
    if count:
        columns, tile, warps = _tile(len(edges), count, width)
        forward_kernel[(count,)](
            nodes, edges, pe_gate, order.source, order.by_target, order.target_ptr, x_hat, e_hat, stats,
            width, columns, tile, num_warps=warps,
        )  # fmt: skip
    return x_hat, e_hat, stats


def backward(
    of_x_hat: Tensor,
    of_e_hat: Tensor | None,
    nodes: Tensor,
    pe_gate: Tensor | None,
    e_hat: Tensor,
    stats: Tensor,
    order: EdgeOrder,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `sfiformer.nn.gated_sum.backward`."""
    nodes, pe_gate = nodes.contiguous(), _contiguous(pe_gate)
    of_x_hat, of_e_hat = of_x_hat.contiguous(), _contiguous(of_e_hat)
    count, width = nodes.size(0), e_hat.size(1)
    of_nodes, of_edges = torch.empty_like(nodes), torch.empty_like(e_hat)
    of_pe_gate = None if pe_gate is None else torch.empty_like(pe_gate)
    if count:
        columns, tile, warps = _tile(len(e_hat), count, width)
        backward_kernel[(count, 2)](
            nodes, pe_gate, e_hat, stats, of_x_hat, of_e_hat, of_nodes, of_edges, of_pe_gate, *order,
            width, columns, tile, num_warps=warps,
        )  # fmt: skip
    return of_nodes, of_edges, of_pe_gate


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _tile(edges: int, nodes: int, width: int) -> tuple[int, int, int]:
    """Columns, edges at a time, and warps."""
    columns = triton.next_power_of_2(width)
    return columns, tile_edges(edges, nodes, columns), tile_warps(columns)
