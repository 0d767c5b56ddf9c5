"""What a run writes while it goes on: the metrics of every epoch, then a checkpoint that holds them too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sfiformer.errors import TrainingError
from sfiformer.nn.model import SFiFormer
from sfiformer.training.average import Average
from sfiformer.training.checkpoint import Checkpoints
from sfiformer.training.metrics_log import MetricsLog, Record
from sfiformer.training.state import State


@dataclass
class Writers:
    """What rank 0 alone has: the files of the run.

    A disk that cannot be written to is a `TrainingError`, of whichever method is called next where a write fails that
    was under way in the background.
    """

    out: Path
    checkpoints: Checkpoints
    log: MetricsLog

    def checkpoint(
        self,
        model: SFiFormer,
        optimizer: torch.optim.Optimizer,
        state: State,
        average: Average | None = None,
        *,
        best: bool = False,
        record: Record | None = None,
        wait: bool = False,
    ) -> None:
        """Begin to write a checkpoint of what is now, after the `record` of an epoch; `wait` until it is written."""
        with self._writing():
            self.checkpoints.wait()  # so that the log is at most one record ahead of the checkpoint on the disk
            if record is not None:
                self.log.add(record)
            values = {**state.to_dict(), "optimizer": optimizer.state_dict()}
            if average is not None:
                values["average"] = average.state_dict()
            self.checkpoints.begin(model, values, epoch=state.epoch, step=state.step, best=best)
            if wait:
                self.checkpoints.wait()

    def last(self) -> str | None:
        """The last checkpoint, once it is written."""
        with self._writing():
            self.checkpoints.wait()
        return self.checkpoints.last

    def finish(self) -> None:
        """Wait for the last checkpoint; there will be no other."""
        with self._writing():
            self.checkpoints.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            last = self.checkpoints.last
            kept = f"the last whole checkpoint, {last}, is kept" if last else "nothing is lost"
            raise TrainingError(
                f"cannot write a checkpoint to {self.out}: {error.strerror or error}; {kept}: "
                "mend the disk and continue with --resume"
            ) from error
