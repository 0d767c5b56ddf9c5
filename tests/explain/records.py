"""Records of graphs made up for tests, and the flows that Python finds for them."""

import math

import torch

import oracles
from sfiformer.data.task import Task
from sfiformer.explain.record import GraphRecord, LayerRecord
from sfiformer.flow import flows_from_scores

NODES, HEADS = 24, 3
LAYERS = [  # spread of the scores, λ n, α, scaling, γ
    (1.0, 1.0, 0.1, "absolute", 1.0),
    (1.0, 2.0, math.inf, "absolute", 0.3),
    (5.0, 1.0, 0.1, "absolute", 2.0),
    (1.0, 1.0 * NODES, math.inf, "potential", None),  # there λ is λ* itself
    (20.0, 0.5 * NODES, math.inf, "potential", 1.0),
]


def make_layer(
    seed, spread, strength, alpha, scaling, gamma, nodes=NODES, heads=HEADS, width=7
) -> LayerRecord:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(4, nodes, heads, width, generator=generator) * spread**0.5
    parts[1::2, nodes // 2] = parts[1::2, nodes // 3]  # two keys the same, as automorphic atoms have them
    return LayerRecord(*parts, width**-0.5, strength / nodes, strength, alpha, scaling, gamma)


def make_record(layers, nodes=NODES, **others) -> GraphRecord:
    ring = torch.arange(nodes)
    edges = torch.stack([torch.cat([ring, ring.roll(-1)]), torch.cat([ring.roll(-1), ring])])
    return GraphRecord(
        **{
            "name": "ring",
            "num_nodes": nodes,
            "edge_index": edges,
            "adjacency": oracles.dense_adjacency(edges, nodes).float(),
            "layers": layers,
            "outputs": torch.eye(nodes, 4),
            "target": torch.arange(nodes) % 4,
            "task": Task("node", "classification", 4),
            **others,
        }
    )


def python_flows(layer: LayerRecord, lam: float) -> torch.Tensor:
    """[heads, n, n] in float64 throughout."""
    q, k, q_friction, k_friction = (
        x.double().transpose(0, 1) for x in (layer.q, layer.k, layer.q_friction, layer.k_friction)
    )
    s, u = q @ k.mT * layer.scale, q_friction @ k_friction.mT * layer.scale
    return flows_from_scores(s, u, lam=lam, alpha=layer.alpha, scaling=layer.scaling)


def beside_adjacency(record: GraphRecord, layer: int, flows: torch.Tensor) -> torch.Tensor:
    """What the layer mixes values by: (Ã + γZ)/(1 + γ), or the flows alone."""
    gamma = record.layers[layer].gamma
    return flows if gamma is None else (record.adjacency + gamma * flows) / (1 + gamma)
