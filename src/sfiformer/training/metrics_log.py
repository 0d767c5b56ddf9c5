"""The metrics of every epoch, as JSON lines, CSV and TensorBoard events."""

import csv
import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfiformer.files import whole_file

COLUMNS = (
    "epoch",  # from 1
    "lr",
    "loss",  # mean over the epoch's batches, in training mode
    "train",  # metric in evaluation mode, on a fixed subset of the training graphs
    "val",
    "test",
    "zero_share",  # of the flows of sfi attention, on a few fixed graphs
    "seconds",  # training and evaluation
    "graphs_per_second",  # training alone
)
Record = dict[str, Any]


class MetricsLog:
    """Writes one record an epoch. The checkpoints hold the records too: `history` is what counts on resuming."""

    def __init__(self, run: Path, history: Sequence[Mapping[str, Any]]) -> None:
        self.jsonl, self.csv = run / "metrics.jsonl", run / "metrics.csv"
        with whole_file(self.jsonl) as file:
            file.write("".join(_line(record) for record in history).encode())
        with whole_file(self.csv) as file:
            file.write((_row(COLUMNS) + "".join(_row(_values(record)) for record in history)).encode())
        self.events = _event_writer(run / "tensorboard", len(history))

    def add(self, record: Mapping[str, Any]) -> None:
        """Append an epoch's record."""
        for path, text in ((self.jsonl, _line(record)), (self.csv, _row(_values(record)))):
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        if self.events is not None:
            for name, value in record.items():
                if name != "epoch" and value is not None:
                    self.events.add_scalar(name, value, record["epoch"])
            self.events.flush()

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


def _event_writer(folder: Path, epochs: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warnings.warn("no TensorBoard events are written: pip install tensorboard", stacklevel=2)
        return None
    # What a killed run wrote after its last checkpoint is hidden from the curves.
    return SummaryWriter(folder, purge_step=epochs + 1 if epochs else None)


def _values(record: Mapping[str, Any]) -> list[Any]:
    values = [record.get(name) for name in COLUMNS]
    return ["" if value is None else value for value in values]


def _row(values: Sequence[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue()


def _line(record: Mapping[str, Any]) -> str:
    # JSON knows no NaN: a metric that is not defined is null.
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite) + "\n"
