"""Metrics of a model on graphs it may not have seen: while it is trained, and of a finished run."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Literal

import numpy as np
import torch
from torchmetrics import Metric, MetricCollection

from sfiformer import ranks
from sfiformer.config import DataConfig
from sfiformer.data.named import load_dataset
from sfiformer.data.pack import has_labels
from sfiformer.data.schema import Schema
from sfiformer.data.source import Bad, digest, skipped
from sfiformer.data.store import GraphStore
from sfiformer.data.task import Task
from sfiformer.errors import UserError
from sfiformer.nn.model import SFiFormer
from sfiformer.training.examples import answers
from sfiformer.training.inference import load_checkpoint, model_inputs, pick_device
from sfiformer.training.metrics import MAE
from sfiformer.training.mrr import link_mrrs
from sfiformer.training.preparation import as_trained, encoding_cache, objective
from sfiformer.training.replay import Replay
from sfiformer.training.run_folder import CONFIG, RunFolder
from sfiformer.training.sampling import in_batches, share

CHUNK = 256  # graphs of a user's file that are in memory at a time


@torch.no_grad()
def measure(
    metric: Metric | MetricCollection,
    model: SFiFormer,
    store: GraphStore,
    task: Task,
    *,
    batch_size: int,
    device: torch.device,
    graphs: np.ndarray | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    between: Callable[[], None] | None = None,
    replay: Replay | None = None,
) -> None:
    """Let `metric` see the model in evaluation mode on all graphs of a store, or on those numbered `graphs`.

    Each rank takes its share of every batch and none a graph twice; `metric.compute()` joins them. `between`
    is called before each batch, on all ranks. `replay`, if given, says what `answers` does.
    """
    model.eval()
    everything = np.arange(len(store)) if graphs is None else graphs
    batches = [
        batch[share(batch, ranks.rank(), ranks.count())] for batch in in_batches(everything, batch_size)
    ]
    for number, mine in enumerate(batches):
        if between is not None:
            between()
        if replay is not None:
            metric.update(*replay([mine], batches[number + 1 : number + 2] or None))
        elif len(mine):
            with autocast():
                metric.update(*answers(model, store.batch(mine).to(device), task))


def computed(metric: Metric) -> float:
    """The value over all ranks; the metric starts anew."""
    with warnings.catch_warnings():  # a rank without graphs has nothing to compute from, and need not
        warnings.filterwarnings("ignore", message=".*called before the ``update`` method.*")
        value = float(metric.compute())
    metric.reset()
    return value


def evaluate(
    run: str | Path,
    *,
    split: Literal["train", "val", "test"] | None = None,
    checkpoint: Literal["best", "last"] = "best",
    data: str | Path | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    skip_bad: bool = False,
    smiles_column: str | None = None,
) -> dict[str, float]:
    """The metrics of a run's checkpoint, by name; of several targets to regress, the error of each, too.

    Args:
        run: the run's folder.
        split: of the run's own data; None for test.
        data: another place of the run's data (a folder, for `data.root`), or a file of labelled graphs like
            those that the run was trained on, all of which are evaluated.
        batch_size: graphs at a time; None for the run's own.
        device: "cpu", "cuda", …; "auto" for a GPU where there is one.
        skip_bad: leave out bad rows of a file, with a warning, also where the run did not leave out its own.
        smiles_column: of a CSV; None: as in training, or found.
    """
    if batch_size is not None and batch_size < 1:
        raise UserError(f"the batch size is {batch_size}; it must be at least 1")
    folder = RunFolder(run)
    if data is not None and Path(data).is_file():
        _require_other_file(folder, data, split)
    split = split or "test"
    config = folder.config()
    task, _, standardizer = folder.task()
    model = load_checkpoint(folder, checkpoint)
    place = pick_device(device)
    model.to(place)
    # A ranking has three variants of its metric.
    metric = (link_mrrs() if task.kind == "ranking" else objective(config, task)[1]).to(place)
    labelled, found = False, 0
    for _, raw in raw_stores(folder, split, data, skip_bad=skip_bad, smiles_column=smiles_column):
        labelled, found = labelled or has_labels(raw, task), found + len(raw)
        store = model_inputs(
            raw, model.config, standardizer, encoding_cache(config) if data is None else None
        )
        measure(metric, model, store, task, batch_size=batch_size or config.data.batch_size, device=place)
    if not found:
        raise UserError(f"{data or f'the split {split}'} holds no graphs")
    if not labelled:
        columns = f" in {', '.join(task.columns)}" if task.columns else ""
        raise UserError(
            f"{data or f'the split {split}'} has no labels to evaluate against{columns}; sfi predict needs none"
        )
    values = metric.compute()
    scores = values if isinstance(values, dict) else {str(metric.name): values}
    if undefined := [name for name, value in scores.items() if math.isnan(value)]:
        why = "there are no true links" if task.kind == "ranking" else "the labels are of one class"
        warnings.warn(f"{', '.join(undefined)}: not defined, {why}", stacklevel=2)
    if isinstance(metric, MAE) and task.outputs > 1 and (metric.relative or task.target_names):
        names = [f"mae:{name}" for name in task.target_names or range(task.outputs)]
        scores |= dict(zip(names, metric.by_target(), strict=True))
    return scores


def _require_other_file(run: RunFolder, data: str | Path, split: str | None) -> None:
    if split is not None:
        raise UserError(
            f"{data} is measured whole: give it without --split {split}, or take the split of the run's own data"
        )
    if digest(data) == run.about().get("data_sha256"):
        warnings.warn(
            f"{data} is the file that {run.path} was trained on: its training graphs are measured, too",
            stacklevel=3,
        )


def raw_stores(
    run: RunFolder,
    split: str,
    data: str | Path | None,
    *,
    labels: bool = True,
    skip_bad: bool = False,
    smiles_column: str | None = None,
) -> Iterator[tuple[list[str], GraphStore]]:
    """The graphs of a split of a run's data, or of a file, with its labels or without, part by part, as they were read.

    Those of a user's own file come with what they are called: their ids, or their places in the file. Bad rows are left out
    where the run left out its own, or with ``skip_bad``, and a warning says so. ``smiles_column`` is that of the file, if not
    as in training.
    """
    config, (task, schema, _) = run.config(), run.task()
    settings = as_trained(config.data, task)
    of_file = data is not None and not Path(data).is_dir()
    if not of_file and (skip_bad or smiles_column is not None):
        option = "--skip-bad" if skip_bad else "--smiles-column"
        raise UserError(
            f"{option} is for a file: name it with --data, or leave that out; {run.path} reads its own as it did"
        )
    if data is not None and of_file:
        settings = replace(
            settings,
            skip_bad=skip_bad or settings.skip_bad,
            smiles_column=smiles_column or settings.smiles_column,
        )
        yield from _file(data, settings, task if labels else None, schema)
        return
    run.require_own_file("give it with --data to take all of its graphs, or train anew")
    if settings.path is not None and not Path(settings.path).exists():
        folder, again = quote(str(run.path)), f"sfi train {quote(str(run.path / CONFIG))}"
        raise UserError(
            f"{settings.path}, which the run in {run.path} was trained on, is not there: put it back, name its new place "
            f"to the run ({again} --data.path FILE --out {folder} --resume), or give a file of graphs with --data"
        )
    if data is not None:
        settings = replace(settings, root=str(data))
    dataset = load_dataset(settings, config.seed)
    run.require_same_split(dataset.ids)
    if split not in dataset.splits:
        raise UserError(f"{dataset.name} has no split {split!r}; it has {', '.join(dataset.splits)}")
    if dataset.schema != schema or _meaning(dataset.task) != _meaning(task):
        raise UserError(
            f"{dataset.name} is not what the run was trained on: {dataset.task.describe()}, not {task.describe()}"
        )
    _warn(dataset.bad)
    yield dataset.ids.get(split, []), dataset.splits[split]


def _file(
    data: str | Path, settings: DataConfig, task: Task | None, schema: Schema
) -> Iterator[tuple[list[str], GraphStore]]:
    from sfiformer.data.custom import stream  # PyTorch Geometric takes seconds to import

    bad: Bad | None = [] if settings.skip_bad else None
    yield from stream(
        data,
        schema,
        task=task,
        chunk=CHUNK,
        bad=bad,
        targets=settings.targets,
        smiles_column=settings.smiles_column,
    )
    _warn(bad)


def _warn(bad: Bad | None) -> None:
    if bad:
        warnings.warn(skipped(bad), stacklevel=2)


def _meaning(task: Task) -> tuple[object, ...]:
    """What must be alike in two tasks for the outputs of a model to mean the same in both."""
    return task.level, task.kind, task.outputs, task.class_names, task.target_names
