"""What one sees of a run: a live display on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class TrainingProgress:
    """Epoch, loss, validation metric, speed and time left of a run.

    shown: None for a live display where standard output is a terminal and a line for each epoch where it is
    not; True for the live display in any case; False for nothing.
    """

    def __init__(self, shown: bool | None, *, epochs: int, steps: int, done: int, metric: str) -> None:
        self.epochs, self.steps, self.done, self.metric = epochs, steps, done, metric
        self.silent = shown is False
        self.started, self.since = time.monotonic(), done  # steps done when this process began
        self.val = "–"
        self.live: Progress | None = None
        if shown or (shown is None and sys.stdout.isatty()):
            columns = ("{task.description}", "loss {task.fields[loss]}", "val {task.fields[val]}")
            texts = [TextColumn(column) for column in columns]
            speed = TextColumn("{task.fields[speed]} graphs/s")
            left = TextColumn("{task.fields[left]} left")
            self.live = Progress(texts[0], BarColumn(), *texts[1:], speed, left, console=Console())
            start: dict[str, Any] = {"loss": "–", "val": "–", "speed": "–", "left": "–"}
            self.task = self.live.add_task("", total=epochs * steps, completed=done, **start)
            self.live.start()

    def say(self, text: str) -> None:
        """A line or more, above the live display."""
        if self.live is not None:
            self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self.silent:
            print(text, flush=True)

    def step(self, epoch: int, step: int, loss: float, graphs_per_second: float) -> None:
        """So many steps are done of epoch 0, 1, …"""
        self.done = epoch * self.steps + step
        if self.live is not None:
            self.live.update(
                self.task,
                description=f"epoch {epoch + 1}/{self.epochs}",
                completed=self.done,
                loss=f"{loss:.4f}",
                val=self.val,
                speed=f"{graphs_per_second:,.0f}",
                left=self._left(),
            )

    def epoch(self, record: Mapping[str, Any], best: bool) -> None:
        """An epoch is done and measured."""
        if record.get("val") is not None:
            self.val = f"{self.metric} {record['val']:.4f}"
        if self.live is not None:
            self.live.update(self.task, val=self.val, left=self._left())
            return
        known = record.get("val") is not None and not math.isnan(
            record["val"]
        )  # else no epoch is told from another
        scores = "".join(
            f"  {split} {record[split]:.4f}"
            for split in ("train", "val", "test")
            if record.get(split) is not None
        )
        self.say(
            f"epoch {record['epoch']}/{self.epochs}  loss {record['loss']:.4f}  {self.metric}:{scores}"
            f"{' *' if best and known else '  '}  {record['graphs_per_second']:,.0f} graphs/s  {self._left()} left"
        )

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()

    def _left(self) -> str:
        """Time left, evaluation included, at the pace so far."""
        if self.done <= self.since:
            return "–"
        pace = (time.monotonic() - self.started) / (self.done - self.since)
        return str(timedelta(seconds=round(pace * (self.epochs * self.steps - self.done))))
