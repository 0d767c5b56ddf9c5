"""The order of runs, failures, signals, and what earlier calls left; on processes that only pretend to train."""

import io
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from sfiformer.suites import engines
from sfiformer.suites.display import Display
from sfiformer.suites.engines import LocalEngine
from sfiformer.suites.folder import Record
from sfiformer.suites.scheduler import Scheduler
from suite_folders import pretend


class Instant:
    """A process that has ended when it starts."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


class InstantEngine:
    """Runs that end at once, well or, where `fails` says so, not; it notes what is under way together."""

    def __init__(self, folder, runs, jobs=1, fails=()):
        self.folder, self.runs, self.jobs, self.fails = folder, runs, jobs, fails
        self.started: list[str] = []

    def start(self, arguments, log, slot, trainer):
        name = log.relative_to(self.folder.path / "logs").as_posix().removesuffix(".log")
        self.started.append(name)
        assert slot < self.jobs
        log.parent.mkdir(parents=True, exist_ok=True)
        if name in self.fails:
            log.write_text("$ sfi train\nepoch 1\nsfi: not finite: the loss\n")
            return Instant(1)
        pretend(self.folder, self.runs[name], 0.5)
        return Instant(0)


@pytest.fixture
def printed():
    return io.StringIO()


@pytest.fixture
def schedule(folder, runs, printed, monkeypatch):
    monkeypatch.setattr("sfiformer.suites.scheduler.PAUSE", 0.0)

    def make(engine, record=None):
        display = Display(Console(file=printed, width=300, highlight=False))
        return Scheduler(runs, folder, record or Record("small"), engine, display)

    return make


def test_every_run_is_started_once_after_what_it_starts_from(schedule, folder, runs):
    engine = InstantEngine(folder, runs, jobs=3)
    tasks = schedule(engine).run()
    assert {task.state for task in tasks.values()} == {"finished"}
    assert sorted(engine.started) == sorted(runs)
    assert engine.started.index("cluster/dfi/seed-1") < engine.started.index("cluster/plus/seed-1")

    again = InstantEngine(folder, runs)
    schedule(again).run()
    assert again.started == []


def test_a_failure_is_recorded_and_the_rest_goes_on(schedule, folder, runs, printed):
    record = Record("small")
    engine = InstantEngine(folder, runs, fails=("cluster/dfi/seed-0",))
    tasks = schedule(engine, record).run()
    failed = {name: task.reason for name, task in tasks.items() if task.state == "failed"}
    assert failed == {
        "cluster/dfi/seed-0": "not finite: the loss",
        "cluster/plus/seed-0": "it starts from cluster/dfi/seed-0, which failed",
    }
    assert folder.record("small").failed == failed
    assert "cluster/dfi/seed-0: failed: not finite: the loss" in printed.getvalue()
    assert sum(task.state == "finished" for task in tasks.values()) == len(runs) - 2

    schedule(InstantEngine(folder, runs), folder.record("small")).run()  # mended
    assert folder.record("small").failed == {}


def test_a_run_of_other_settings_is_left_alone_and_said(schedule, folder, runs, printed):
    run = runs["cluster/sfi/seed-0"]
    pretend(folder, run, 0.5, replace(run.config, trainer=replace(run.config.trainer, epochs=100)))
    engine = InstantEngine(folder, runs)
    tasks = schedule(engine).run()
    assert run.name not in engine.started
    assert tasks[run.name].reason.startswith(
        "the settings have changed: trainer.epochs is now 3, was 100; say trainer.epochs: 100 in the suite to keep it, remove"
    )
    assert "the settings have changed" in printed.getvalue()


# Writes its name, then waits for SIGTERM, upon which it "checkpoints".
SLOW = """
import pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1])
def stop(number, frame):
    log.write_text("checkpoint")
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
log.write_text("begun")
time.sleep(60)
"""


def test_a_signal_stops_the_processes_with_their_checkpoints(schedule, runs, tmp_path, monkeypatch):
    marks = tmp_path / "marks"
    marks.mkdir()

    def command(arguments):
        name = arguments[arguments.index("--out") + 1].split("runs/")[1].replace("/", "-")
        return [sys.executable, "-c", SLOW, str(marks / name)]

    monkeypatch.setattr(engines, "command", command)
    monkeypatch.setattr("sfiformer.suites.scheduler.PAUSE", 0.02)

    def interrupt_when_two_are_under_way():
        while [path.read_text() for path in marks.iterdir()] != ["begun"] * 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt_when_two_are_under_way)
    thread.start()
    scheduler = schedule(LocalEngine(2))
    tasks = scheduler.run()
    thread.join()
    assert scheduler.signal == signal.SIGINT
    assert [path.read_text() for path in marks.iterdir()] == ["checkpoint"] * 2
    assert sorted({task.state for task in tasks.values()}) == ["stopped", "waiting"]
    assert scheduler.record.failed == {}
    assert signal.getsignal(signal.SIGINT) == before
