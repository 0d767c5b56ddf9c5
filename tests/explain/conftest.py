"""Small records, runs of a second on rings and paths, and a browser with the page of a record open in it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from explain.browser import PATIENCE, launched
from explain.records import LAYERS, make_layer, make_record
from sfiformer import ExperimentConfig, train
from sfiformer.data import cluster
from sfiformer.data.official import find
from sfiformer.explain.page import write_page
from sfiformer.explain.record import GraphRecord, record
from sfiformer.nn import SFiFormer


@pytest.fixture(scope="session")
def batch():
    """A graph of CLUSTER, its classes among its nodes."""
    return cluster((1, 1, 1), seed=9)["train"].batch([0])


@pytest.fixture(scope="session")
def recorded(batch) -> Callable[..., tuple[SFiFormer, GraphRecord]]:
    """recorded(lam=2.0): an untrained model with these settings, and its record of the graph."""

    def make(**settings) -> tuple[SFiFormer, GraphRecord]:
        torch.manual_seed(0)
        small = {"layers": 2, "dim": 8, "heads": 2, "pe": "none", "lam_scaling": "graph"}
        model = SFiFormer.from_preset("cluster", **{**small, **settings})
        for name, parameter in model.named_parameters():  # scores that differ, strengths that are not 1
            if "query" in name or "key" in name or "raw_" in name:
                torch.nn.init.normal_(parameter, std=0.7)
        return model, record(model, batch, task=find("cluster").task, name="val[17]")

    return make


@pytest.fixture(scope="session")
def graphs(tmp_path_factory) -> Path:
    """A file of rings and paths; every sixth graph is in two parts."""
    path = tmp_path_factory.mktemp("graphs") / "graphs.jsonl"
    lines = []
    for number in range(30):
        size, closed = 4 + number % 5, number % 2
        edges = [[i, (i + 1) % size] for i in range(size if closed else size - 1)]
        if number % 6 == 0:
            edges = edges[1:]
        graph = {"x": [[i / size, 1.0] for i in range(size)], "edges": edges + [[b, a] for a, b in edges]}
        lines.append(json.dumps({**graph, "y": "ring" if closed else "path", "split": "test"}) + "\n")
    path.write_text(
        "".join(line.replace('"test"', s) for s in ('"train"', '"val"', '"test"') for line in lines)
    )
    return path


@pytest.fixture(scope="session")
def run(graphs, tmp_path_factory) -> Callable[[str], Path]:
    """run("softmax"): the folder of a run with this attention."""
    root = tmp_path_factory.mktemp("runs")

    def make(attention: str) -> Path:
        out = root / attention
        if not out.exists():
            settings = {
                "data.path": str(graphs), "data.root": str(root / "data"), "data.split": "column", "data.batch_size": 15,
                "model.layers": 2, "model.dim": 8, "model.heads": 2, "model.pe": "none", "model.attention": attention,
                "model.lam": 4.0, "model.lam_scaling": "graph",
                "trainer.epochs": 1, "trainer.accelerator": "cpu", "optim.warmup_epochs": 1,
            }  # fmt: skip
            train(ExperimentConfig.from_preset("custom", settings), out, progress=False)
        return out

    return make


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of a record; whatever the browser complains of fails the test."""
    complaints, contexts = [], []

    def open_page(record, *, width=1280, height=800, scheme="light", **options):
        path = write_page(record, tmp_path / "page.html", **options)
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def ring():
    return make_record([make_layer(seed, *settings) for seed, settings in enumerate(LAYERS)])
