"""Padding changes nothing: losses, gradients and metrics of padded batches are those of the plain ones."""

import math

import numpy as np
import pytest
import torch

from sfiformer import ModelConfig, SFiFormer
from sfiformer.data import BatchShape, GraphStore
from sfiformer.data.shapes import filler_nodes
from sfiformer.data.task import Task
from sfiformer.training.examples import answers, target_of
from sfiformer.training.objectives import METRICS, loss_and_metric

TASKS = {
    "classes": Task("graph", "classification", 4),
    "multilabel": Task("graph", "multilabel", 3),
    "regression": Task("graph", "regression", 2),
    "nodes": Task("node", "classification", 3),
    "binary nodes": Task("node", "binary", 1),
    "links": Task("link", "ranking", 1),
}
PICKS = [5, 0, 3, 1]


def make_store(task: Task, graphs: int = 6) -> GraphStore:
    rng = np.random.default_rng(0)
    nodes, edges, links = (rng.integers(low, high, graphs) for low, high in ((3, 14), (0, 30), (0, 9)))
    ptrs = [torch.from_numpy(np.concatenate([[0], sizes.cumsum()])) for sizes in (nodes, edges, links)]
    pairs = [
        torch.from_numpy(
            np.concatenate([rng.integers(0, n, (2, m)) for n, m in zip(nodes, counts, strict=True)], 1)
        )
        for counts in (edges, links)
    ]
    rows = {"graph": graphs, "node": int(nodes.sum()), "link": int(links.sum())}[task.level]
    fields: dict = {"graph": {"lappe_values": rng.random((graphs, 4))}, "node": {}, "edge": {}, "link": {}}
    fields["node"] = {
        "x": rng.standard_normal((nodes.sum(), 3)),
        "lappe_vectors": rng.random((nodes.sum(), 4)),
    }
    fields["node"]["eslappe_vectors"] = fields["node"]["rwse"] = fields["node"]["lappe_vectors"]
    fields["edge"] = {"edge_attr": rng.standard_normal((edges.sum(), 2))}
    if task.kind == "classification":
        fields[task.level]["y"] = rng.integers(-1, task.outputs, rows)  # some are missing
    elif task.kind == "regression":
        fields["graph"]["y"] = rng.standard_normal((rows, task.outputs))
    elif task.kind in ("multilabel", "binary"):
        fields[task.level]["y"] = rng.random((rows, task.outputs)) < 0.5
    else:
        fields["link"] = {"edge_label": rng.integers(0, 2, rows), "edge_label_index": pairs[1].T.numpy()}
    tensors = {
        level: {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in columns.items()}
        for level, columns in fields.items()
    }
    link_ptr = ptrs[2] if task.level == "link" else None
    return GraphStore(ptrs[0], ptrs[1], pairs[0], link_ptr=link_ptr, **tensors)


def make_model(task: Task, **settings) -> SFiFormer:
    torch.manual_seed(0)
    config = ModelConfig(
        **{
            **{"layers": 2, "dim": 8, "heads": 2, "dropout": 0.0, "norm": "layer", "local": "gine"},
            **{"pe": "lappe", "pe_size": 4, "pe_dim": 3, "sign_flip": False},
            **settings,
        }
    )
    config = config.fitted(level=task.level, outputs=task.outputs, node_features=3, edge_features=2)
    return SFiFormer(config).double()


def batches(store: GraphStore):
    """A plain batch and the same padded."""
    plain = store.batch(PICKS)
    filler = filler_nodes(store)
    links = plain.edge_label.numel() + 7 if "edge_label" in plain else 0
    nodes = plain.num_nodes + 11
    shape = BatchShape(
        len(PICKS) + math.ceil(11 / filler) + 2, nodes, plain.num_edges + 26, links, 20, filler
    )
    return plain, store.batch(PICKS, shape)


def gradients(model: SFiFormer, batch, task: Task, weighted: bool):
    name = "weighted_cross_entropy" if weighted else None
    loss, _ = loss_and_metric(task, name)
    model.zero_grad()
    value = loss(model(batch), target_of(batch, task))
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(task: Task, *, weighted: bool = False, train: bool = True, **settings) -> None:
    store = make_store(task)
    model = make_model(task, **settings).train(train)
    plain, padded = batches(store)
    (loss, expected), (got_loss, got) = (gradients(model, batch, task, weighted) for batch in (plain, padded))
    assert float(loss) > 0
    torch.testing.assert_close(got_loss, loss, rtol=1e-10, atol=1e-12)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("attention", ["sfi", "dfi", "softmax"])
def test_loss_and_gradients_of_every_task(task, attention):
    check(task, attention=attention)


@pytest.mark.parametrize("scaling", ["graph", "largest", "potential"])
@pytest.mark.parametrize("norm", ["layer", "graph", "none"])
def test_every_scaling_and_norm(scaling, norm):
    check(TASKS["nodes"], lam_scaling=scaling, norm=norm)


@pytest.mark.parametrize("name", ["nodes", "binary nodes", "classes"])
def test_class_weights_do_not_count_padding(name):
    check(TASKS[name], weighted=True)


@pytest.mark.parametrize("local", ["edge-gcn", "gcn", "gat", "sage", "none"])
def test_other_message_passing(local):
    check(TASKS["multilabel"], local=local)


@pytest.mark.parametrize("local", ["edge-gcn", "gatedgcn"])
@pytest.mark.parametrize("norm", ["batch", "none"])
def test_without_residual_and_feed_forward(local, norm):
    check(TASKS["multilabel"], local=local, norm=norm, residual=False, feed_forward=False)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_gated_gcn_and_batch_norm(task):
    check(task, local="gatedgcn", norm="batch", activation="gelu", pooling="add")


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_messages_gated_by_distance(activation):
    check(TASKS["nodes"], local="gatedgcn", norm="batch", pe="eslappe", activation=activation)


def test_normalised_encodings_of_walks():
    check(TASKS["multilabel"], pe="rwse")


def test_gated_gcn_with_the_statistics_of_training():
    check(TASKS["links"], local="gatedgcn", norm="batch", train=False)


@pytest.mark.parametrize(
    ("task", "metric"),
    [(t, m) for t in TASKS.values() for m in METRICS[t.kind]],
    ids=lambda x: getattr(x, "kind", x),
)
def test_metrics(task, metric):
    store, model = make_store(task), make_model(task).eval()
    values = []
    for batch in batches(store):
        _, measured = loss_and_metric(task, None, metric)
        with torch.no_grad():
            measured.update(*answers(model, batch, task))
        values.append(measured.compute())
    assert values[1] == pytest.approx(values[0], rel=1e-6)
    assert not math.isnan(values[0])
