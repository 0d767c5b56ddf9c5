"""A dataset by its settings: generated, official, or one's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from sfiformer.data import synthetic
from sfiformer.data.dataset import Dataset
from sfiformer.data.official import facts, find, load
from sfiformer.data.official.registry import Dataset as Official
from sfiformer.data.schema import Features, Schema
from sfiformer.data.smiles import ATOM_SIZES, BOND_SIZES
from sfiformer.data.store import GraphStore
from sfiformer.errors import UserError
from sfiformer.files import whole_folder

if TYPE_CHECKING:
    from sfiformer.config import DataConfig

GENERATORS = {"cluster": synthetic.cluster, "pattern": synthetic.pattern}
VERSION = 1  # of the generators: a change makes older generated graphs unknown


def load_dataset(settings: DataConfig, seed: int = 0) -> Dataset:
    """The graphs that the settings name, their task and schema; nothing is encoded or standardised yet.

    CLUSTER and PATTERN are read from the official files where `root` or `mirror` holds them, else generated
    from the seed (and kept under `root`); `size: small` is always generated.

    Raises:
        ValueError: names the setting, file or graph, and what would be right.
    """
    if settings.name == "custom":
        return _custom(settings, seed)
    official = find(settings.name)
    if settings.path is not None:
        raise UserError(
            f"data.path is {settings.path}, but the dataset is {official.name}: for graphs of one's own "
            "take the preset custom, or set data.name to custom"
        )
    generated = settings.size == "small" or (
        official.name in GENERATORS and settings.mirror is None and not _at_hand(official, settings.root)
    )
    if not generated:
        stores = load(official.name, settings.root, settings.mirror)
        origin = "official files"
    elif official.name in GENERATORS:
        stores = _generated(official.name, settings.size, seed, Path(settings.root))
        origin = f"generated, size {settings.size}, seed {seed}"
    else:
        raise UserError(
            f"data.size is small, but {official.name} cannot be generated; only {' and '.join(GENERATORS)} can"
        )
    means = facts(*stores.values())
    return Dataset(
        name=official.name,
        splits=stores,
        task=official.task,
        schema=_schema(official),
        notes=(
            f"{origin}; on average {means.mean_nodes:.1f} nodes and {means.mean_edges:.1f} edges a graph",
        ),
    )


def _custom(settings: DataConfig, seed: int) -> Dataset:
    if settings.path is None:
        raise UserError("data.path is not set: give the file that holds your graphs (--data.path FILE)")
    # PyTorch Geometric takes seconds to import, and only users' files need it.
    from sfiformer.data.custom import load_custom

    return load_custom(
        settings.path,
        split=settings.split,
        fractions=settings.fractions,
        seed=seed if settings.split_seed is None else settings.split_seed,
        skip_bad=settings.skip_bad,
        level=settings.level,
        kind=settings.kind,
        node_features=settings.node_feature_kind,
        edge_features=settings.edge_feature_kind,
        targets=settings.targets,
        smiles_column=settings.smiles_column,
        split_column=settings.split_column,
    )


def _at_hand(official: Official, root: str) -> bool:
    raw = Path(root) / official.folder / "raw"
    return all((raw / file).is_file() for file in official.files)


def _generated(name: str, size: str, seed: int, root: Path) -> dict[str, GraphStore]:
    """The generated stores, from the disk where they were made before."""
    folder = root / "generated" / f"{name}-{size}-{seed}-v{VERSION}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            return _read(folder) or _write(folder, GENERATORS[name](size, seed))
    except OSError:  # graphs that cannot be kept are made again next time
        return GENERATORS[name](size, seed)


def _read(folder: Path) -> dict[str, GraphStore] | None:
    try:
        return {split: GraphStore.load(folder / split) for split in synthetic.SPLITS}
    except ValueError:
        return None


def _write(folder: Path, stores: dict[str, GraphStore]) -> dict[str, GraphStore]:
    shutil.rmtree(folder, ignore_errors=True)
    with whole_folder(folder) as partial:
        for split, store in stores.items():
            store.save(partial / split)
    return stores


def _schema(official: Official) -> Schema:
    if official.molecular:
        return Schema(Features(9, "categories", ATOM_SIZES), Features(3, "categories", BOND_SIZES))
    edge = Features(official.edge_width, "numbers") if official.edge_width else None
    return Schema(Features(official.node_width, "numbers"), edge)
