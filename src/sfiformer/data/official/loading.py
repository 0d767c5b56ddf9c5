"""Official datasets by name, as graph stores."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from sfiformer.data.official.archive import new_folder
from sfiformer.data.official.fetching import fetch
from sfiformer.data.official.packing import read_splits
from sfiformer.data.official.registry import SPLITS, Dataset, find
from sfiformer.data.store import GraphStore

# To be raised whenever the same raw files would give other stores.
_VERSION = 1


class Facts(NamedTuple):
    """What is published of a dataset: how many graphs, and their mean nodes and directed edges."""

    graphs: int
    mean_nodes: float
    mean_edges: float


def load(
    name: str, root: str | Path, mirror: str | Path | None = None, *, strict: bool = False
) -> dict[str, GraphStore]:
    """The splits of an official dataset: {"train": …, "val": …, "test": …}.

    name: one of `DATASETS`, in any case.
    root: the folder of all datasets, laid out as PyTorch Geometric does; `fetch` brings what is not there.
    mirror: a folder or an http(s) address that holds the official archives.
    strict: whether another number of graphs than the official one is an error; otherwise a warning states it,
        since subsets of the official data are useful too.

    The stores are kept beside the raw files. While those stay as they are, the next call opens the stores
    memory-mapped and reads no raw file.
    """
    dataset = find(name)
    raw = fetch(name, root, mirror)
    cache = raw.parent / "store" / _key(dataset, raw)
    stores = _open(cache)
    if stores is None:
        with FileLock(raw.parent / ".lock"):
            stores = _open(cache)  # another process may have built it meanwhile
            if stores is None:
                _build(dataset, raw, cache)
                stores = {split: GraphStore.load(cache / split) for split in SPLITS}
    _check_counts(dataset, stores, raw, strict)
    return stores


def facts(*stores: GraphStore) -> Facts:
    """The means over all graphs of the given stores."""
    graphs = sum(len(store) for store in stores)
    nodes = sum(int(store.node_ptr[-1]) for store in stores)
    edges = sum(int(store.edge_ptr[-1]) for store in stores)
    return Facts(graphs, nodes / graphs, edges / graphs)


def _key(dataset: Dataset, raw: Path) -> str:
    """A name for what the raw files hold, made without reading them. Their times are part of it: files that
    were written anew with other values need not differ in size."""
    stats = [(file, (raw / file).stat()) for file in dataset.files]
    source = [_VERSION, *((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)]
    return hashlib.sha256(json.dumps(source).encode()).hexdigest()[:16]


def _open(cache: Path) -> dict[str, GraphStore] | None:
    """The cached stores, or None where there are none that this release can read."""
    try:
        return {split: GraphStore.load(cache / split) for split in SPLITS}
    except ValueError:
        return None


def _build(dataset: Dataset, raw: Path, cache: Path) -> None:
    shutil.rmtree(cache, ignore_errors=True)
    with new_folder(cache) as part:
        for split, store in read_splits(dataset, raw):
            store.save(part / split)


def _check_counts(dataset: Dataset, stores: dict[str, GraphStore], raw: Path, strict: bool) -> None:
    found = tuple(len(stores[split]) for split in SPLITS)
    if found == dataset.graphs:
        return
    message = (
        f"{raw} holds {_three(found)} graphs (train / val / test) and the official {dataset.name} "
        f"{_three(dataset.graphs)}: scores do not compare with published ones"
    )
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def _three(counts: tuple[int, ...]) -> str:
    return " / ".join(f"{count:,}" for count in counts)
