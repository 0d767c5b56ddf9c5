"""The folder of a run: what describes it, and who may write to it.

config.yaml     the settings, resolved, as the run has them now
about.json      versions, git revision, times, command, metric, digest of the user's own file, what changed when it was resumed
task.json       the task, the features, those of training, the standardisation: what prediction needs beside the model
splits.csv      of a user's own graphs: the id of each, its split, its number there, its row in the file, a digest of it
skipped.csv     the rows of that file that were left out as bad, where there are any
metrics.jsonl, metrics.csv, tensorboard/    the metrics of every epoch
best/, last/    checkpoints, see `checkpoint`
result.json     at the end
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from sfiformer.config import ExperimentConfig
from sfiformer.data.dataset import Member, ids_of
from sfiformer.data.schema import Features, Schema
from sfiformer.data.seen import Seen, has_both_ways, seen_categories
from sfiformer.data.source import digest
from sfiformer.data.standardize import Standardizer
from sfiformer.data.task import Task
from sfiformer.errors import UserError
from sfiformer.files import cell, whole_file
from sfiformer.schema import as_text
from sfiformer.training.splits_table import read_splits, skipped_text, splits_text
from sfiformer.training.surroundings import surroundings

if TYPE_CHECKING:
    from sfiformer.training.preparation import Prepared
    from sfiformer.training.state import State

CONFIG, ABOUT, TASK, RESULT = "config.yaml", "about.json", "task.json", "result.json"
SPLITS, SKIPPED = "splits.csv", "skipped.csv"
# What may be another in a resumed run. All else would make it another experiment.
CHANGEABLE = ("optim.", "trainer.", "data.root", "data.mirror")
FIXED = ("trainer.accumulate",)


class RunFolder:
    """A run's folder, open for reading; `claim` opens it for training."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / CONFIG).is_file()

    def config(self) -> ExperimentConfig:
        """The resolved settings of the run."""
        self._require()
        return ExperimentConfig.from_preset(str(self.path / CONFIG))

    def task(self) -> tuple[Task, Schema, Standardizer | None]:
        """What prediction needs beside the model."""
        values = self._json(TASK)
        try:
            node, edge = values["schema"]["node"], values["schema"]["edge"]
            schema = Schema(_features(node), None if edge is None else _features(edge))
            scales = values["standardizer"]
            standardizer = None
            if scales is not None:
                mean, std = (
                    {name: torch.tensor(column) for name, column in scales[part].items()}
                    for part in ("mean", "std")
                )
                standardizer = Standardizer(mean, std)
            return Task(**values["task"]), schema, standardizer
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{self.path / TASK} is damaged: {error!r}") from None

    def task_of(self, config: ExperimentConfig) -> Task | None:
        """The task of the run so far; None where there is none, or these settings would ask for another."""
        if not (self.exists and (self.path / TASK).is_file()):  # a run that was killed as it began has none
            return None
        asked, before = config.data, self.config().data
        alike = all(
            getattr(asked, key) == getattr(before, key) for key in ("name", "targets", "level", "kind")
        )
        return self.task()[0] if alike else None

    def seen(self) -> Seen:
        """The categories of the training graphs; nothing where that was not written."""
        return self._json(TASK).get("seen", {})

    def both_ways(self) -> bool | None:
        """Whether edges of the training graphs have their reverses; None where there are none, or it was not written."""
        return self._json(TASK).get("both_ways")

    def result(self) -> dict[str, Any]:
        """What result.json holds."""
        return self._json(RESULT)

    def members(self) -> dict[str, list[Member]]:
        """The graphs of each split of a user's own file, in order; nothing where that was not written."""
        self._require()
        path = self.path / SPLITS
        return read_splits(path) if path.is_file() else {}

    def ids(self) -> dict[str, list[str]]:
        """What the user calls them."""
        return ids_of(self.members())

    @contextmanager
    def claim(self, *, resume: bool) -> Iterator[None]:
        """Make the folder, or open it again; no other process can claim it within the `with` block.

        Raises:
            UserError: where it cannot be written to, is in use, or holds something else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose a folder for the run")
        lock, fresh = FileLock(self.path / ".lock", timeout=0), not self.path.exists()
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout:
                raise UserError(
                    f"another process is training in {self.path}; choose another folder"
                ) from None
        try:
            self._check(resume)
            yield
        finally:
            if not self.exists:  # nothing was begun: leave no trace
                Path(lock.lock_file).unlink(missing_ok=True)
                if fresh and not any(self.path.iterdir()):
                    self.path.rmdir()
            lock.release()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A disk that cannot be written to is the user's to mend."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path}: {error.strerror or error}; mend it, or choose another folder"
            ) from error

    def _check(self, resume: bool) -> None:
        if not self.exists:
            strangers = [path.name for path in self.path.iterdir() if not path.name.startswith(".")]
            if strangers:
                raise UserError(
                    f"{self.path} is no run, but holds {strangers[0]}; choose another folder, or an empty one"
                )
            return
        if not resume:
            raise UserError(
                f"{self.path} holds a run already: --resume continues it, or choose another folder for this one"
            )

    def require_same(self, config: ExperimentConfig) -> None:
        """Raises UserError where the run so far, if there is one, was another experiment."""
        before, now = (self.config().settings(), config.settings()) if self.exists else ({}, {})
        for key, value in now.items():
            if before[key] == value or (key not in FIXED and key.startswith(CHANGEABLE)):
                continue
            moved = key == "data.path" and value is not None
            if not (moved and digest(value) == self.about().get("data_sha256")):  # else it is the same file
                raise UserError(
                    f"the run in {self.path} has {key}: {as_text(before[key])}, and this one {key}: {as_text(value)}; "
                    "resume with the run's own setting, or choose another folder"
                )

    def judged_by(self, name: str) -> str:
        """The metric by which the epochs so far were judged, where the next would be judged by this one."""
        # (Before it was noted, the error of several targets was "mae", in which the largest numbers counted most.)
        unknown = "mae" if name == "relative_mae" else name
        return self.about().get("metric", unknown) if self.exists else name

    def require_metric(self, name: str) -> None:
        """Raises UserError where the epochs so far were judged by another metric than they would be now."""
        before = self.judged_by(name)
        if before != name:
            raise UserError(
                f"the run in {self.path} was judged by {before}, and from now on would be by {name}, which cannot be "
                "compared: train anew in another folder"
            )

    def require_own_file(self, remedy: str, path: Path | str | None = None) -> None:
        """Raises UserError where the user's file that the run so far was trained on is another now.

        It lies at ``path``, or else where it did; what it was is not known of runs of earlier releases.
        """
        own, before = (
            (self.config().data.path, self.about().get("data_sha256")) if self.exists else (None, None)
        )
        path = own if path is None else path
        if path is not None and before is not None and Path(path).is_file() and digest(path) != before:
            raise UserError(
                f"{path} was changed since the run in {self.path} began, and its graphs would be split anew: "
                f"put the file back as it was, {remedy}"
            )

    def require_same_split(self, ids: Mapping[str, Sequence[str]]) -> None:
        """Raises UserError where a user's file, read again, is not split as it was: graphs of training would be tested on."""
        before = self.ids() if self.exists else {}
        now = {split: [cell(name) for name in names] for split, names in ids.items()}
        if before and now != before:
            raise UserError(
                f"{self.config().data.path} would not be split as it was for the run in {self.path}, as {SPLITS} there tells: "
                f"in {self.path / CONFIG} set data.split to the way it was (random, scaffold, column)"
            )

    def changes(self, config: ExperimentConfig) -> dict[str, tuple[Any, Any]]:
        """What the settings that differ from those of the run so far were, and what they are now."""
        before, now = (self.config().settings(), config.settings()) if self.exists else ({}, {})
        return {key: (before[key], now[key]) for key in now if before[key] != now[key]}

    def describe(self, prepared: "Prepared", state: "State", about: Mapping[str, Any]) -> None:
        """Write config.yaml, task.json, splits.csv, skipped.csv and about.json, whose entries `about` adds to.

        `state` is where the run goes on.
        """
        standardizer = prepared.standardizer
        scales = None
        if standardizer is not None:
            scales = {
                part: {name: column.tolist() for name, column in getattr(standardizer, part).items()}
                for part in ("mean", "std")
            }
        task = {
            "task": asdict(prepared.task),
            "schema": asdict(prepared.schema),
            "standardizer": scales,
            "seen": seen_categories(prepared.stores["train"], prepared.schema),
            "both_ways": has_both_ways(prepared.stores["train"]) if prepared.members else None,
        }
        files = {
            CONFIG: prepared.config.to_yaml(),  # first: this file makes a folder a run
            TASK: _json_text(task),
            **({SPLITS: splits_text(prepared.members)} if prepared.members else {}),
            **({SKIPPED: skipped_text(prepared.bad)} if prepared.bad else {}),
            ABOUT: _json_text(self._described(prepared, state, about)),
        }
        # A run notes what changes before it does.
        for name, text in reversed(files.items()) if self.exists else files.items():
            self._write(name, text)

    def note_place(self, path: str | None) -> None:
        """Note where the user's file is by now."""
        config = self.config()
        if config.data.path != path:
            self._write(CONFIG, replace(config, data=replace(config.data, path=path)).to_yaml())

    def _described(self, prepared: "Prepared", state: "State", about: Mapping[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        earlier = self.about()
        kept: dict[str, Any] = {"started": now, "command": sys.argv, "resumed": []}
        kept |= {key: earlier[key] for key in (*kept, "init_from") if key in earlier}
        if earlier:
            place = {"time": now, "epoch": state.epoch, "step": state.step}
            resume = {**place, "command": sys.argv, "changed": self.changes(prepared.config)}
            # Older versions noted the time alone.
            before = [entry if isinstance(entry, dict) else {"time": entry} for entry in kept["resumed"]]
            kept["resumed"] = [*before, resume]
        own = {} if prepared.digest is None else {"data_sha256": prepared.digest}
        return {**kept, **own, **surroundings(), **about}

    def require_space(self, weights: int, *, averaged: bool) -> None:
        """Raises UserError where the disk has no room for the checkpoints of so many bytes of weights."""
        # Best, last and the one being written; each with the two moments of AdamW, and where weights are averaged with both.
        needed = 3 * (4 if averaged else 3) * weights + (1 << 20)
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise UserError(
                f"the disk of {self.path} has {free / 1e6:.1f} MB left, and the checkpoints of this run need "
                f"{needed / 1e6:.1f} MB; free some space, or choose a folder on another disk"
            )

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a file of the run, whole or not at all."""
        self._write(name, _json_text(values))

    def _write(self, name: str, text: str) -> None:
        with whole_file(self.path / name) as file:
            file.write(text.encode())

    def about(self) -> dict[str, Any]:
        """What about.json holds; nothing where there is none."""
        return self._json(ABOUT) if (self.path / ABOUT).is_file() else {}

    def _require(self) -> None:
        if not self.path.is_dir():
            raise UserError(f"there is no folder {self.path}: a run is a folder that sfi train makes")
        if not self.exists:
            above = self.path.parent
            hint = f"; did you mean {above}?" if (above / CONFIG).is_file() else ""
            raise UserError(f"{self.path} is no run: it has no {CONFIG}{hint}")

    def _json(self, name: str) -> dict[str, Any]:
        self._require()
        path = self.path / name
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("not a mapping")
        except OSError as error:
            raise UserError(f"{self.path} is no whole run: cannot read {name}: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{path} is damaged, it is not readable JSON: {error}") from None
        return values


def _json_text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1) + "\n"


def _features(values: dict[str, Any]) -> Features:
    sizes = values["sizes"]
    return Features(values["width"], values["kind"], None if sizes is None else tuple(sizes))
