"""Miniature archives in the official layouts, which owe nothing to the code that reads them."""

import os
import pickle
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch_geometric.datasets import GNNBenchmarkDataset, LRGBDataset

SPLITS = ("train", "val", "test")
# name: archive, folder inside it
ARCHIVES = {
    "pascalvoc-sp": ("pascalvocsp.zip", "voc_superpixels_edge_wt_region_boundary/"),
    "coco-sp": ("cocosp.zip", "coco_superpixels_edge_wt_region_boundary/"),
    "peptides-func": ("peptidesfunc.zip", "peptidesfunc/"),
    "peptides-struct": ("peptidesstruct.zip", "peptidesstruct/"),
    "pcqm-contact": ("pcqmcontact.zip", "pcqmcontact/"),
    "mnist": ("MNIST_v2.zip", ""),
    "cifar10": ("CIFAR10_v2.zip", ""),
    "pattern": ("PATTERN_v2.zip", ""),
    "cluster": ("CLUSTER_v2.zip", ""),
}
COUNTS = {"train": 7, "val": 3, "test": 4}


def raw_graph(name, generator):
    """One graph as a raw file of the dataset holds it."""

    def integers(high, *size):
        return torch.randint(high, size, generator=generator)

    def numbers(*size):
        return torch.rand(*size, generator=generator)

    n = int(integers(7, 1)) + 3
    e = int(integers(20, 1))
    edge_index = integers(n, 2, e)
    if name in ("pascalvoc-sp", "coco-sp"):
        classes = torch.tensor([0, 1, 2, 11, 13, 20]) if name == "coco-sp" else torch.arange(21)
        if name == "coco-sp":
            classes = torch.cat([classes, torch.tensor([65, 67, 70, 84, 90])])
        y = classes[integers(len(classes), n)].tolist()
        return numbers(n, 14).double(), numbers(e, 2), edge_index, y
    if name == "peptides-func":
        return integers(60, n, 9), integers(4, e, 3), edge_index, integers(2, 1, 10).float()
    if name == "peptides-struct":
        return integers(60, n, 9), integers(4, e, 3), edge_index, numbers(1, 11)
    if name == "pcqm-contact":
        links = int(integers(6, 1))
        label = torch.ones(links, dtype=torch.int32)
        return integers(60, n, 9), integers(4, e, 3), edge_index, integers(n, 2, links), label
    if name in ("mnist", "cifar10"):
        colours = 1 if name == "mnist" else 3
        return {
            "x": numbers(n, colours),
            "edge_index": edge_index,
            "edge_attr": numbers(e),
            "y": integers(10, 1),
            "pos": numbers(n, 2),
        }
    width, classes = (3, 2) if name == "pattern" else (7, 6)
    one_hot = torch.eye(width)[integers(width, n)]
    return {"x": one_hot, "edge_index": edge_index, "y": integers(classes, n)}


def raw_files(name, folder, graphs=None):
    """Write the raw files of a miniature of the dataset; `graphs` replaces the generated splits."""
    generator = torch.Generator().manual_seed(len(name))
    if graphs is None:
        graphs = {split: [raw_graph(name, generator) for _ in range(COUNTS[split])] for split in SPLITS}
    folder.mkdir(parents=True, exist_ok=True)
    if ARCHIVES[name][1] == "":
        path = folder / ARCHIVES[name][0].replace(".zip", ".pt")
        torch.save([graphs[split] for split in SPLITS], path)
        return [path]
    if name.endswith("-sp"):
        paths = [folder / f"{split}.pickle" for split in SPLITS]
        for split, path in zip(SPLITS, paths, strict=True):
            path.write_bytes(pickle.dumps(graphs[split]))
        return paths
    paths = [folder / f"{split}.pt" for split in SPLITS]
    for split, path in zip(SPLITS, paths, strict=True):
        torch.save(graphs[split], path)
    return paths


@pytest.fixture
def make_raw(tmp_path):
    """make_raw(name, graphs=None): an unpacked miniature under tmp_path/"root"; returns its raw folder."""

    def make(name, graphs=None):
        folder = name if ARCHIVES[name][1] else name.upper()
        raw = tmp_path / "root" / folder / "raw"
        raw_files(name, raw, graphs)
        return raw

    return make


@pytest.fixture
def make_archive(tmp_path):
    """make_archive(name): a miniature archive in the folder tmp_path/"mirror"; returns its path."""

    def make(name):
        file, inner = ARCHIVES[name]
        path = tmp_path / "mirror" / file
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for raw in raw_files(name, tmp_path / "unpacked" / name):
                archive.write(raw, f"{inner}{raw.name}")
        return path

    return make


def with_pyg(name, root, split):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in LRGBDataset.names:
            return LRGBDataset(root, name, split=split)
        return GNNBenchmarkDataset(root, name.upper(), split=split)


def assert_same(store, graphs):
    """Compare a store, graph by graph, with PyG's reading of the same raw files."""
    assert len(store) == len(graphs)
    for index, graph in enumerate(graphs):
        nodes = slice(*store.node_ptr[index : index + 2].tolist())
        edges = slice(*store.edge_ptr[index : index + 2].tolist())
        x = graph.x if graph.pos is None else torch.cat([graph.x, graph.pos], dim=1)
        order = torch.sort(graph.edge_index[1], stable=True).indices
        assert torch.equal(store.node["x"][nodes].to(x.dtype), x)
        assert torch.equal(store.edge_index[:, edges].long(), graph.edge_index[:, order])
        if graph.edge_attr is not None:
            edge_attr = graph.edge_attr.view(graph.num_edges, store.edge["edge_attr"].size(1))[order]
            assert torch.equal(store.edge["edge_attr"][edges].to(edge_attr.dtype), edge_attr)
        if "y" in store.node:
            assert torch.equal(store.node["y"][nodes].long(), graph.y)
        if "y" in store.graph:
            assert torch.equal(store.graph["y"][index].to(graph.y.dtype), graph.y[0])
        if store.link_ptr is not None:
            links = slice(*store.link_ptr[index : index + 2].tolist())
            assert torch.equal(store.link["edge_label_index"][links].long().t(), graph.edge_label_index)
            assert torch.equal(store.link["edge_label"][links].int(), graph.edge_label)


@pytest.fixture
def assert_as_pyg():
    """assert_as_pyg(store, name, root, split): the store holds what PyG's own class reads under `root`."""
    return lambda store, name, root, split: assert_same(store, with_pyg(name, root, split))


@pytest.fixture(scope="session")
def shared():
    """The folder of real data."""
    default = Path(__file__).parents[4] / "shared"
    folder = Path(os.environ.get("SFIFORMER_SHARED", default))
    if not (folder / "data" / "unpack.py").is_file():
        pytest.skip(
            f"no real data at {folder}; SFIFORMER_SHARED may name the folder that holds data/unpack.py"
        )
    return folder
