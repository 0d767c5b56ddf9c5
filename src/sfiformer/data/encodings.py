"""Positional and structural encodings of a graph: LapPE, ESLapPE and random-walk SE.

All three are of the symmetrised, unweighted graph: directions and weights are dropped, parallel edges count
once, self-loops not at all. Each encoding is a small callable from a graph to the fields that it adds,
computed in float64 and kept as float32; `sfiformer.data.encoding_cache` computes them for a whole store.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from scipy import linalg, sparse
from scipy.sparse.csgraph import connected_components, laplacian
from scipy.sparse.linalg import eigsh
from torch import Tensor

if TYPE_CHECKING:
    from torch_geometric.data import Data

# Up to about this size a dense solver is no slower than a sparse one.
DENSE_NODES = 400


@dataclass(frozen=True)
class LapPE:
    """Eigenpairs of the Laplacian D − A: the k smallest, the trivial one included.

    Adds "lappe_vectors" [N, k], of unit length on each graph and largest entry positive, and "lappe_values"
    [G, k], ascending. A graph of fewer than k nodes has NaN for the pairs that do not exist.
    """

    k: int = 10
    levels: ClassVar[dict[str, str]] = {"lappe_vectors": "node", "lappe_values": "graph"}

    def __call__(self, num_nodes: int, edge_index: np.ndarray) -> dict[str, np.ndarray]:
        values, vectors = smallest_eigenpairs(laplacian(simple_graph(num_nodes, edge_index)), self.k)
        missing = ((0, 0), (0, self.k - values.size))
        return {
            "lappe_vectors": np.pad(vectors, missing, constant_values=np.nan).astype(np.float32),
            "lappe_values": np.pad(values[None], missing, constant_values=np.nan).astype(np.float32),
        }


@dataclass(frozen=True)
class ESLapPE:
    """Eigenvectors of the normalised Laplacian I − D^(−1/2) A D^(−1/2) for the k smallest eigenvalues.

    Adds "eslappe_vectors" [N, k], of unit length on each graph; a graph of fewer than k nodes has zeros for
    those that do not exist. The row and column of an isolated node are zero, so that the eigenvalue 0 counts
    the connected components, as it does for D − A.
    """

    k: int = 10
    levels: ClassVar[dict[str, str]] = {"eslappe_vectors": "node"}

    def __call__(self, num_nodes: int, edge_index: np.ndarray) -> dict[str, np.ndarray]:
        normalised = laplacian(simple_graph(num_nodes, edge_index), normed=True)
        values, vectors = smallest_eigenpairs(normalised, self.k)
        return {"eslappe_vectors": np.pad(vectors, ((0, 0), (0, self.k - values.size))).astype(np.float32)}


@dataclass(frozen=True)
class RandomWalkSE:
    """Return probabilities of a random walk: (P^t)_ii for t = 1 … steps, with P = D^(−1) A.

    Adds "rwse" [N, steps]; an isolated node has zeros. P is similar, by a diagonal matrix, to the symmetric
    S = D^(−1/2) A D^(−1/2) = U diag(ω) Uᵀ. So (P^t)_ii = (S^t)_ii = Σ_m U_im² ω_m^t, and one decomposition
    gives all powers.
    """

    steps: int = 16
    levels: ClassVar[dict[str, str]] = {"rwse": "node"}

    def __call__(self, num_nodes: int, edge_index: np.ndarray) -> dict[str, np.ndarray]:
        similar = -laplacian(simple_graph(num_nodes, edge_index), normed=True).toarray()
        np.fill_diagonal(similar, 0.0)
        frequencies, vectors = linalg.eigh(similar, driver="evd")
        powers = frequencies[:, None] ** np.arange(1, self.steps + 1)  # [n, steps]
        return {"rwse": np.maximum(vectors**2 @ powers, 0.0).astype(np.float32)}


Encoding = LapPE | ESLapPE | RandomWalkSE


class AddEncodings:
    """Adds encodings to a PyG `Data`, for use as a dataset's transform; the input is left as it is."""

    def __init__(self, encodings: Sequence[Encoding]) -> None:
        self.encodings = tuple(encodings)

    def __call__(self, data: Data) -> Data:
        data = copy.copy(data)
        for encoding in self.encodings:
            for name, values in encoding(data.num_nodes, data.edge_index.cpu().numpy()).items():
                data[name] = torch.from_numpy(values).to(data.edge_index.device)
        return data

    def __repr__(self) -> str:
        return f"AddEncodings({list(self.encodings)})"


