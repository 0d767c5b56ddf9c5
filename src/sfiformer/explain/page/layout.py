"""Places in the plane for the nodes of a graph that has none."""

import numpy as np
from torch import Tensor

_STEPS = 150


def spring_layout(edge_index: Tensor, num_nodes: int) -> np.ndarray:
    """Positions [n, 2]: edges pull, all nodes push each other away; the same graph always gives the same picture.

    The energy is Noack's edge-repulsion LinLog model, Σ_edges d_ij − Σ_pairs w_i w_j log d_ij with w_i the degree of i (and
    1 more), whose minima set clusters apart. Each step moves every node along its force, by less and less.
    """
    pull = np.zeros((num_nodes, num_nodes), dtype=np.float32)
    pull[edge_index[0], edge_index[1]] = 1
    pull = np.maximum(pull, pull.T)
    np.fill_diagonal(pull, 0)
    weight = pull.sum(1, keepdims=True) + 1  # [n, 1]
    # Degrees repel in proportion to the density, so that dense and sparse graphs come out of one size.
    push = weight * weight.T * (pull.sum() / weight.sum() ** 2 + 1e-3)  # [n, n]
    np.fill_diagonal(push, 0)

    places = _spiral(num_nodes)
    for step in range(_STEPS):
        across, down = (np.subtract.outer(axis, axis) for axis in places.T)
        distance = np.sqrt(across * across + down * down + 1e-6)  # [n, n]
        strength = (push / distance - pull) / distance  # how hard i is pushed from j, in units of x_i − x_j
        force = strength.sum(1, keepdims=True) * places - strength @ places - 1e-2 * weight * places  # [n, 2]
        length = np.sqrt((force**2).sum(1, keepdims=True)) + 1e-9
        reach = 0.1 * distance.mean() * (1 - step / _STEPS)
        places = places + force / length * np.minimum(length / weight, reach)
    return places


def _spiral(count: int) -> np.ndarray:
    """A sunflower's seeds: spread evenly over a disc, in no two rows."""
    turn = np.pi * (3 - np.sqrt(5)) * np.arange(count)
    seeds = np.sqrt(np.arange(count) + 0.5)[:, None] * np.stack([np.cos(turn), np.sin(turn)], 1)
    return seeds.astype(np.float32)
