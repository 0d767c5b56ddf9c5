"""A suite from its file to its end."""

import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sfiformer.errors import UserError
from sfiformer.suites.display import Display
from sfiformer.suites.engines import Engine, LocalEngine, SlurmEngine
from sfiformer.suites.folder import CHANGED, Record, SuiteFolder
from sfiformer.suites.plan import as_options, default_out, plan, select
from sfiformer.suites.scheduler import Scheduler
from sfiformer.suites.suite import Suite


def run_suite(
    suite: Suite,
    out: Path | None = None,
    *,
    jobs: int | None = None,
    engine: Literal["local", "slurm"] = "local",
    only: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    slurm: Mapping[str, Any] | None = None,
) -> int:
    """Train what is not trained yet of a suite's runs; 0 where all are finished now, else an exit code.

    Args:
        suite: from `read_suite`.
        out: the suite's folder; runs/suites/NAME if None.
        jobs: runs at a time; None for one on each GPU, or core.
        engine: where the runs' processes live.
        only: patterns; runs whose name fits none are left for another time.
        overrides: settings for all runs, by dotted key.
        slurm: parameters of submitit's executor, for the engine of that name.

    Raises:
        UserError: where `overrides` are not those of the runs that the folder holds; nothing is changed then.
    """
    overrides = dict(overrides or {})
    runs = select(plan(suite, overrides), only)
    folder = SuiteFolder(out or default_out(suite))
    with folder.claim():
        record = folder.record(suite.name)
        _require_same(suite, folder, record, overrides)
        record.overrides = overrides
        display = Display()
        scheduler = Scheduler(runs, folder, record, _engine(engine, folder, jobs, slurm), display)
        tasks = scheduler.run()
    left = sum(task.state in ("waiting", "stopped") for task in tasks.values())
    failed = [name for name, task in tasks.items() if task.state == "failed"]
    if scheduler.signal:
        name = signal.Signals(scheduler.signal).name
        display.say(
            f"stopped by {name}; {left} runs are left, with their checkpoints: the same command goes on"
        )
        return 128 + scheduler.signal
    if failed:
        display.say(
            f"{len(failed)} of {len(tasks)} runs failed: {', '.join(failed)}; logs: {folder.path / 'logs'}"
        )
    else:
        display.say(f"all {len(tasks)} runs are finished: {folder.path}")
    return 1 if failed else 0


def _require_same(suite: Suite, folder: SuiteFolder, record: Record, overrides: Mapping[str, Any]) -> None:
    """A folder has one set of settings for all runs: with others, those that it holds would no longer count."""
    if overrides == record.overrides:
        return
    before, now = plan(suite, record.overrides), plan(suite, overrides)
    lost = {
        name: found[0].removeprefix(CHANGED)
        for name in now
        if not folder.objections(before[name]) and (found := folder.objections(now[name]))
    }
    if lost:
        name, change = next(iter(lost.items()))
        more = f", as would {len(lost) - 1} more" if len(lost) > 1 else ""
        begun = shlex.join(as_options(record.overrides)) or "the suite's own settings"
        raise UserError(
            f"the runs in {folder.path} were begun with {begun}; {name} would be another ({change}){more}: give the "
            "same settings again, or choose another --out"
        )


def _engine(name: str, folder: SuiteFolder, jobs: int | None, slurm: Mapping[str, Any] | None) -> Engine:
    if name == "slurm":
        return SlurmEngine(folder.path / "slurm", jobs, dict(slurm or {}))
    return LocalEngine(jobs)
