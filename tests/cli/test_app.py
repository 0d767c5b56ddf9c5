"""How errors are shown."""

import os
import signal
import warnings

import pytest
import torch

from sfiformer.cli import app
from sfiformer.data.custom import load_custom
from sfiformer.files import whole_file


def test_an_error_of_the_disk_names_the_file_first(monkeypatch, capsys):
    def fail(*_, **__):
        raise FileExistsError(17, "File exists", "mine.jsonl")

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as caught:
        app.main(["explain"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == "sfi: mine.jsonl: File exists\n"


def test_a_warning_is_a_line_once(monkeypatch, capsys):
    def warn_twice(*_, **__):
        for _ in range(2):
            with warnings.catch_warnings():  # which forgets what was said before
                warnings.warn("skipped: 1 bad", stacklevel=1)

    monkeypatch.setattr(app, "app", warn_twice)
    with pytest.raises(SystemExit):
        app.main(["eval"])
    assert capsys.readouterr().err == "warning: skipped: 1 bad\n"


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("train", "; mend it, or leave out such rows with --data.skip_bad true"),
        ("predict", "; mend it, or leave out such rows with --skip-bad"),
        ("data", "; mend it, or leave out such rows with --skip-bad"),
        ("eval", "; mend it, or leave out such rows with --skip-bad"),
        ("explain", "; mend it, or leave out such rows with --skip-bad"),
        ("presets", ""),
    ],
)
def test_a_bad_row_can_be_left_out(monkeypatch, capsys, tmp_path, command, remedy):
    file = tmp_path / "mine.jsonl"
    file.write_text("oops\n")
    monkeypatch.setattr(app, "app", lambda *_, **__: load_custom(file))
    with pytest.raises(SystemExit):
        app.main([command])
    reason = "line 1: not valid JSON: Expecting value at character 1"
    assert capsys.readouterr().err == f"sfi: {file}, {reason}{remedy}\n"


ON_A_CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error",
    [RuntimeError(ON_A_CPU), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), MemoryError()],
)
@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("train", "lower data.batch_size"),
        ("predict", "lower --batch-size"),
        ("data", "take fewer or smaller"),
    ],
)
def test_out_of_memory_is_a_line_with_its_remedy(monkeypatch, capsys, error, command, remedy):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as caught:
        app.main([command])
    assert caught.value.code == 1
    line = capsys.readouterr().err
    assert line.startswith(f"sfi: out of memory: {remedy}")
    assert line.endswith(" (--debug shows where)\n")
    assert line.count("\n") == 1


def test_pytorch_on_a_cpu_tells_of_memory_as_expected():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert app._is_out_of_memory(caught.value)


@pytest.fixture
def interruptible():
    """Shells start what runs in the background with SIGINT ignored, these tests perhaps among it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_a_signal_is_a_line_and_leaves_no_half_of_a_file(monkeypatch, capsys, tmp_path, number, code, line):
    def write(*_, **__):
        with whole_file(tmp_path / "table.csv") as file:
            file.write(b"half")
            os.kill(os.getpid(), number)

    monkeypatch.setattr("sfiformer.prediction.write_predictions", write)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        app.main(["predict", "run", "new.jsonl"])
    assert caught.value.code == code
    assert capsys.readouterr().err == f"sfi: {line}\n"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before
