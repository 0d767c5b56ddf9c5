"""Encodings of a whole store, computed once by several processes and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import joblib
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sfiformer.data.encodings import Encoding
from sfiformer.data.store import GraphStore
from sfiformer.files import whole_file

logger = logging.getLogger(__name__)

VERSION = 1  # of the encodings' definitions: a change makes older cache files unknown
CHUNK = 64  # graphs a task
# Below this many n³, summed over the graphs (some seconds' work), starting processes does not pay.
SERIAL_WORK = 4e9

Graph = tuple[int, np.ndarray]  # nodes, edge_index [2, E]


def add_encodings(
    store: GraphStore,
    encodings: Sequence[Encoding],
    *,
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> GraphStore:
    """The store with the encodings' fields added.

    Args:
        store: the graphs.
        encodings: for instance `[LapPE(10), RandomWalkSE(16)]`.
        cache: a folder. Each encoding is kept there in a file of its own, named after the encoding and a
            digest of the graphs' structure and the encoding's settings; what is found there is not computed
            again, and a damaged file is replaced.
        workers: processes, with one BLAS thread each; None means every core, or just this process where the
            graphs are few and small.
        progress: show a progress bar on standard error.
    """
    for encoding in encodings:
        path = None if cache is None else Path(cache) / f"{_digest(store, encoding)}.npz"
        fields = _read(path, encoding, store)
        if fields is None:
            fields = _compute(store, encoding, workers, progress)
            _write(path, fields)
        tensors = {name: torch.from_numpy(values) for name, values in fields.items()}
        store = store.with_fields(
            node={name: tensor for name, tensor in tensors.items() if encoding.levels[name] == "node"},
            graph={name: tensor for name, tensor in tensors.items() if encoding.levels[name] == "graph"},
        )
    return store


def _digest(store: GraphStore, encoding: Encoding) -> str:
    settings = {"version": VERSION, "encoding": type(encoding).__name__, **asdict(encoding)}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for tensor in (store.node_ptr, store.edge_ptr, store.edge_index.cpu().to(torch.int32)):
        digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return f"{type(encoding).__name__.lower()}-{digest.hexdigest()[:32]}"


def _read(path: Path | None, encoding: Encoding, store: GraphStore) -> dict[str, np.ndarray] | None:
    """The fields in a cache file, or None where they must be computed. The archive checks its own sums."""
    if path is None or not path.exists():
        return None
    rows = {"node": store.num_nodes, "graph": len(store)}
    try:
        with np.load(path, allow_pickle=False) as archive:
            fields = {name: archive[name] for name in encoding.levels}
        if any(values.shape[:1] != (rows[encoding.levels[name]],) for name, values in fields.items()):
            raise ValueError("the number of rows is another")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("%s is damaged (%s); computing it again", path, error)
        return None
    return fields


def _write(path: Path | None, fields: dict[str, np.ndarray]) -> None:
    if path is None:
        return
    try:
        with whole_file(path) as file:
            np.savez(file, allow_pickle=False, **fields)
    except OSError as error:  # the encodings are at hand all the same
        logger.warning("%s could not be written (%s); the next run computes it again", path, error)


def _compute(
    store: GraphStore, encoding: Encoding, workers: int | None, progress: bool
) -> dict[str, np.ndarray]:
    if workers is None:
        work = float((store.node_ptr.diff().double() ** 3).sum())
        workers = 1 if work < SERIAL_WORK else joblib.cpu_count()
    tasks = (joblib.delayed(_encode)(encoding, graphs) for graphs in _chunks(store))
    with (
        joblib.parallel_config("loky", n_jobs=workers, inner_max_num_threads=1),
        _bar(type(encoding).__name__, len(store), progress) as bar,
    ):
        results = []
        for count, fields in joblib.Parallel(return_as="generator", max_nbytes=None, batch_size=1)(tasks):
            results.append(fields)
            bar.advance(bar.task_ids[0], count)
    return {name: np.concatenate([fields[name] for fields in results]) for name in encoding.levels}


def _chunks(store: GraphStore) -> Iterator[list[Graph]]:
    node_ptr, edge_ptr = store.node_ptr.numpy(), store.edge_ptr.numpy()
    edge_index = store.edge_index.cpu().numpy()
    for first in range(0, len(store), CHUNK):
        yield [
            (int(node_ptr[g + 1] - node_ptr[g]), np.array(edge_index[:, edge_ptr[g] : edge_ptr[g + 1]]))
            for g in range(first, min(first + CHUNK, len(store)))
        ]


def _encode(encoding: Encoding, graphs: list[Graph]) -> tuple[int, dict[str, np.ndarray]]:
    encoded = [encoding(num_nodes, edge_index) for num_nodes, edge_index in graphs]
    return len(graphs), {
        name: np.concatenate([fields[name] for fields in encoded]) for name in encoding.levels
    }


def _bar(name: str, graphs: int, shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
    bar.add_task(f"{name} of {graphs:,} graphs", total=graphs)
    return bar
