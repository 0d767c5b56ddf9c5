"""The file of a page, without a browser."""

import base64
import json
import math
import re

import numpy as np
import pytest
import torch

from sfiformer.data.task import Task
from sfiformer.explain.page import write_page
from sfiformer.explain.record import GraphRecord, LayerRecord

EDGES = torch.tensor([[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]])


def make_record(**others) -> GraphRecord:
    parts = torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(0))
    layer = LayerRecord(*parts, 5**-0.5, 1 / 3, 1.0, math.inf, "absolute", 0.5)
    fields = {"layers": [layer], "outputs": torch.zeros(3, 2), "target": None, "name": "path"}
    adjacency = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.3, 0.2], [0.0, 0.2, 0.8]])
    task = Task("node", "classification", 2)
    return GraphRecord(
        **{"num_nodes": 3, "edge_index": EDGES, "adjacency": adjacency, "task": task, **fields, **others}
    )


def element(page: str, name: str) -> str:
    return re.search(rf'<script type="[a-z/]+" id="{name}">(.*?)</script>', page, re.S)[1]


def test_one_file_holds_all(tmp_path):
    record = make_record(positions=torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))
    path = write_page(record, tmp_path / "new" / "page.html")
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    page = path.read_text()
    assert not re.search(r"(src|href)\s*=|@import|url\(", page)
    assert "default-src 'none'" in page
    content = json.loads(element(page, "record"))
    assert content["edges"] == [[0, 1, 1], [1, 2, 1]]
    assert content["positions"] == record.positions.tolist()
    assert content["layers"][0]["alpha"] is None
    layer = record.layers[0]
    for head in range(2):
        stored = np.frombuffer(base64.b64decode(element(page, f"layer-0-head-{head}")), "<f4").reshape(
            4, 3, 5
        )
        for found, given in zip(stored, (layer.q, layer.k, layer.q_friction, layer.k_friction), strict=True):
            assert np.array_equal(found, given[:, head].numpy())


def test_the_size_is_that_of_queries_and_keys(tmp_path):
    size = 400
    parts = torch.randn(4, size, 1, 4)
    layer = LayerRecord(*parts, 0.5, 1 / size, 1.0, 0.1, "absolute", None)
    fields = {"outputs": torch.zeros(size, 2), "adjacency": torch.eye(size), "layers": [layer] * 5}
    page = write_page(make_record(num_nodes=size, **fields), tmp_path / "page.html")
    assert page.stat().st_size < 5 * size * 4 * 4 * 4 * 4 / 3 + 120_000 < size * size * 4


def test_queries_that_are_not_finite_are_refused(tmp_path):
    record = make_record()
    record.layers[0].k[1, 0, 2] = math.nan
    with pytest.raises(ValueError, match="layer 0 has queries or keys that are not finite"):
        write_page(record, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())