def flip_signs(
    vectors: Tensor, batch: Tensor, num_graphs: int, generator: torch.Generator | None = None
) -> Tensor:
    """Eigenvectors [N, k] with a random sign for every graph and eigenvector, for training.

    An eigenvector's sign means nothing; drawn anew for each batch, a model learns not to read it.
    """
    signs = torch.randint(0, 2, (num_graphs, vectors.size(1)), generator=generator, device=vectors.device)
    return vectors * (2 * signs - 1).to(vectors.dtype).index_select(0, batch)


def simple_graph(num_nodes: int, edge_index: np.ndarray) -> sparse.csr_array:
    """The symmetric 0/1 adjacency matrix [n, n] of a graph, without self-loops."""
    source, destination = (ends[edge_index[0] != edge_index[1]].astype(np.int64) for ends in edge_index)
    ends = np.concatenate([source, destination]), np.concatenate([destination, source])
    adjacency = sparse.csr_array((np.ones(ends[0].size), ends), shape=(num_nodes, num_nodes))
    adjacency.sum_duplicates()
    adjacency.data[:] = 1.0
    return adjacency


def smallest_eigenpairs(matrix: sparse.sparray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The min(k, n) smallest eigenvalues of a Laplacian, ascending, and their eigenvectors [n, min(k, n)].

    Each connected component is solved by itself: the eigenvalue 0, which every component repeats, then has
    the components' own vectors, whatever the solver. The entry of largest magnitude is positive, the first
    such where several are equal.
    """
    matrix = sparse.csr_array(matrix)
    components, member = connected_components(matrix, directed=False)
    ends = np.cumsum(np.bincount(member))
    pairs: list[tuple[float, np.ndarray, np.ndarray]] = []  # eigenvalue, nodes, entries there
    for nodes in np.split(np.argsort(member, kind="stable"), ends[:-1]):
        block = matrix if components == 1 else matrix[nodes][:, nodes]
        values, vectors = _connected_eigenpairs(block, min(k, nodes.size))
        pairs += [(value, nodes, vectors[:, i]) for i, value in enumerate(values)]
    # Equal but for rounding, eigenvalues stand in the order of their components, on every machine.
    pairs = sorted(pairs, key=lambda pair: round(pair[0], 9))[:k]
    values = np.array([max(value, 0.0) for value, _, _ in pairs])
    vectors = np.zeros((member.size, len(pairs)))
    for i, (_, nodes, entries) in enumerate(pairs):
        size = np.abs(entries)
        first = np.argmax(size > size.max() * (1 - 1e-6))
        vectors[nodes, i] = entries * np.sign(entries[first])
    return values, vectors


def _connected_eigenpairs(matrix: sparse.csr_array, k: int) -> tuple[np.ndarray, np.ndarray]:
    n = matrix.shape[0]
    if n <= max(DENSE_NODES, 2 * k):
        return linalg.eigh(matrix.toarray(), subset_by_index=[0, k - 1])
    # Lanczos on (L + δI)^(−1), whose largest eigenvalues are well apart; a fixed start makes it repeatable.
    start = np.random.default_rng(0).standard_normal(n)
    return eigsh(sparse.csc_array(matrix), k, sigma=-1e-3, which="LM", v0=start)
