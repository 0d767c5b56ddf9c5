"""Graph stores on disk, and writing files so that no half of one is ever taken for a whole."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from sfiformer.data.store import GraphStore

FORMAT = "sfiformer graph store"
VERSION = 1
MANIFEST = "manifest.json"
LEVELS = ("node", "edge", "graph", "link")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that takes its place at `path` when all is on the disk, or leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _sibling(path)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that takes its place at `folder` when the block ends well, or leaves nothing behind.

    What was at `folder` before is replaced, in two renames: a reader finds the old one, the new one, or for
    an instant none. The files in it must be synced by their writer.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, old = _sibling(folder), _sibling(folder)
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sibling(path: Path) -> Path:
    """A hidden, unused name beside `path`; unlike tempfile's, what is made there has ordinary permissions."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def save_store(store: GraphStore, folder: Path) -> None:
    if (
        folder.exists()
        and not (folder / MANIFEST).exists()
        and (not folder.is_dir() or any(folder.iterdir()))
    ):
        raise ValueError(f"{folder} exists and is no graph store; it is left as it is: choose another folder")
    tensors = _flatten(store)
    with whole_folder(folder) as partial:
        sizes = {}
        for name, tensor in tensors.items():
            with whole_file(partial / f"{name}.npy") as file:
                np.save(file, tensor.cpu().numpy(), allow_pickle=False)
                sizes[name] = file.tell()
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "graphs": len(store),
            "nodes": store.num_nodes,
            "edges": store.num_edges,
            "bytes": sizes,
        }
        with whole_file(partial / MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())


def load_store(folder: Path) -> dict[str, Any]:
    """The parts of a saved store, memory-mapped; changes to the tensors stay in memory (copy on write)."""
    manifest = _manifest(folder)
    tensors: dict[str, Tensor] = {}
    for name, size in manifest["bytes"].items():
        # Only names that `_flatten` writes: a manifest cannot point outside its folder.
        if not all(part.isidentifier() for part in str(name).split(".")):
            raise ValueError(f"{folder / MANIFEST}: '{name}' is not the name of a field")
        path = folder / f"{name}.npy"
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            raise ValueError(f"{path} is {found}, not {size} bytes: the store is not whole; write it again")
        try:
            tensors[name] = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        except (ValueError, TypeError, EOFError) as error:
            raise ValueError(
                f"{path} is not a readable .npy file ({error}); write the store again"
            ) from error
    parts: dict[str, Any] = {"link_ptr": None} | {level: {} for level in LEVELS}
    for name, tensor in tensors.items():
        level, _, field = name.partition(".")
        if field:
            parts[level][field] = tensor
        else:
            parts[level] = tensor
    expected = {"node_ptr": manifest["nodes"], "edge_ptr": manifest["edges"]}
    for name, last in expected.items():
        ptr = parts.get(name)
        if ptr is None or ptr.numel() != manifest["graphs"] + 1 or int(ptr[-1]) != last:
            raise ValueError(f"{folder}: {name} does not fit the manifest; write the store again")
    if "edge_index" not in parts:
        raise ValueError(f"{folder} has no edge_index; write the store again")
    return parts


def _flatten(store: GraphStore) -> dict[str, Tensor]:
    tensors = {"node_ptr": store.node_ptr, "edge_ptr": store.edge_ptr, "edge_index": store.edge_index}
    if store.link_ptr is not None:
        tensors["link_ptr"] = store.link_ptr
    for level in LEVELS:
        tensors |= {f"{level}.{name}": tensor for name, tensor in getattr(store, level).items()}
    return tensors


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is no graph store: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text())
        keys = {"format", "version", "graphs", "nodes", "edges", "bytes"}
        if not isinstance(manifest, dict) or not keys <= manifest.keys() or manifest["format"] != FORMAT:
            raise ValueError("not the manifest of a graph store")
    except ValueError as error:
        raise ValueError(f"{path} is not readable ({error}); write the store again") from error
    if manifest["version"] != VERSION:
        raise ValueError(
            f"{path}: version {manifest['version']}, this release reads {VERSION}; write the store again"
        )
    return manifest
