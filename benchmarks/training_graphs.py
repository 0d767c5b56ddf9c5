"""Generated graphs of the paper's shapes and of small molecules, with all that their presets ask of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.spatial import Delaunay, cKDTree
from torch import Tensor

from batches import SHAPES
from data import build
from sfiformer.config import ExperimentConfig
from sfiformer.data import GraphStore
from sfiformer.data.synthetic import cluster
from sfiformer.data.task import Task
from sfiformer.nn.config import ModelConfig
from sfiformer.nn.features import ATOM_VOCABULARY, BOND_VOCABULARY
from sfiformer.training.inference import encodings_of
from sfiformer.training.objectives import DATASETS

PRESETS = {
    "voc": "pascalvoc-sp-paper",
    "peptides": "peptides-func-paper",
    "mnist": "mnist-paper",
    "cluster": "cluster-paper",
    "molecules": "custom",
}
# One number for each molecule; what the preset leaves open follows from that.
MOLECULES = Task("graph", "regression", 1)
OPEN = {"node_encoder": "atom", "edge_encoder": "bond", "head": "graph", "outputs": 1}


@dataclass(frozen=True)
class Problem:
    """The graphs of one shape, and the experiment that is done on them."""

    config: ExperimentConfig
    defaults: ModelConfig  # of the preset without "-paper"
    task: Task
    store: GraphStore

    @classmethod
    def of(cls, shape: str, batches: int, precision: str, device: torch.device) -> Problem:
        """As many graphs as make so many batches of the preset's size, from a fixed seed."""
        trainer = {"precision": precision, "accelerator": "gpu" if device.type == "cuda" else "cpu"}
        of_model = {f"model.{key}": value for key, value in OPEN.items()} if shape == "molecules" else {}
        config = ExperimentConfig.from_preset(
            PRESETS[shape], of_model | {f"trainer.{key}": value for key, value in trainer.items()}
        )
        graphs = batches * config.data.batch_size
        rng = np.random.default_rng(0)
        if shape == "cluster":
            store = cluster((graphs, 1, 1))["train"]
        else:
            sizes = np.array(SHAPES[shape].sizes(graphs))
            store = MAKERS[shape](rng, sizes)
        defaults = ExperimentConfig.from_preset(PRESETS[shape].removesuffix("-paper"), of_model).model
        task = MOLECULES if shape == "molecules" else DATASETS[config.data.name][0]
        return cls(config, defaults, task, _encoded(rng, store, config))


def _encoded(rng: np.random.Generator, store: GraphStore, config: ExperimentConfig) -> GraphStore:
    """With positional encodings of the right size; that they are random numbers changes nothing about the time."""
    levels = {
        field: level for encoding in encodings_of(config.model) for field, level in encoding.levels.items()
    }
    rows = {"node": store.num_nodes, "graph": len(store)}
    fields: dict[str, dict[str, Tensor]] = {"node": {}, "graph": {}}
    for field, level in levels.items():
        values = rng.standard_normal((rows[level], config.model.pe_size), dtype=np.float32)
        fields[level][field] = torch.from_numpy(values / 10)
    return store.with_fields(**fields)


def _superpixels(rng: np.random.Generator, sizes: np.ndarray) -> GraphStore:
    """Neighbouring regions of an image, as in PascalVOC-SP: random points and their Delaunay triangulation."""
    edges = []
    for size in sizes:
        corners = Delaunay(rng.random((size, 2))).simplices  # [triangles, 3]
        sides = np.concatenate([corners[:, [0, 1]], corners[:, [1, 2]], corners[:, [2, 0]]])
        edges.append(np.unique(np.concatenate([sides, sides[:, ::-1]]), axis=0).T)
    nodes, count = int(sizes.sum()), sum(pairs.shape[1] for pairs in edges)
    return _store(
        sizes,
        edges,
        node={"x": _normal(rng, nodes, 14), "y": torch.from_numpy(rng.integers(0, 21, nodes))},
        edge={"edge_attr": _normal(rng, count, 2)},
    )


def _peptides(rng: np.random.Generator, sizes: np.ndarray) -> GraphStore:
    """Long molecules, each to be told ten properties of."""
    return _molecules(rng, sizes, torch.from_numpy(rng.integers(0, 2, (len(sizes), 10)).astype(np.float32)))


def _small_molecules(rng: np.random.Generator, sizes: np.ndarray) -> GraphStore:
    return _molecules(rng, sizes, _normal(rng, len(sizes), 1))


def _molecules(rng: np.random.Generator, sizes: np.ndarray, y: Tensor) -> GraphStore:
    """Trees whose atoms hang on one of the three before, and a few rings of six; with these targets."""
    edges = []
    for size in sizes:
        atom = np.arange(1, size)
        bonds = np.stack([atom, np.maximum(atom - rng.integers(1, 4, size - 1), 0)])
        closing = np.flatnonzero(rng.random(size) < 0.03)
        closing = closing[closing >= 5]
        bonds = np.concatenate([bonds, [closing, closing - 5]], axis=1)
        edges.append(np.concatenate([bonds, bonds[::-1]], axis=1))
    nodes, count = int(sizes.sum()), sum(pairs.shape[1] for pairs in edges)
    return _store(
        sizes,
        edges,
        node={"x": torch.from_numpy(rng.integers(0, ATOM_VOCABULARY, (nodes, len(ATOM_VOCABULARY))))},
        edge={"edge_attr": torch.from_numpy(rng.integers(0, BOND_VOCABULARY, (count, len(BOND_VOCABULARY))))},
        graph={"y": y},
    )


def _digits(rng: np.random.Generator, sizes: np.ndarray) -> GraphStore:
    """Superpixels with their 8 nearest neighbours, as in MNIST."""
    points = rng.random((sizes.sum(), 2))
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    neighbours = [
        cKDTree(points[first:last]).query(points[first:last], 9)[1][:, 1:] for first, last in pairwise(ptr)
    ]
    x = np.concatenate([rng.random((len(points), 1)), points], axis=1).astype(np.float32)
    return build(ptr, x, np.concatenate(neighbours), rng.integers(0, 10, len(sizes)))


MAKERS = {"voc": _superpixels, "peptides": _peptides, "mnist": _digits, "molecules": _small_molecules}


def _store(sizes: np.ndarray, edges: list[np.ndarray], **fields: dict[str, Tensor]) -> GraphStore:
    counts = [pairs.shape[1] for pairs in edges]
    return GraphStore(
        node_ptr=torch.tensor([0, *np.cumsum(sizes)]),
        edge_ptr=torch.tensor([0, *np.cumsum(counts)]),
        edge_index=torch.from_numpy(np.concatenate(edges, axis=1)),
        **fields,  # type: ignore[arg-type]
    )


def _normal(rng: np.random.Generator, *size: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
