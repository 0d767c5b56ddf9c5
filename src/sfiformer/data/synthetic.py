"""PATTERN and CLUSTER: node classification on stochastic block models, generated from a seed.

In a stochastic block model every pair of nodes is joined independently, with probability p within a community
and q across two. All graphs of a chunk are drawn at once, as flat arrays over their node pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sfiformer.data.store import GraphStore

SPLITS = ("train", "val", "test")
SMALLEST, LARGEST = 5, 34  # community and pattern sizes are uniform in this range
CHUNK = 256  # graphs drawn at once: some 2 million node pairs
Sizes = tuple[int, int, int]

# Graphs in train, val and test. The full sizes are the published ones.
CLUSTER_SIZES: dict[str, Sizes] = {"full": (10_000, 1_000, 1_000), "small": (600, 150, 150)}
PATTERN_SIZES: dict[str, Sizes] = {"full": (10_000, 2_000, 2_000), "small": (600, 150, 150)}


@dataclass
class Chunk:
    """Some graphs, laid end to end: sizes and edge counts [B], edge_index [2, E], x [N, classes], y [N]."""

    nodes: np.ndarray
    edges: np.ndarray
    edge_index: np.ndarray
    x: np.ndarray
    y: np.ndarray


DrawChunk = Callable[[np.random.Generator, np.ndarray], Chunk]


def cluster(size: str | Sizes = "full", seed: int = 0) -> dict[str, GraphStore]:
    """CLUSTER: find the six communities of a graph from one marked node of each.

    Six communities, p = 0.55, q = 0.25. `x` [N, 7] is one-hot: c + 1 for the one marked node of community c,
    0 for all others; `y` [N] is the community.

    Args:
        size: "full", "small", or the numbers of training, validation and test graphs.
        seed: the same seed and size give the same graphs.
    """
    return _splits(_cluster_chunk, _sizes(size, CLUSTER_SIZES), seed)


def pattern(size: str | Sizes = "full", seed: int = 0) -> dict[str, GraphStore]:
    """PATTERN: find the nodes of one of 100 patterns, which is hidden in a graph of five communities.

    Communities: p = 0.5, q = 0.35, features uniform in {0, 1, 2}. A pattern is a fixed graph with p = 0.5 and
    fixed features of the same kind, whose nodes are joined to the others with probability 0.5. `x` [N, 3] is
    one-hot; `y` [N] is 1 in the pattern. Each pattern has its equal share of every split.

    Args:
        size: "full", "small", or the numbers of training, validation and test graphs.
        seed: the same seed and size give the same graphs.
    """
    patterns = _Patterns.draw(np.random.default_rng([seed, len(SPLITS)]))
    return _splits(patterns.chunk, _sizes(size, PATTERN_SIZES), seed)


def _sizes(size: str | Sizes, named: dict[str, Sizes]) -> Sizes:
    if isinstance(size, str):
        if size not in named:
            raise ValueError(f"size '{size}' is none of {', '.join(named)}, nor three numbers of graphs")
        return named[size]
    if len(size) != 3 or min(size) < 1:
        raise ValueError(f"size {size}: give three positive numbers of graphs, for train, val and test")
    return size


def _splits(draw_chunk: DrawChunk, sizes: Sizes, seed: int) -> dict[str, GraphStore]:
    stores = {}
    for split, graphs in enumerate(sizes):
        chunks = [
            draw_chunk(
                np.random.default_rng([seed, split, first]), np.arange(first, min(first + CHUNK, graphs))
            )
            for first in range(0, graphs, CHUNK)
        ]
        stores[SPLITS[split]] = _store(chunks)
    return stores


def _store(chunks: list[Chunk]) -> GraphStore:
    def offsets(counts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(counts))]))

    return GraphStore(
        node_ptr=offsets([chunk.nodes for chunk in chunks]),
        edge_ptr=offsets([chunk.edges for chunk in chunks]),
        edge_index=torch.from_numpy(np.concatenate([chunk.edge_index for chunk in chunks], axis=1)),
        node={
            "x": torch.from_numpy(np.concatenate([chunk.x for chunk in chunks])),
            "y": torch.from_numpy(np.concatenate([chunk.y for chunk in chunks])),
        },
    )


def _cluster_chunk(rng: np.random.Generator, graphs: np.ndarray) -> Chunk:
    communities = 6
    sizes = rng.integers(SMALLEST, LARGEST + 1, (graphs.size, communities))
    nodes = sizes.sum(1)
    community = np.repeat(np.tile(np.arange(communities), graphs.size), sizes.ravel())  # [N]
    marked = np.zeros(community.size, dtype=bool)
    marked[np.cumsum(sizes.ravel()) - sizes.ravel()] = True  # the first of each, before they are shuffled
    order = _shuffle(rng, nodes)
    community, marked = community[order], marked[order]

    u, v, graph = _pairs(nodes)
    joined = rng.random(u.size) < np.where(community[u] == community[v], 0.55, 0.25)
    feature = np.where(marked, community + 1, 0)
    return _chunk(nodes, u[joined], v[joined], graph[joined], _one_hot(feature, communities + 1), community)


@dataclass
class _Patterns:
    """The patterns of a PATTERN dataset, shared by its splits."""

    sizes: np.ndarray  # [P]
    joined: np.ndarray  # [P, 34, 34] bool, symmetric
    feature: np.ndarray  # [P, 34]

    @classmethod
    def draw(cls, rng: np.random.Generator) -> _Patterns:
        count = 100
        upper = np.triu(rng.random((count, LARGEST, LARGEST)) < 0.5, 1)
        return cls(
            sizes=rng.integers(SMALLEST, LARGEST + 1, count),
            joined=upper | upper.transpose(0, 2, 1),
            feature=rng.integers(0, 3, (count, LARGEST)),
        )

    def chunk(self, rng: np.random.Generator, graphs: np.ndarray) -> Chunk:
        communities = 5
        which = graphs % self.sizes.size  # [B], the pattern of each graph
        sizes = rng.integers(SMALLEST, LARGEST + 1, (graphs.size, communities + 1))
        sizes[:, -1] = self.sizes[which]
        nodes = sizes.sum(1)
        blocks = sizes.ravel()
        community = np.repeat(
            np.tile(np.arange(communities + 1), graphs.size), blocks
        )  # [N]; 5 is the pattern
        place = np.arange(community.size) - np.repeat(
            np.cumsum(blocks) - blocks, blocks
        )  # [N], within the block
        order = _shuffle(rng, nodes)
        community, place = community[order], place[order]
        hidden = community == communities

        u, v, graph = _pairs(nodes)
        probability = np.where(community[u] == community[v], 0.5, 0.35)
        probability[hidden[u] != hidden[v]] = 0.5
        joined = rng.random(u.size) < probability
        both = np.flatnonzero(hidden[u] & hidden[v])
        joined[both] = self.joined[which[graph[both]], place[u[both]], place[v[both]]]
        feature = rng.integers(0, 3, hidden.size)
        feature[hidden] = self.feature[np.repeat(which, nodes)[hidden], place[hidden]]
        return _chunk(nodes, u[joined], v[joined], graph[joined], _one_hot(feature, 3), hidden)


def _shuffle(rng: np.random.Generator, nodes: np.ndarray) -> np.ndarray:
    """A random order [N] of the nodes within each graph."""
    graph = np.repeat(np.arange(nodes.size), nodes)
    return np.lexsort((rng.random(graph.size), graph))


def _pairs(nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs u < v of nodes of the same graph, as rows of the chunk, and the graph of each pair."""
    graph = np.repeat(np.arange(nodes.size), nodes)  # [N]
    last = np.repeat(np.cumsum(nodes), nodes)  # [N], one past the last node of the graph
    row = np.arange(graph.size)
    partners = last - row - 1
    u = np.repeat(row, partners)
    v = np.arange(u.size) - np.repeat(np.cumsum(partners) - partners, partners) + u + 1
    return u, v, graph[u]


def _chunk(
    nodes: np.ndarray, u: np.ndarray, v: np.ndarray, graph: np.ndarray, x: np.ndarray, y: np.ndarray
) -> Chunk:
    """Both directions of the edges u – v, sorted by destination, with ids that count from 0 in each graph."""
    source, destination = np.concatenate([u, v]), np.concatenate([v, u])
    order = np.argsort(destination, kind="stable")
    first = np.cumsum(nodes) - nodes  # [B]
    shift = np.concatenate([first[graph], first[graph]])[order]
    return Chunk(
        nodes=nodes,
        edges=2 * np.bincount(graph, minlength=nodes.size),
        edge_index=(np.stack([source[order], destination[order]]) - shift).astype(np.uint8),
        x=x,
        y=y.astype(np.uint8),
    )


def _one_hot(feature: np.ndarray, classes: int) -> np.ndarray:
    # Floats, so that a batch hands them out as such; float16 holds 0 and 1 exactly.
    return np.eye(classes, dtype=np.float16)[feature]
