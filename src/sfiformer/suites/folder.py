"""The folder of a suite: its run folders, what their processes printed, and what failed.

runs/DATASET/MODEL/seed-N/     an ordinary run folder
logs/DATASET/MODEL/seed-N.log  what its process printed
suite.json                     the suite, the overrides for all runs, the runs that failed and why
report/                        what `sfi suite report` wrote
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sfiformer.errors import UserError
from sfiformer.files import whole_file
from sfiformer.suites.plan import RUNS, Run, differences, restoring
from sfiformer.training.run_folder import RESULT, RunFolder

RECORD = "suite.json"
CHANGED = "the settings have changed: "


@dataclass
class Record:
    """What suite.json holds."""

    suite: str
    overrides: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons, by the name of the run."""


class SuiteFolder:
    """Where a suite's runs are."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.path / RUNS / name)

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def finished(self, name: str) -> bool:
        return (self.run(name).path / RESULT).is_file()

    def objections(self, run: Run) -> list[str]:
        """Why what is in the run's folder does not count as the run that is planned now, a sentence each."""
        folder = self.run(run.name)
        if not folder.exists:
            return [f"{folder.path} has a result, but no settings"] if self.finished(run.name) else []
        try:
            changes = differences(folder.config(), run.config)
            about = folder.about()
            if about and run.needs != (source := _source(about)):
                changes.append(f"init_from is now {run.needs or 'nothing'}, was {source or 'nothing'}")
            found = [f"{CHANGED}{change}" for change in changes]
            folder.require_own_file("or train anew")
            if self.finished(run.name):
                self.result(run.name)
                self.epochs(run.name)
        except ValueError as error:  # a file of the run that is damaged, or no longer there
            return [str(error)]
        return found

    def restoring(self, run: Run) -> list[str]:
        """The settings that would make the run that is planned now that in the folder, where they can be read."""
        try:
            return restoring(self.run(run.name).config(), run.config)
        except ValueError:
            return []

    def result(self, name: str) -> dict[str, Any]:
        """What result.json holds."""
        result = self.run(name).result()
        if missing := [key for key in ("metric", "higher_is_better", "test") if key not in result]:
            raise UserError(f"{self.run(name).path / RESULT} is damaged: it has no {missing[0]}")
        return result

    def busy(self, name: str) -> bool:
        """Whether some process is training in the run's folder."""
        path = self.run(name).path
        if not path.is_dir():
            return False
        try:
            with FileLock(path / ".lock", timeout=0):
                return False
        except Timeout:
            return True

    def epochs(self, name: str) -> list[dict[str, Any]]:
        """The metrics of every epoch so far."""
        path = self.run(name).path / "metrics.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written
        except OSError:
            return []
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from None

    def record(self, suite: str) -> Record:
        """The record so far; that of a suite of another name is an error."""
        path = self.path / RECORD
        if not path.exists():
            return Record(suite)
        try:
            record = Record(**json.loads(path.read_text(encoding="utf-8")))
            if not (isinstance(record.overrides, dict) and isinstance(record.failed, dict)):
                raise ValueError("overrides and failed must be mappings")
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged: {error}; remove it, the runs beside it are kept") from None
        if record.suite != suite:
            raise UserError(
                f"{self.path} holds the runs of the suite {record.suite}, not of {suite}; choose another --out"
            )
        return record

    def write(self, record: Record) -> None:
        with whole_file(self.path / RECORD) as file:
            file.write((json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n").encode())

    @contextmanager
    def claim(self) -> Iterator[None]:
        """No other `sfi suite run` can work here within the `with` block."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(f"another sfi suite run is at work in {self.path}") from None
        try:
            yield
        finally:
            lock.release()


def _source(about: Mapping[str, Any]) -> str | None:
    """The name of the run that a run started from, by its about.json, which has "PATH: what was loaded"."""
    path, _, _ = str(about.get("init_from", "")).partition(": ")
    return "/".join(Path(path).parts[-3:]) or None


def failure(log: Path, code: int) -> str:
    """Why a process failed: the last line that it printed, or how it ended."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith("$ ")]
    if code < 0:
        return f"killed by signal {-code}{' (out of memory?)' if code == -9 else ''}"
    errors = [line.removeprefix("sfi: ") for line in said if line.startswith("sfi: ")]
    return (errors or said or [f"exit code {code}"])[-1]
