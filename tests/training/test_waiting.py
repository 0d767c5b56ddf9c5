"""A step on a GPU waits for nothing: no operator on its way needs to know a value or a shape that only the device knows.

Fake tensors have shapes and no values, so whatever asks for a value raises. This needs no GPU: the tensors say that they
are on a CPU, and what a GPU would be given instead is asked for here.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import clip_grads_with_norm_

pytest.importorskip("triton", reason="the kernels need Triton")

from sfiformer import SFiFormer
from sfiformer.config import ExperimentConfig
from sfiformer.data.batch import GraphBatch
from sfiformer.nn.features import EmbeddingSum
from sfiformer.training.examples import target_of
from sfiformer.training.objectives import DATASETS, loss_and_metric

FEATURES = {  # of nodes and edges
    "pascalvoc-sp": (14, 2),
    "coco-sp": (14, 2),
    "peptides-func": (9, 3),
    "peptides-struct": (9, 3),
    "mnist": (3, 1),
    "cifar10": (5, 1),
    "pattern": (3, 0),
    "cluster": (7, 0),
}
GRAPHS, NODES, EDGES = 40, 512, 1024


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    for place in (
        "attention.kernels",
        "attention.fused",
        "attention.heads",
        "attention.widths",
        "nn.distance_gate",
        "nn.gated_sum",
        "nn.norms",
    ):
        monkeypatch.setattr(f"sfiformer.{place}.usable", lambda x: True)
    monkeypatch.setattr("sfiformer.attention.widths.wide", lambda width, like: -(-width // 8) * 8)
    monkeypatch.setattr("sfiformer.attention.dropout._LARGE", 1 << 62)  # a CPU draws on the host
    monkeypatch.setattr("sfiformer.attention.functional.packed_attention", None)  # plain attention waits
    monkeypatch.setattr("sfiformer.flow.checks.wanted", lambda check, tensor: False)
    monkeypatch.setattr(EmbeddingSum, "_check", lambda encoder, features: None)


def padded_batch(model, task):
    def whole(*shape):
        return torch.zeros(shape, dtype=torch.int64)

    config, rows = model.config, {"graph": GRAPHS, "node": NODES}[task.level]
    fields = {
        "x": whole(NODES, 9) if config.node_encoder == "atom" else torch.zeros(NODES, config.node_features),
        "y": whole(rows) if task.kind in ("classification", "binary") else torch.zeros(rows, task.outputs),
        "lappe_vectors": torch.zeros(NODES, config.pe_size),
        "lappe_values": torch.zeros(GRAPHS, config.pe_size),
        "eslappe_vectors": torch.zeros(NODES, config.pe_size),
    }
    if config.edge_encoder != "constant":
        bond = config.edge_encoder == "bond"
        fields["edge_attr"] = whole(EDGES, 3) if bond else torch.zeros(EDGES, config.edge_features)
    return GraphBatch(
        edge_index=whole(2, EDGES),
        batch=whole(NODES),
        ptr=whole(GRAPHS + 1),
        graph_ids=whole(GRAPHS),
        max_nodes=300,
        fields=fields,
        **{name: whole() for name in ("real_nodes", "real_edges", "real_graphs")},
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pascalvoc-sp", {}),
        ("coco-sp", {"model.attention": "softmax"}),
        ("peptides-func", {"model.norm": "layer"}),
        ("peptides-struct", {"model.attention": "dfi"}),
        ("mnist", {"model.norm": "graph", "model.friction": "tied"}),
        ("cifar10", {"model.attention": "adjacency"}),
        ("pattern", {"model.lam_scaling": "graph"}),
        ("cluster", {"model.lam_scaling": "largest"}),
        ("cluster", {"model.pe": "eslappe"}),
    ],
)
def test_a_step_waits_for_nothing(name, settings):
    task, loss_name, _ = DATASETS[name]
    nodes, edges = FEATURES[name]
    config = ExperimentConfig.from_preset(
        name, {"model.layers": 2, "model.attention_dropout": 0.1, **settings}
    )
    fitted = config.model.fitted(
        level=task.level, outputs=task.outputs, node_features=nodes, edge_features=edges
    )
    loss, _ = loss_and_metric(task, loss_name)
    with FakeTensorMode():
        model = SFiFormer(fitted).train()
        batch = padded_batch(model, task)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch)
        target = target_of(batch, task)
        total, weight = loss.terms(outputs.float(), target, loss.counts(target))
        (total / weight).backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.stack(torch._foreach_norm([parameter.grad for parameter in trained], 2)).norm()
        clip_grads_with_norm_(trained, 1.0, norm)
    assert len(trained) == sum(parameter.requires_grad for parameter in model.parameters())
