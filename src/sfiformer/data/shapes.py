"""Batches of few different shapes: which one a batch of graphs is padded to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sfiformer.data.store import GraphStore

# Multiples of the average batch that a batch may be padded to: dense where most batches lie, and one that holds
# nearly all batches where they hardly differ.
RUNGS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.9, 1.02, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
ROUND = 64  # numbers of nodes, edges and links are multiples of this
FILLER = 16  # nodes of a padding graph, at most


@dataclass(frozen=True)
class BatchShape:
    """The shapes of all tensors of a batch, known before it is gathered.

    Without a filler the graphs fill it exactly. With one, what they leave free is padding: graphs of `filler`
    nodes (the last one of fewer), as many as there are nodes to fill, and graphs without nodes after them.
    """

    graphs: int
    nodes: int
    edges: int
    links: int
    max_nodes: int
    """What no graph exceeds."""
    filler: int = 0
    """Nodes of a padding graph, 0 where there is no padding."""

    def holds(self, sizes: np.ndarray) -> bool:
        """Whether graphs of these sizes [B, 3] (nodes, edges, links) fit, padding included.

        Padding edges and links need a node to lie on, so a shape with a filler is never filled to the last node.
        """
        nodes, edges, links = sizes.sum(0)
        if sizes[:, 0].max(initial=0) > self.max_nodes:
            return False
        if not self.filler:
            return (len(sizes), nodes, edges, links) == (self.graphs, self.nodes, self.edges, self.links)
        padding = -(-(self.nodes - nodes) // self.filler)  # graphs
        return bool(
            nodes < self.nodes
            and edges <= self.edges
            and links <= self.links
            and len(sizes) + padding <= self.graphs
        )

    def slots(self, graphs: np.ndarray) -> np.ndarray:
        """The graphs [B] and -1 for every padding graph: [self.graphs]."""
        return np.concatenate([graphs, np.full(self.graphs - len(graphs), -1)])


def graph_sizes(store: GraphStore, graphs: np.ndarray | None = None) -> np.ndarray:
    """Nodes, edges and links of the graphs with these numbers, of all by default: [B, 3]."""
    graphs = np.arange(len(store)) if graphs is None else graphs
    sizes = np.zeros((len(graphs), 3), dtype=np.int64)
    for level, offsets in enumerate((store.node_ptr, store.edge_ptr, store.link_ptr)):
        if offsets is not None:
            ptr = offsets.numpy()
            sizes[:, level] = ptr[graphs + 1] - ptr[graphs]
    return sizes


def exact_shape(sizes: np.ndarray) -> BatchShape:
    """The shape of a batch of graphs of these sizes [B, 3], without padding."""
    nodes, edges, links = sizes.sum(0).tolist()
    return BatchShape(len(sizes), nodes, edges, links, int(sizes[:, 0].max(initial=0)))


def filler_nodes(store: GraphStore) -> int:
    """Nodes of a padding graph: no more than in the smallest graph, so that the largest of a batch is a real one."""
    return min(FILLER, int(store.node_ptr.diff().min()))


class Ladder:
    """The few shapes that batches of up to `batch_size` graphs of a store (a rank's share) are padded to.

    Rung m holds m times the nodes, edges and links of the average batch, rounded up to multiples of 64, with
    room for the padding graphs of a batch with a fifth fewer nodes than the rung below has (64 at least, if so
    many there can be). `max_nodes` is the store's largest graph on all rungs. All of it is host arithmetic.
    """

    def __init__(self, store: GraphStore, batch_size: int) -> None:
        self.sizes = graph_sizes(store)  # [G, 3]
        self.batch_size = min(batch_size, len(store))
        average = self.sizes.mean(0) * self.batch_size  # [3]
        limits = (-(-np.outer(RUNGS, average) // ROUND) * ROUND).astype(np.int64)  # [rungs, 3]
        self.limits = limits - np.array([1, 0, 0])  # a node at least is padding
        filler, largest = filler_nodes(store), int(self.sizes[:, 0].max())
        below = np.concatenate([[0], limits[:-1, 0]])
        padding = -(-(limits[:, 0] - (0.8 * below).astype(np.int64)) // filler)  # [rungs] graphs
        padding = np.maximum(padding, np.minimum(-(-limits[:, 0] // filler), 64))
        self.rungs = [
            BatchShape(self.batch_size + extra, nodes, edges, links, largest, filler)
            for (nodes, edges, links), extra in zip(limits.tolist(), padding.tolist(), strict=True)
        ]

    def shape(self, graphs: np.ndarray) -> BatchShape:
        """The smallest rung that holds these graphs; for an unusual batch that none holds, its exact shape."""
        sizes = self.sizes[graphs]
        fits = (sizes.sum(0) <= self.limits).all(1)  # [rungs]
        rung = self.rungs[int(fits.argmax())]
        return rung if fits.any() and rung.holds(sizes) else exact_shape(sizes)

    def shapes(self, batches: Sequence[np.ndarray]) -> tuple[BatchShape, ...]:
        """The shapes of batches that make one step: one and the same, so that few combinations come up, if it holds all."""
        shapes = tuple(map(self.shape, batches))
        common = max(shapes, key=lambda shape: (shape.nodes, shape.edges, shape.links))
        if common.filler and all(common.holds(self.sizes[graphs]) for graphs in batches):
            return (common,) * len(batches)
        return shapes

    def __repr__(self) -> str:
        return f"Ladder(batch_size={self.batch_size}, {len(self.rungs)} rungs up to {self.rungs[-1]})"
