"""A finished run, opened to look at what its attention does with the graphs of its data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from sfiformer.data.store import GraphStore
from sfiformer.errors import UserError
from sfiformer.explain.record import Checkpoint, GraphRecord, Split, attention_layers, record
from sfiformer.training.evaluation import raw_stores
from sfiformer.training.inference import load_checkpoint, model_inputs
from sfiformer.training.run_folder import SPLITS, RunFolder

# Superpixels: the last two features are the row and column of the centre.
SUPERPIXELS = ("pascalvoc-sp", "coco-sp", "mnist", "cifar10")


class ExplainedRun:
    """The model of a run's checkpoint beside the graphs of a split, on the CPU.

    Args:
        run: a run folder of `sfiformer.train`.
        split: of the run's own data.
        checkpoint: which weights.
        data: another place of the run's data (a folder), or a file of graphs, all of which are taken.
        skip_bad: leave out bad rows of that file, with a warning, also where the run did not leave out its own.
        smiles_column: of that file, a CSV; None: as in training, or found.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        split: Split = "test",
        checkpoint: Checkpoint = "best",
        data: str | Path | None = None,
        skip_bad: bool = False,
        smiles_column: str | None = None,
    ) -> None:
        folder = RunFolder(run)
        self.path, self.config = folder.path, folder.config()
        self.task, _, self.standardizer = folder.task()
        self.model = load_checkpoint(folder, checkpoint)
        self._of_file = data is not None and not Path(data).is_dir()
        self.place = Path(data).name if data is not None and self._of_file else split
        self._split, self._data, self._skip_bad, self._smiles_column = split, data, skip_bad, smiles_column
        self._ids = {} if self._of_file else folder.ids()  # of the run's own graphs, by split
        try:
            attention_layers(self.model)  # before minutes are spent on reading the data
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    @property
    def stores(self) -> list[GraphStore]:
        """The graphs as they were read; those of a file come in several stores, without labels where they will not do."""
        return [store for _, store in self._parts]

    @cached_property
    def _parts(self) -> list[tuple[list[str], GraphStore]]:
        try:
            return list(self._read())
        except ValueError as error:
            if not self._of_file:
                raise
            # What was wrong with the graphs themselves is wrong again.
            parts = list(self._read(labels=False))
            warnings.warn(f"labels are left out: {error}", stacklevel=2)
            return parts

    def _read(self, *, labels: bool = True) -> Iterator[tuple[list[str], GraphStore]]:
        return raw_stores(
            RunFolder(self.path),
            self._split,
            self._data,
            labels=labels,
            skip_bad=self._skip_bad,
            smiles_column=self._smiles_column,
        )

    @cached_property
    def _names(self) -> list[str]:
        """What the graphs of a file are called: as predictions call them, by their ids or their places in it."""
        return [name for names, _ in self._parts for name in names] if self._of_file else []

    def __len__(self) -> int:
        """How many graphs there are."""
        return sum(map(len, self.stores))

    def record(self, graph: int | str) -> GraphRecord:
        """What the model does with the graph of this number, or this id."""
        if self._of_file:
            graph = self._position(str(graph))
        return next(self.records([self._number(graph) if isinstance(graph, str) else graph]))

    def records(self, graphs: Sequence[int]) -> Iterator[GraphRecord]:
        """The same for several graphs, one in memory at a time."""
        for graph in graphs:
            store, place = self._find(graph)
            one = store.subset([place])
            batch = model_inputs(one, self.model.config, self.standardizer, progress=False).batch([0])
            ids = self._ids.get(self._split)
            yield record(
                self.model,
                batch,
                task=self.task,
                name=f"{self.place}[{self._names[graph] if self._names else graph}]",
                positions=self._positions(one),
                id=ids[graph] if ids else None,
            )

    def _position(self, name: str) -> int:
        """Where among the graphs of a file the one of this name is; where all have ids, a number says it too."""
        if (
            name.isdecimal()
            and str(int(name)) == name
            and not any(other.isdecimal() for other in self._names)
        ):
            return int(name)
        found = [number for number, other in enumerate(self._names) if other == name]
        if len(found) != 1:
            some = ", ".join(self._names[:3]) + (", …" if len(self._names) > 3 else "")
            wrong = "no graph" if not found else f"{len(found)} graphs"
            raise UserError(
                f"there is {wrong} {name!r} in {self.place}: its graphs are called {some}, as sfi predict calls them "
                "(bad rows are left out)"
            )
        return found[0]

    def _number(self, graph: str) -> int:
        """The number of the graph of this id in the split."""
        if not self._ids:
            raise UserError(f"the graphs of {self.place} are called by their numbers, from 0, not {graph!r}")
        numbers = {
            split: [number for number, name in enumerate(ids) if name == graph]
            for split, ids in self._ids.items()
        }
        found = numbers.get(self._split, [])
        if len(found) > 1:
            raise UserError(f"{self.place} has {len(found)} graphs {graph!r}; give a number: {found}")
        if not found:
            others = [split for split in numbers if numbers[split]]
            hint = f"it is in {others[0]}" if others else f"{self.path / SPLITS} lists those there are"
            raise UserError(f"there is no graph {graph!r} in {self.place}; {hint}")
        return found[0]

    def _find(self, graph: int) -> tuple[GraphStore, int]:
        offsets = np.cumsum([0, *map(len, self.stores)])
        if not 0 <= graph < offsets[-1]:
            ids = self._ids.get(self._split, [])
            hint = (
                f"; the one whose id is {graph} has number {ids.index(str(graph))}"
                if str(graph) in ids
                else ""
            )
            raise UserError(
                f"there is no graph {graph} in {self.place}: its {offsets[-1]} graphs are numbered from 0{hint}"
            )
        part = int(np.searchsorted(offsets, graph, side="right")) - 1
        return self.stores[part], graph - int(offsets[part])

    def _positions(self, store: GraphStore) -> Tensor | None:
        """The places of the nodes, [n, 2]: to the right, and down."""
        if self.config.data.name in SUPERPIXELS:
            return store.node["x"][:, -2:].flip(-1).float()
        if "pos" in store.node and store.node["pos"].shape[1:] == (2,):
            return store.node["pos"].float()
        return None
