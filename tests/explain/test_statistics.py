"""Sparsity statistics: cases that are counted by hand, and distances against a search of our own."""

import csv
import json
import math
import shutil
from collections import deque

import numpy as np
import pytest
import torch

from sfiformer.data.official import find
from sfiformer.data.source import digest
from sfiformer.errors import UserError
from sfiformer.explain import explain_statistics
from sfiformer.explain.record import GraphRecord, LayerRecord
from sfiformer.explain.statistics import collect, hop_distances, write_statistics


def layer(n: int, stopped: list[int]) -> LayerRecord:
    """One head under which every query draws equally from all keys but the stopped ones."""
    zeros, friction = torch.zeros(n, 1, 1), torch.zeros(n, 1, 1)
    friction[stopped] = 100.0
    return LayerRecord(zeros, zeros, torch.ones(n, 1, 1), friction, 1.0, 1.0, 1.0, math.inf, "absolute", None)


def graph(name: str, n: int, edges: list[tuple[int, int]], layers: list[LayerRecord]) -> GraphRecord:
    edge_index = torch.tensor(edges).view(-1, 2).t()
    return GraphRecord(
        name, n, edge_index, torch.eye(n), layers, torch.zeros(n, 1), None, find("cluster").task
    )


def test_counted_by_hand():
    # A path 0-1-2 beside node 3; layer 1 never draws from 3, layer 2 only from 0.
    path = graph("a", 4, [(0, 1), (2, 1)], [layer(4, [3]), layer(4, [1, 2, 3])])
    # Two nodes and an edge; layer 1 draws from both, layer 2 only from 0.
    pair = graph("b", 2, [(0, 1)], [layer(2, []), layer(2, [1])])
    found = collect("run", [path, pair])

    assert found.graphs == ["a", "b"]
    assert found.nodes.tolist() == [4, 2]
    assert found.support[:, :, 0].tolist() == [[3, 1], [2, 1]]
    # Of 16 + 4 pairs, layer 1 leaves out 4, layer 2 12 + 2.
    np.testing.assert_allclose(found.zeros, [[4 / 20], [14 / 20]])
    assert found.hops == [0, 1, 2, "unreachable"]
    # Pairs: of the path 4 at 0 hops, 4 at 1, 2 at 2, 6 without a path; of the pair 2 at 0, 2 at 1.
    np.testing.assert_allclose(found.pairs, np.array([6, 6, 2, 6]) / 20)
    # Layer 1: queries 0, 1, 2 draw thirds from 0, 1, 2 (3 pairs at 0 hops, 4 at 1, 2 at 2), query 3 all from afar;
    # of the pair each half. All six queries draw one unit.
    first = np.array([3 / 3 + 2 / 2, 4 / 3 + 2 / 2, 2 / 3, 1]) / 6
    # Layer 2: all from node 0, seen from 0, 1, 2 and 3, and from 0 and 1.
    second = np.array([1 + 1, 1 + 1, 1, 1]) / 6
    np.testing.assert_allclose(found.mass[:, 0], [first, second], atol=1e-7)
    np.testing.assert_allclose(found.mean_hops[:, 0], [(7 / 3 + 4 / 3) / 5, (2 + 2) / 5], atol=1e-6)


def test_dense_attention_has_no_zeros_even_where_it_underflows():
    q = torch.tensor([[400.0], [1.0]]).view(2, 1, 1)
    dense = LayerRecord(q, q, q * 0, q * 0, 1.0, 0.0, 0.0, math.inf, "absolute", None)
    assert (dense.flows() == 0).any()
    found = collect("run", [graph("a", 2, [(0, 1)], [dense])])
    assert found.zeros.tolist() == [[0.0]]
    assert found.support.tolist() == [[[2.0]]]


def test_no_graphs():
    with pytest.raises(UserError, match="no graphs"):
        collect("run", [])


@pytest.mark.parametrize("edges", [0, 5, 15, 60])
def test_hop_distances(edges):
    n = 20
    edge_index = torch.randint(n, (2, edges), generator=torch.Generator().manual_seed(edges))
    neighbours = {node: set() for node in range(n)}
    for a, b in edge_index.t().tolist():
        neighbours[a].add(b)
        neighbours[b].add(a)
    for start in range(n):
        hops, queue = {start: 0}, deque([start])
        while queue:
            node = queue.popleft()
            for other in neighbours[node] - hops.keys():
                hops[other] = hops[node] + 1
                queue.append(other)
        row = hop_distances(edge_index, n)[start].tolist()
        assert row == [hops.get(node, -1) for node in range(n)]


def test_numbers_in_files(tmp_path):
    path = graph("a[0]", 4, [(0, 1), (2, 1)], [layer(4, [3]), layer(4, [1, 2, 3])])
    files = write_statistics([collect("one", [path]), collect("two", [path])], tmp_path / "s")
    assert [file.name for file in files] == ["s.json", "s-graphs.csv", "s-hops.csv"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    one, two = json.loads(files[0].read_text())
    assert (one["run"], two["run"], one["graphs"], one["mean_nodes"]) == ("one", "two", 1, 4)
    assert one["zero_share"] == [[0.25], [0.75]]
    assert one["mean_support"] == [[3], [1]]
    rows = list(csv.DictReader(files[1].open(newline="")))
    assert len(rows) == 4
    expected = {"run": "one", "layer": "2", "head": "1", "graph": "a[0]", "nodes": "4", "support": "1"}
    assert rows[1] == {**expected, "zero_share": "0.75"}
    rows = list(csv.DictReader(files[2].open(newline="")))
    assert [row["hops"] for row in rows[:4]] == ["0", "1", "2", "unreachable"]
    assert sum(float(row["mass"]) for row in rows[:4]) == pytest.approx(1, abs=1e-4)


def test_two_runs_side_by_side(run, graphs, tmp_path):
    (sfi, dense), files = explain_statistics(run("sfi"), against=run("softmax"), out=tmp_path, graphs=12)
    assert (sfi.name, dense.name, len(sfi.graphs)) == ("sfi", "softmax", 12)
    assert sfi.zeros.shape == (2, 2)
    assert sfi.zeros.mean() > 0.05
    assert not dense.zeros.any()
    assert sfi.pairs[-1] > 0  # graphs 0 and 6 are in two parts
    np.testing.assert_allclose(dense.support, np.broadcast_to(dense.nodes[:, None, None], (12, 2, 2)))
    names = ["test-statistics.png", "test-statistics.svg", "test-statistics.json"]
    assert [file.name for file in files] == [*names, "test-statistics-graphs.csv", "test-statistics-hops.csv"]


def test_runs_on_other_graphs_do_not_compare(run, graphs, tmp_path):
    other = shutil.copytree(run("softmax"), tmp_path / "other")
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(reversed(graphs.read_text().splitlines(keepends=True))))
    settings = other / "config.yaml"
    settings.write_text(settings.read_text().replace(str(graphs), str(fewer)))
    about = json.loads((other / "about.json").read_text())
    (other / "about.json").write_text(json.dumps({**about, "data_sha256": digest(fewer)}))
    (other / "splits.csv").unlink()  # as runs of earlier releases have none
    with pytest.raises(UserError, match="other was not trained on the graphs of"):
        explain_statistics(run("sfi"), against=other, out=tmp_path)
    assert not list(tmp_path.glob("*.png"))
