import io
import math

import pytest
from rich.console import Console

from sfiformer.training import progress as module
from sfiformer.training.progress import TrainingProgress

RECORD = {
    "epoch": 1,
    "loss": 1.5,
    "train": 0.5,
    "val": 0.25,
    "test": None,
    "graphs_per_second": 1234.5,
}


def test_plain_lines_where_output_is_not_a_terminal(capsys):
    shown = TrainingProgress(None, epochs=2, steps=3, done=0, metric="accuracy")
    shown.say("hello")
    shown.step(0, 1, 1.5, 10.0)
    shown.epoch(RECORD, best=True)
    shown.close()
    hello, line = capsys.readouterr().out.splitlines()
    assert hello == "hello"
    assert line.startswith(
        "epoch 1/2  loss 1.5000  accuracy:  train 0.5000  val 0.2500 *  1,234 graphs/s  0:0"
    )
    assert line.endswith("left")


@pytest.mark.parametrize("val", [None, math.nan])
def test_no_epoch_is_marked_where_nothing_tells_which_is_better(capsys, val):
    shown = TrainingProgress(None, epochs=2, steps=3, done=0, metric="accuracy")
    shown.epoch({**RECORD, "val": val}, best=True)
    assert "*" not in capsys.readouterr().out


def test_nothing(capsys):
    shown = TrainingProgress(False, epochs=2, steps=3, done=0, metric="accuracy")
    shown.say("hello")
    shown.epoch(RECORD, best=True)
    assert capsys.readouterr().out == ""


def test_live_display(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(module, "Console", lambda: Console(file=screen, force_terminal=True, width=120))
    shown = TrainingProgress(True, epochs=2, steps=3, done=3, metric="accuracy")
    shown.epoch(RECORD, best=True)
    shown.step(1, 1, 1.25, 1234.5)
    shown.close()
    text = screen.getvalue()
    for part in ("epoch 2/2", "loss 1.2500", "val accuracy 0.2500", "1,234 graphs/s", "left"):
        assert part in text
