"""Encodings of a store: the same by any number of processes, and computed once."""

import numpy as np
import pytest
import torch

from sfiformer.data import ESLapPE, GraphStore, LapPE, RandomWalkSE, add_encodings, encoding_cache


@pytest.fixture
def store() -> GraphStore:
    rng = np.random.default_rng(0)
    nodes, edges = rng.integers(1, 20, 150), rng.integers(0, 40, 150)
    ends = [rng.integers(0, n, (2, e)) for n, e in zip(nodes, edges, strict=True)]
    return GraphStore(
        node_ptr=torch.tensor([0, *nodes]).cumsum(0),
        edge_ptr=torch.tensor([0, *edges]).cumsum(0),
        edge_index=torch.from_numpy(np.concatenate(ends, axis=1)),
    )


@pytest.fixture
def never_compute(monkeypatch):
    def fail(*args):
        raise AssertionError("computed again")

    return lambda: monkeypatch.setattr(encoding_cache, "_compute", fail)


def test_fields_of_every_graph(store):
    encoded = add_encodings(store, [LapPE(4), RandomWalkSE(3), ESLapPE(2)], progress=False)
    assert encoded.node["lappe_vectors"].shape == (store.num_nodes, 4)
    batch = encoded.batch([149, 70])
    for position, graph in enumerate((149, 70)):
        one = store.batch([graph])
        fields = LapPE(4)(one.num_nodes, one.edge_index.numpy())
        rows = batch.lappe_vectors[batch.batch == position]
        np.testing.assert_array_equal(rows.numpy(), fields["lappe_vectors"])
        np.testing.assert_array_equal(batch.lappe_values[position].numpy(), fields["lappe_values"][0])


def test_processes_change_nothing(store):
    alone = add_encodings(store, [LapPE(5)], workers=1, progress=False)
    together = add_encodings(store, [LapPE(5)], workers=2, progress=False)
    for name in ("lappe_vectors",):
        np.testing.assert_array_equal(alone.node[name].numpy(), together.node[name].numpy())


def test_second_run_reads_the_cache(store, tmp_path, never_compute, capfd):
    first = add_encodings(store, [LapPE(3), RandomWalkSE(4)], cache=tmp_path)
    assert "LapPE of 150 graphs" in capfd.readouterr().err
    never_compute()
    second = add_encodings(store, [LapPE(3), RandomWalkSE(4)], cache=tmp_path)
    for name in ("lappe_vectors", "rwse"):
        np.testing.assert_array_equal(first.node[name].numpy(), second.node[name].numpy())


def test_key_knows_structure_and_settings_but_not_features(store, tmp_path, never_compute):
    add_encodings(store, [LapPE(3)], cache=tmp_path, progress=False)
    assert len(list(tmp_path.iterdir())) == 1
    add_encodings(store, [LapPE(4), ESLapPE(3)], cache=tmp_path, progress=False)
    add_encodings(store.subset(range(100)), [LapPE(3)], cache=tmp_path, progress=False)
    assert len(list(tmp_path.iterdir())) == 4
    never_compute()
    other_features = store.with_fields(node={"x": torch.rand(store.num_nodes, 2)})
    add_encodings(other_features, [LapPE(3)], cache=tmp_path, progress=False)


@pytest.mark.parametrize("damage", ["truncated", "flipped byte", "empty", "not an archive", "another's"])
def test_damaged_files_are_replaced(store, tmp_path, damage, caplog):
    first = add_encodings(store, [RandomWalkSE(4)], cache=tmp_path, progress=False)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    if damage == "another's":
        np.savez(path, rwse=np.zeros((3, 4), np.float32))
    else:
        middle = len(whole) // 2
        broken = {
            "truncated": whole[:middle],
            "flipped byte": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "empty": b"",
            "not an archive": b"hello",
        }
        path.write_bytes(broken[damage])
    second = add_encodings(store, [RandomWalkSE(4)], cache=tmp_path, progress=False)
    assert "is damaged" in caplog.text
    np.testing.assert_array_equal(first.node["rwse"].numpy(), second.node["rwse"].numpy())
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_a_cache_that_cannot_be_written_is_no_obstacle(store, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    encoded = add_encodings(store, [RandomWalkSE(2)], cache=tmp_path / "file", progress=False)
    assert "rwse" in encoded.node
    assert "could not be written" in caplog.text
