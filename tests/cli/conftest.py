"""The real command line, as a subprocess of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "sfiformer", *map(str, arguments)]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="session")
def sfi() -> Callable[..., subprocess.CompletedProcess]:
    """sfi("train", "cluster", code=0): a command run to its end, the exit code checked."""

    def checked(*arguments: object, code: int = 0) -> subprocess.CompletedProcess:
        done = run(*arguments)
        assert done.returncode == code, done.stderr
        return done

    return checked


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """refused("train", "clustr"): the one line on standard error of a command that must fail."""

    def line(*arguments: object, code: int | None = None) -> str:
        done = run(*arguments)
        assert done.returncode in ((1, 2) if code is None else (code,)), done.stderr
        assert done.stderr.startswith("sfi: ")
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr.removeprefix("sfi: ").rstrip()

    return line


@pytest.fixture(scope="session")
def killed_after_an_epoch() -> Callable[..., None]:
    """killed_after_an_epoch(run, "train", …): a command, killed outright once `run` has a first epoch."""

    def kill(folder: Path, *arguments: object) -> None:
        with subprocess.Popen(
            command(*arguments),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            while not (folder / "best").exists():
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.02)
            process.kill()
        assert process.returncode == -signal.SIGKILL

    return kill


@pytest.fixture(scope="session")
def own_graphs(tmp_path_factory) -> Path:
    """A user's file: rings and paths, told apart by name."""
    path = tmp_path_factory.mktemp("own") / "graphs.jsonl"
    lines = []
    for number in range(40):
        size, closed = 4 + number % 5, number % 2
        edges = [[i, (i + 1) % size] for i in range(size if closed else size - 1)]
        graph = {
            "id": f"graph {number}",
            "x": [[i / size, 1.0] for i in range(size)],
            "edges": edges + [[b, a] for a, b in edges],
            "y": "ring" if closed else "path",
        }
        lines.append(json.dumps(graph) + "\n")
    path.write_text("".join(lines))
    return path
