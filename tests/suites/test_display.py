"""What one sees on a terminal."""

import io

from rich.console import Console

from sfiformer.suites.display import Display
from sfiformer.suites.scheduler import Task


def test_one_table_shows_the_runs_under_way_and_what_waits(runs):
    tasks = {name: Task(run) for name, run in runs.items()}
    first, second, third, *_ = tasks.values()
    first.state, first.epochs, first.seconds = "running", [{"loss": 1.25, "val": 0.5}], 61.0
    second.state, third.state = "finished", "failed"
    printed = io.StringIO()
    with Display(Console(file=printed, force_terminal=True, width=120)) as display:
        display.begin(tasks, jobs=2)
        display.update(tasks)
    text = printed.getvalue()
    row = next(line for line in text.splitlines() if first.run.name in line)
    for part in ("1/3", "1.2500", "0.5000", "0:01:01"):
        assert part in row
    assert f"1 failed, 1 finished, 1 running, {len(tasks) - 3} waiting" in text
    waiting = [name for name, task in tasks.items() if task.state == "waiting"]
    assert [name in text for name in waiting[:4]] == [True, True, True, False]  # the next ones alone
