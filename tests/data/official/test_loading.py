import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sfiformer.data.official import DATASETS, facts, load, loading

SUBSET = pytest.mark.filterwarnings("ignore:.*scores do not compare:UserWarning")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@SUBSET
@pytest.mark.parametrize("name", DATASETS)
def test_all_nine_load_from_their_archives(name, root, make_archive, assert_as_pyg):
    stores = load(name, root, make_archive(name).parent)
    assert {split: len(store) for split, store in stores.items()} == {"train": 7, "val": 3, "test": 4}
    for split, store in stores.items():
        assert_as_pyg(store, name, root, split)


@SUBSET
def test_the_second_load_reads_no_raw_file(root, make_raw, monkeypatch):
    make_raw("cluster")
    first = load("cluster", root)
    monkeypatch.setattr(loading, "read_splits", lambda *arguments: pytest.fail("the raw files were read"))
    second = load("cluster", root)
    for split in first:
        assert torch.equal(first[split].edge_index, second[split].edge_index)
        assert torch.equal(first[split].node["y"], second[split].node["y"])


@SUBSET
def test_raw_files_written_anew_are_read_anew(root, make_raw):
    raw = make_raw("mnist")
    before = load("mnist", root)["train"].graph["y"].clone()
    path = raw / "MNIST_v2.pt"
    size = path.stat().st_size
    splits = torch.load(path)
    for graph in splits[0]:
        graph["y"] = (graph["y"] + 1) % 10
    torch.save(splits, path)
    assert path.stat().st_size == size
    assert torch.equal(load("mnist", root)["train"].graph["y"], (before + 1) % 10)


@SUBSET
def test_a_damaged_cache_is_built_again(root, make_raw):
    make_raw("pattern")
    expected = load("pattern", root)["val"].node["y"].clone()
    (cache,) = (root / "PATTERN" / "store").iterdir()
    shutil.rmtree(cache / "test")
    for file in (cache / "val").iterdir():
        os.truncate(file, file.stat().st_size // 2)
    assert torch.equal(load("pattern", root)["val"].node["y"], expected)
    assert list((root / "PATTERN" / "store").iterdir()) == [cache]


KILLED = """
import sys, time
from sfiformer.data.official import load
from sfiformer.data.store import GraphStore

save = GraphStore.save
def once(store, folder):
    save(store, folder)
    print("now", flush=True)
    time.sleep(60)

GraphStore.save = once
load("peptides-struct", sys.argv[1])
"""


@SUBSET
def test_a_process_killed_while_caching_leaves_no_cache(root, make_raw):
    make_raw("peptides-struct")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(root)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
    folder = root / "peptides-struct" / "store"
    assert [entry.suffix for entry in folder.iterdir()] == [".part"]
    assert len(load("peptides-struct", root)["test"]) == 4
    assert [entry.suffix for entry in folder.iterdir()] == [""]


@SUBSET
def test_a_bad_file_leaves_no_cache(root, make_raw):
    (make_raw("peptides-func") / "test.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"test\.pt cannot be read"):
        load("peptides-func", root)
    assert list((root / "peptides-func" / "store").iterdir()) == []


@SUBSET
def test_two_at_a_time_do_not_disturb_each_other(root, make_archive):
    mirror = make_archive("coco-sp").parent
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: load("coco-sp", root, mirror), range(4)))
    assert all(torch.equal(result["val"].node["x"], results[0]["val"].node["x"]) for result in results)


def test_another_number_of_graphs_is_stated(root, make_raw):
    make_raw("pcqm-contact")
    with pytest.warns(UserWarning, match=r"7 / 3 / 4 graphs .* pcqm-contact 476,490 / 26,472 / 26,472"):
        load("pcqm-contact", root)
    with pytest.raises(ValueError, match=r"holds 7 / 3 / 4 graphs"):
        load("pcqm-contact", root, strict=True)


@SUBSET
def test_facts(root, make_raw):
    raw = make_raw("cifar10")
    stores = load("cifar10", root)
    graphs = [graph for split in torch.load(raw / "CIFAR10_v2.pt") for graph in split]
    nodes = sum(len(graph["x"]) for graph in graphs) / 14
    edges = sum(len(graph["edge_attr"]) for graph in graphs) / 14
    assert facts(*stores.values()) == pytest.approx((14, nodes, edges))
    assert facts(stores["val"]).graphs == 3


@SUBSET
def test_real_peptides(tmp_path, shared, assert_as_pyg):
    unpack = [sys.executable, str(shared / "data" / "unpack.py"), "peptides-func"]
    zips = tmp_path / "zips"
    subprocess.run(
        [*unpack, "--root", tmp_path, "--limit", "200", "--zip", zips], check=True, capture_output=True
    )
    stores = load("peptides-func", tmp_path)
    for split, store in stores.items():
        assert len(store) == 200
        assert_as_pyg(store, "peptides-func", tmp_path, split)
    assert facts(*stores.values()).mean_nodes == pytest.approx(150.94, rel=0.1)
    fetched = load("peptides-func", tmp_path / "fetched", mirror=zips)
    assert torch.equal(fetched["test"].node["x"], stores["test"].node["x"])
