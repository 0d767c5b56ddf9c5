"""Generated graphs with every field that a model may ask for."""

from collections.abc import Callable

import pytest
import torch
from torch_geometric.data import Batch, Data

from sfiformer import ModelConfig

ATOMS = (119, 5, 12, 12, 10, 6, 6, 2, 2)
BONDS = (5, 6, 2)


def _features(kind: str, rows: int, width: int | None, sizes: tuple[int, ...] | None) -> torch.Tensor | None:
    if kind == "constant":
        return None
    if kind == "linear":
        return torch.randn(rows, width)
    sizes = {"atom": ATOMS, "bond": BONDS}.get(kind, sizes)
    return torch.stack([torch.randint(size, (rows,)) for size in sizes], dim=1)


def _graph(config: ModelConfig, nodes: int, edges: int) -> Data:
    k = config.pe_size
    vectors, values = torch.randn(nodes, k), torch.rand(1, k)
    vectors[:, nodes:], values[:, nodes:] = torch.nan, torch.nan
    graph = Data(
        x=_features(config.node_encoder, nodes, config.node_features, config.node_categories),
        edge_index=torch.randint(nodes, (2, edges)),
        edge_attr=_features(config.edge_encoder, edges, config.edge_features, config.edge_categories),
        lappe_vectors=vectors,
        lappe_values=values,
        eslappe_vectors=vectors.nan_to_num(),
        rwse=torch.rand(nodes, k),
        edge_label_index=torch.randint(nodes, (2, 5)),
        num_nodes=nodes,
    )
    # The first and the last node receive nothing (in graphs of more than two nodes).
    graph.edge_index[1] = graph.edge_index[1].clamp(min(1, nodes - 1), max(nodes - 2, 0))
    return graph


@pytest.fixture
def make_graphs() -> Callable[..., list[Data]]:
    """make_graphs(config, sizes): PyG graphs of these node counts; a negative count means no edges."""

    def make(config: ModelConfig, sizes=(9, 1, -4, 14), seed: int = 0) -> list[Data]:
        torch.manual_seed(seed)
        return [_graph(config, abs(size), 4 * size if size > 1 else 0) for size in sizes]

    return make


@pytest.fixture
def make_batch(make_graphs) -> Callable[..., Batch]:
    return lambda *args, **kwargs: Batch.from_data_list(make_graphs(*args, **kwargs))
