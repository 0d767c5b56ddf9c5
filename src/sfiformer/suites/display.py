"""What one sees of a suite under way: one live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sfiformer.suites.scheduler import Task

WAITING_SHOWN = 3  # of the runs that are next


class Display:
    """Lines for what happens; on a terminal, below them a table of the runs under way."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.began = time.monotonic()
        self.tasks: Mapping[str, Task] = {}

    def __enter__(self) -> Display:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def begin(self, tasks: Mapping[str, Task], jobs: int) -> None:
        self.tasks = tasks
        before = sum(task.state == "finished" for task in tasks.values())
        done = f", {before} of them finished before" if before else ""
        self.say(f"{len(tasks)} runs{done}; up to {min(jobs, len(tasks))} at a time")

    def started(self, task: Task) -> None:
        if self.live is None:
            self.say(f"{self._count()} {task.run.name}: started")

    def finished(self, task: Task, result: Mapping[str, Any]) -> None:
        test = "" if result["test"] is None else f" test {result['test']:.4f},"
        self.say(
            f"{self._count()} {task.run.name}: {result['metric']}{test} epoch {result['best_epoch']} of "
            f"{result['epochs']}, {_clock(task.seconds)}"
        )

    def failed(self, task: Task) -> None:
        self.say(f"{task.run.name}: failed: {task.reason}", style="red")

    def update(self, tasks: Mapping[str, Task]) -> None:
        """Show how far the runs are."""
        if self.live is not None:
            self.live.update(Group(self._table(tasks), Text(self._summary(tasks))), refresh=True)

    def _table(self, tasks: Mapping[str, Task]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("run", "", "epoch", "loss", "val", "time"):
            table.add_column(heading)
        running = [task for task in tasks.values() if task.state == "running"]
        waiting = [task for task in tasks.values() if task.state == "waiting"]
        for task in running:
            total = task.run.config.trainer.epochs
            last = task.epochs[-1] if task.epochs else {}
            table.add_row(
                task.run.name,
                ProgressBar(total=total, completed=len(task.epochs), width=20),
                f"{len(task.epochs)}/{total}",
                *("–" if last.get(key) is None else f"{last[key]:.4f}" for key in ("loss", "val")),
                _clock(task.seconds),
            )
        for task in waiting[:WAITING_SHOWN]:
            table.add_row(Text(task.run.name, style="dim"), Text("waiting", style="dim"))
        return table

    def _summary(self, tasks: Mapping[str, Task]) -> str:
        counts = Counter(task.state for task in tasks.values())
        states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        return f"{states}; {_clock(time.monotonic() - self.began)}"

    def _count(self) -> str:
        done = sum(task.state in ("finished", "failed") for task in self.tasks.values())
        return f"[{done}/{len(self.tasks)}]"

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(Text(text, style=style or ""))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
