"""A model that starts from the weights of another, which must not have been trained on what this one is judged by."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sfiformer import ranks
from sfiformer.config import ExperimentConfig
from sfiformer.data.dataset import Member
from sfiformer.errors import UserError
from sfiformer.nn.model import SFiFormer, load_dense
from sfiformer.training.inference import load_checkpoint
from sfiformer.training.preparation import Prepared
from sfiformer.training.run_folder import SPLITS, RunFolder

JUDGED = ("val", "test")
Members = Mapping[str, Sequence[Member]]


def start_from(place: str | Path, model: SFiFormer, prepared: Prepared) -> str:
    """Give the model the weights of a dense run, of one of its checkpoints or of a saved model; says what it took.

    Raises:
        UserError: where they do not fit, or were trained on graphs that are to judge this model.
    """
    source, run = RunFolder(place), run_of(place)
    if run is not None:
        require_unseen(run, prepared)
    dense = load_checkpoint(source) if source.exists else SFiFormer.from_pretrained(place)
    try:
        return str(load_dense(model, dense.state_dict(), dense.config))
    except ValueError as error:
        raise UserError(f"cannot start from {place}: {error}") from None


def run_of(place: str | Path) -> RunFolder | None:
    """The run that a folder is, or that it is a checkpoint of."""
    path = Path(place)
    if not path.exists():  # of the Hub
        return None
    # RUN/best is a link to RUN/checkpoints/NAME.
    folders = map(RunFolder, (path, *path.parents[:2], *path.resolve().parents[:2]))
    return next((folder for folder in folders if folder.exists), None)


def require_unseen(run: RunFolder, prepared: Prepared) -> None:
    """Raises UserError where val or test has graphs of a user's file that a run was trained on."""
    before = run.config()
    if prepared.digest is None or before.data.name != "custom":
        return
    own, now = run.members(), prepared.members
    same_file = run.about().get("data_sha256") == prepared.digest
    name = _common_name(own, same_file)
    if name is None:
        if ranks.rank() == 0:
            warnings.warn(
                f"{run.path / SPLITS}, of an earlier release, does not tell which graphs that run was trained on: val and test "
                f"of {prepared.config.data.path} may hold some of them",
                stacklevel=2,
            )
        return
    trained_on = {name(graph) for graph in own.get("train", ())}
    if _cut(before) == _cut(prepared.config):  # a graph that is split by its nodes is split as it was
        trained_on -= {name(graph) for split in JUDGED for graph in own.get(split, ())}
    seen = {graph.row: graph for split in JUDGED for graph in now.get(split, ()) if name(graph) in trained_on}
    if seen:
        remedy = (
            "" if same_file else ", in the file as it was, or take one whose own split keeps them in train"
        )
        raise UserError(
            f"{len(seen)} graphs of val and test, {next(iter(seen.values())).id} among them, are graphs that {run.path} was "
            f"trained on: split as it did (data.split: {before.data.split}, data.split_seed: {before.split_seed}, "
            f"data.fractions: {list(before.data.fractions)}){remedy}"
        )


def _common_name(own: Members, same_file: bool) -> Callable[[Member], object] | None:
    """What tells the graphs of a run in another's file; None where nothing does."""
    everyone = [graph for graphs in own.values() for graph in graphs]
    if everyone and all(graph.digest for graph in everyone):
        return (lambda graph: graph.row) if same_file else (lambda graph: graph.digest)
    # Ids, of an earlier release, are names where no two graphs share one; in another file, a number may be a place.
    ids = [[graph.id for graph in graphs] for graphs in own.values()]
    distinct = all(len(set(names)) == len(names) for names in ids)
    places = all(graph.id.isdecimal() for graph in everyone)
    return (lambda graph: graph.id) if everyone and distinct and (same_file or not places) else None


def _cut(config: ExperimentConfig) -> tuple[object, ...]:
    """The settings of a split."""
    return config.data.split, config.split_seed, config.data.fractions
