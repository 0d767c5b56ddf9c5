"""A trained model with all that it takes to read new graphs and to say its outputs in the user's terms."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sfiformer.data.batch import GraphBatch
from sfiformer.data.custom import stream
from sfiformer.data.decode import decode
from sfiformer.data.schema import Schema
from sfiformer.data.seen import Seen, has_both_ways, named, unseen
from sfiformer.data.source import CSV, Bad, skipped
from sfiformer.data.standardize import Standardizer
from sfiformer.data.store import GraphStore
from sfiformer.data.task import Task
from sfiformer.errors import UserError
from sfiformer.nn.model import SFiFormer
from sfiformer.training.inference import load_checkpoint, model_inputs, pick_device
from sfiformer.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch_geometric.data import Data

Table = dict[str, list[Any]]
SHOWN = 5  # graphs that a warning names


class Predictor:
    """Predicts on the device that the model is on.

    Args:
        model: the trained model.
        task: what its outputs mean.
        schema: the features that it was trained on; other graphs are refused.
        standardizer: of the training features, where they were standardised.
        seen: the categories of the training graphs; of graphs with others a warning tells.
        smiles_column: of the CSV files that are to come, where it cannot be found.
        skip_bad: leave out bad rows of the files that are to come, with a warning.
        from_smiles: whether the training graphs were made of SMILES; of files that are read otherwise a warning tells.
        both_ways: whether edges of the training graphs had their reverses; of graphs that differ a warning tells.
    """

    def __init__(
        self,
        model: SFiFormer,
        task: Task,
        schema: Schema,
        standardizer: Standardizer | None = None,
        *,
        seen: Seen | None = None,
        smiles_column: str | None = None,
        skip_bad: bool = False,
        from_smiles: bool | None = None,
        both_ways: bool | None = None,
    ) -> None:
        self.model, self.task, self.schema = model.eval(), task, schema
        self.standardizer, self.smiles_column, self.skip_bad = standardizer, smiles_column, skip_bad
        self.seen, self.from_smiles, self.both_ways = seen or {}, from_smiles, both_ways

    @classmethod
    def from_run(cls, run: str | Path, *, checkpoint: str = "best", device: str = "auto") -> "Predictor":
        """The model of a run's checkpoint, "best" or "last", on a device ("auto": a GPU where there is one)."""
        folder = RunFolder(run)
        task, schema, standardizer = folder.task()
        data = folder.config().data
        model = load_checkpoint(folder, checkpoint).to(pick_device(device))
        from_smiles = None if data.path is None else data.path.endswith(CSV)
        return cls(
            model,
            task,
            schema,
            standardizer,
            seen=folder.seen(),
            smiles_column=data.smiles_column,
            skip_bad=data.skip_bad,
            from_smiles=from_smiles,
            both_ways=folder.both_ways(),
        )

    def tables(
        self,
        source: "str | Path | Sequence[Data]",
        *,
        batch_size: int = 32,
        bad: Bad | None = None,
        smiles_column: str | None = None,
    ) -> Iterator[Table]:
        """The table of predictions part by part, `batch_size` graphs in memory at a time; see `predict`."""
        if batch_size < 1:
            raise UserError(f"the batch size is {batch_size}; it must be at least 1")
        rows = 0
        column = smiles_column or self.smiles_column
        left_out: Bad | None = [] if bad is None and self.skip_bad else bad
        told = False
        strange: list[str] = []
        ways: set[bool | None] = set()
        for ids, store in stream(source, self.schema, chunk=batch_size, bad=left_out, smiles_column=column):
            if (
                not told
            ):  # once there are graphs: what cannot be read at all is an error without a warning before it
                self._tell_of_other_features(source)
            told = True
            for graph, category in unseen(store, self.seen):
                strange.append(f"{ids[graph]} ({named(category, self.schema)})")
            ways.add(has_both_ways(store))
            if table := self._table(ids, store):
                rows += len(table["graph"])
                yield table
        if not rows:
            raise UserError(self._nothing(source, left_out))
        if left_out and bad is None:
            warnings.warn(skipped(left_out), stacklevel=2)
        self._tell_of_other_edges(ways)
        if strange:
            more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
            warnings.warn(
                f"{len(strange)} graphs have what no training graph has, and weights that were never trained stand for it: "
                f"{', '.join(strange[:SHOWN])}{more}",
                stacklevel=2,
            )

    def _tell_of_other_features(self, source: "str | Path | Sequence[Data]") -> None:
        """A warning, since graphs may have been given the features that SMILES have here."""
        smiles = isinstance(source, str | Path) and str(source).endswith(CSV)
        if self.from_smiles is not None and smiles != self.from_smiles:
            here, there = ("SMILES", "graphs with features of their own")[:: 1 if smiles else -1]
            warnings.warn(
                f"these are {here}, and the model was trained on {there}: its predictions mean something only where "
                "these are the Open Graph Benchmark's atom and bond features",
                stacklevel=3,
            )

    def _tell_of_other_edges(self, ways: set[bool | None]) -> None:
        """A warning where edges that were listed both ways in training are listed once, or the other way round."""
        here = True if True in ways else False if False in ways else None
        if here is not None and self.both_ways is not None and here != self.both_ways:
            these, those = ("no edge", "edges") if self.both_ways else ("edges", "no edge")
            warnings.warn(
                f"{these} of these graphs and {those} of the training graphs have a reverse: edges are directed, so list "
                "them as in training, undirected ones both ways",
                stacklevel=3,
            )

    @torch.inference_mode()
    def _table(self, ids: list[str], store: GraphStore) -> Table:
        places = self._places(ids, store)
        if not places["graph"]:
            return {}
        device = next(self.model.parameters()).device
        store = model_inputs(store, self.model.config, self.standardizer, progress=False)
        outputs = [self.model(batch.to(device)).float().cpu() for batch in self._batches(store)]
        return places | decode(self.task, torch.cat(outputs))

    def _batches(self, store: GraphStore) -> Iterator[GraphBatch]:
        if self.model.config.solver == "proximal":
            # The random start of the iteration depends on a graph's batch-mates: let there be none.
            yield from (store.batch([graph]) for graph in range(len(store)))
        else:
            yield store.batch(range(len(store)))

    def _places(self, ids: list[str], store: GraphStore) -> Table:
        """The columns that say what each row of outputs is of."""
        if self.task.level == "graph":
            return {"graph": ids}
        ptr = store.node_ptr if self.task.level == "node" else store.link_ptr
        if ptr is None:
            return {"graph": []}
        counts = ptr.diff().tolist()
        graph = [name for name, count in zip(ids, counts, strict=True) for _ in range(count)]
        if self.task.level == "node":
            return {"graph": graph, "node": [node for count in counts for node in range(count)]}
        source, target = store.link["edge_label_index"].t().tolist()
        return {"graph": graph, "source": source, "target": target}

    def _nothing(self, source: Any, bad: Bad | None) -> str:
        name = source if isinstance(source, str | Path) else "the list"
        if bad:
            place, reason = bad[0]
            return f"{name} holds no graph to predict: all {len(bad)} are bad, the first {place}: {reason}"
        if self.task.level == "link":
            return f"{name} lists no links to score: give graphs `links`, pairs of nodes [[from, to], …]"
        return f"{name} holds no graphs"
