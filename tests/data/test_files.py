"""Stores on disk: whole or refused."""

import json
import os

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from sfiformer.data import GraphStore, files


@pytest.fixture
def store() -> GraphStore:
    ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [
        Data(
            x=torch.rand(3, 2),
            edge_index=ring,
            y=torch.tensor([i]),
            edge_label_index=ring[:, :i],
            edge_label=torch.ones(i),
        )
        for i in range(3)
    ]
    return GraphStore.from_pyg(graphs)


def test_round_trip_is_memory_mapped(store, tmp_path):
    store.save(tmp_path / "store")
    loaded = GraphStore.load(tmp_path / "store")
    assert repr(loaded) == repr(store)
    got, want = loaded.batch([2, 0]), store.batch([2, 0])
    for name in ("x", "y", "edge_index", "edge_label_index", "edge_label"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    on_disk = (tmp_path / "store" / "node.x.npy").read_bytes()
    loaded.node["x"].zero_()
    assert (tmp_path / "store" / "node.x.npy").read_bytes() == on_disk


def test_saving_replaces_a_store_and_nothing_else(store, tmp_path):
    store.save(tmp_path / "store")
    store.subset([0]).save(tmp_path / "store")
    assert len(GraphStore.load(tmp_path / "store")) == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is no graph store; it is left as it is"):
        store.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert sorted(os.listdir(tmp_path)) == ["mine", "store"]


def test_a_failed_save_leaves_nothing_behind(store, tmp_path, monkeypatch):
    store.save(tmp_path / "store")
    before = sorted(os.listdir(tmp_path / "store"))

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        store.subset([0]).save(tmp_path / "store")
    with pytest.raises(OSError, match="No space"):
        store.save(tmp_path / "other")
    assert os.listdir(tmp_path) == ["store"]
    assert sorted(os.listdir(tmp_path / "store")) == before
    assert len(GraphStore.load(tmp_path / "store")) == 3


def test_a_failed_swap_puts_the_old_store_back(store, tmp_path, monkeypatch):
    store.save(tmp_path / "store")
    replace, interrupted = os.replace, []

    def interrupted_once(source, target):
        if target == tmp_path / "store" and not interrupted:
            interrupted.append(True)
            raise OSError("interrupted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted_once)
    with pytest.raises(OSError, match="interrupted"):
        store.subset([0]).save(tmp_path / "store")
    assert os.listdir(tmp_path) == ["store"]
    assert len(GraphStore.load(tmp_path / "store")) == 3


def test_half_a_store_is_refused(store, tmp_path):
    folder = tmp_path / "store"
    with pytest.raises(ValueError, match=r"it has no manifest\.json"):
        GraphStore.load(folder)
    store.save(folder)
    path = folder / "edge_index.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="the store is not whole"):
        GraphStore.load(folder)
    path.write_bytes(b"x" * len(whole))
    with pytest.raises(ValueError, match=r"not a readable \.npy file"):
        GraphStore.load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"edge_index\.npy is missing"):
        GraphStore.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99, this release reads 1"),
        ({"format": "cake"}, "not the manifest of a graph store"),
        ({"nodes": 4}, "node_ptr does not fit the manifest"),
        ({"bytes": {"../../etc/passwd": 3}}, "not the name of a field"),
        ({"bytes": {}}, "node_ptr does not fit the manifest"),
    ],
)
def test_manifests_that_do_not_fit(store, tmp_path, change, message):
    store.save(tmp_path / "store")
    path = tmp_path / "store" / files.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        GraphStore.load(tmp_path / "store")


def test_a_manifest_that_is_no_json(store, tmp_path):
    store.save(tmp_path / "store")
    (tmp_path / "store" / files.MANIFEST).write_text('{"format": ')
    with pytest.raises(ValueError, match="is not readable"):
        GraphStore.load(tmp_path / "store")


def test_pickled_arrays_are_never_loaded(store, tmp_path):
    store.save(tmp_path / "store")
    path = tmp_path / "store" / "node.x.npy"
    np.save(path, np.array([print], dtype=object), allow_pickle=True)
    manifest = tmp_path / "store" / files.MANIFEST
    content = json.loads(manifest.read_text())
    content["bytes"]["node.x"] = path.stat().st_size
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"not a readable \.npy file"):
        GraphStore.load(tmp_path / "store")
