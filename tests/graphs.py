"""Small random graphs."""

import numpy as np
import torch
from torch_geometric.data import Data


def random_graph(rng: np.random.Generator, nodes: int, edges: int, links: bool = False) -> Data:
    data = Data(
        x=torch.from_numpy(rng.integers(0, 9, (nodes, 2))),
        pos=torch.from_numpy(rng.random((nodes, 3), dtype=np.float32)),
        edge_index=torch.from_numpy(rng.integers(0, nodes, (2, edges))),
        edge_attr=torch.from_numpy(rng.random((edges, 1), dtype=np.float32)),
        node_mask=torch.from_numpy(rng.random(nodes) < 0.5),
        y=torch.from_numpy(rng.random((1, 4), dtype=np.float32)),
    )
    if links:
        count = int(rng.integers(0, 4))
        data.edge_label_index = torch.from_numpy(rng.integers(0, nodes, (2, count)))
        data.edge_label = torch.from_numpy(rng.integers(0, 2, count))
    return data


def random_graphs(seed: int, count: int, links: bool = False) -> list[Data]:
    rng = np.random.default_rng(seed)
    return [
        random_graph(rng, int(rng.integers(1, 12)), int(rng.integers(0, 30)), links) for _ in range(count)
    ]
