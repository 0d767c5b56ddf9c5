"""Runs a suite: what can start starts, so many at a time; what fails is recorded, and the rest goes on."""

import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

from sfiformer.errors import UserError
from sfiformer.suites.display import Display
from sfiformer.suites.engines import Engine, Job
from sfiformer.suites.folder import Record, SuiteFolder, failure
from sfiformer.suites.plan import Run

State = Literal["waiting", "running", "finished", "failed", "stopped"]
PAUSE = 0.2  # seconds between looks at the processes


@dataclass
class Task:
    """A run of the suite and how far it is."""

    run: Run
    state: State = "waiting"
    reason: str = ""
    """Why it failed, or that it was finished before."""
    slot: int = -1
    job: Job | None = None
    stopping: bool = False
    began: float = 0.0
    seconds: float = 0.0
    epochs: list[dict[str, Any]] = field(default_factory=list)


class Scheduler:
    """Brings the runs of a suite to their end."""

    def __init__(
        self, runs: Mapping[str, Run], folder: SuiteFolder, record: Record, engine: Engine, display: Display
    ) -> None:
        self.tasks = {name: Task(run) for name, run in runs.items()}
        self.folder, self.record, self.engine, self.display = folder, record, engine, display
        self.signal, self.signals = 0, 0

    def run(self) -> dict[str, Task]:
        """Start, watch and record until nothing is left to do; after SIGINT or SIGTERM (`signal`), only until
        the runs under way have stopped."""
        handlers = {
            number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            with self.display:
                self._look_back()
                while self._pending():
                    self._start()
                    self._stop()
                    self._watch()
                    self.display.update(self.tasks)
                    time.sleep(PAUSE)
                self.display.update(self.tasks)
        finally:
            for task in self._running():  # only where something went wrong here
                task.job.stop()  # type: ignore[union-attr]
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.tasks

    def _look_back(self) -> None:
        """What earlier calls have left."""
        objections = {name: self.folder.objections(task.run) for name, task in self.tasks.items()}
        for name, task in self.tasks.items():
            if not objections[name] and self.folder.finished(name):
                self.record.failed.pop(name, None)
                task.state, task.reason, task.epochs = "finished", "before", self.folder.epochs(name)
        self.folder.write(self.record)
        self.display.begin(self.tasks, self.engine.jobs)
        for name, found in objections.items():
            if found:
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                settings = ", ".join(self.folder.restoring(self.tasks[name].run))
                self._fail(
                    self.tasks[name],
                    f"{found[0]}{more}; {f'say {settings} in the suite to keep it, ' if settings else ''}"
                    f"remove {self.folder.run(name).path} to run it anew, or choose another --out",
                )

    def _pending(self) -> bool:
        states = {task.state for task in self.tasks.values()}
        return "running" in states or ("waiting" in states and not self.signal)

    def _running(self) -> list[Task]:
        return [task for task in self.tasks.values() if task.state == "running"]

    def _start(self) -> None:
        for name, task in self.tasks.items():
            free = set(range(self.engine.jobs)) - {other.slot for other in self._running()}
            if self.signal or not free:
                return
            if task.state != "waiting":
                continue
            if task.run.needs is not None:
                source = self.tasks[task.run.needs]
                if source.state == "failed":
                    self._fail(task, f"it starts from {task.run.needs}, which failed")
                if source.state != "finished":
                    continue
            if self.folder.busy(name):  # for instance that of a suite which was killed a moment ago
                if not task.reason:
                    task.reason = "another process is training in its folder"
                    self.display.say(f"{name}: waiting, {task.reason}")
                continue
            task.reason = ""
            task.slot = min(free)
            task.job = self.engine.start(
                task.run.arguments(self.folder.path),
                self.folder.log(name),
                task.slot,
                task.run.config.trainer,
            )
            task.state, task.began = "running", time.monotonic()
            self.display.started(task)

    def _watch(self) -> None:
        for task in self._running():
            name = task.run.name
            assert task.job is not None
            code = task.job.poll()
            task.seconds = time.monotonic() - task.began
            with suppress(UserError):  # a damaged file keeps none of the others from going on
                task.epochs = self.folder.epochs(name)
            if code is None:
                continue
            if code == 0 and self.folder.finished(name):
                task.state = "finished"
                if self.record.failed.pop(name, None) is not None:
                    self.folder.write(self.record)
                self.display.finished(task, self.folder.result(name))
            elif self.signal:
                task.state = "stopped"
            else:
                self._fail(task, failure(self.folder.log(name), code))

    def _fail(self, task: Task, reason: str) -> None:
        task.state, task.reason = "failed", reason
        self.record.failed[task.run.name] = reason
        self.folder.write(self.record)
        self.display.failed(task)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal, self.signals = number, self.signals + 1

    def _stop(self) -> None:
        """The first signal asks the runs for a checkpoint, a second ends them at once."""
        if self.signals and not any(task.stopping for task in self._running()):
            self.display.say("stopping: the runs write their checkpoints; once more ends them at once")
        for task in self._running():
            assert task.job is not None
            if self.signals and not task.stopping:
                task.stopping = True
                task.job.stop()
            if self.signals > 1:
                task.job.kill()
