"""Graph stores on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sfiformer.files import whole_file, whole_folder

if TYPE_CHECKING:
    from sfiformer.data.store import GraphStore

FORMAT = "sfiformer graph store"
VERSION = 1
MANIFEST = "manifest.json"
LEVELS = ("node", "edge", "graph", "link")


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
