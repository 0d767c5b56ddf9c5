"""A tiny CLUSTER and an experiment on it that takes a second."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sfiformer.config import ExperimentConfig
from sfiformer.data import synthetic

SIZES = (17, 6, 6)  # batches of 8, 8 and 1
TIMES = ("seconds", "graphs_per_second")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Sums of the same numbers by as many threads are the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def overrides(tmp_path_factory):
    """Settings of a run of three epochs of three steps."""
    return {
        "model.layers": 2,
        "model.dim": 8,
        "model.heads": 2,
        "data.size": "small",
        "data.root": str(tmp_path_factory.mktemp("data-root")),
        "data.batch_size": 8,
        "optim.lr": 3e-3,
        "optim.warmup_epochs": 1,
        "trainer.epochs": 3,
        "trainer.accelerator": "cpu",
    }


@pytest.fixture
def experiment(monkeypatch, overrides):
    """experiment({"optim.lr": 1}): these settings with others on top."""
    monkeypatch.setitem(synthetic.CLUSTER_SIZES, "small", SIZES)
    monkeypatch.setattr(synthetic, "SMALLEST", 2)
    monkeypatch.setattr(synthetic, "LARGEST", 5)
    return lambda more=(): ExperimentConfig.from_preset("cluster", {**overrides, **dict(more)})


@pytest.fixture
def links(tmp_path, overrides):
    """links({…}): settings of a ranking; some graphs have no link, one has a link twice, heads have several."""
    rng, file = np.random.default_rng(0), tmp_path / "links.jsonl"
    with file.open("w") as lines:
        for number in range(43):
            n = int(rng.integers(5, 12))
            some = [[0, 2], [0, 3], [0, 3], [1, int(rng.integers(3, n))]][: number % 5]
            graph = {"x": rng.normal(size=(n, 2)).tolist(), "edges": [[i, (i + 1) % n] for i in range(n)]}
            lines.write(json.dumps({**graph, "links": some}) + "\n")
    quiet = {
        "model.dropout": 0.0,
        "model.attention_dropout": 0.0,
        "model.pe_dim": 3,
        "model.sign_flip": False,
    }
    quiet |= {"data.path": str(file), "data.name": "custom", "trainer.accumulate": 2}
    return lambda more=(): ExperimentConfig.from_preset("custom", {**overrides, **quiet, **dict(more)})


@pytest.fixture
def in_float64():
    """Models in float64: what differs by rounding alone then differs by nothing that a metric, or AdamW, could see."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def drive(overrides):
    """drive({out: plan}, more): train by driver.py; gives the exit codes and standard error.

    With `fail_on`, a rank, it is an error that is waited for: gives standard error alone.
    """

    def run(runs, more=(), fail_on=None):
        order = {
            "overrides": {**overrides, **dict(more)},
            "runs": {str(out): plan for out, plan in runs.items()},
            "sizes": SIZES,
            "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        }
        if fail_on is not None:
            order["fail_on"] = fail_on
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("driver.py")), json.dumps(order)],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if fail_on is not None:
            assert done.returncode != 0
            return done.stderr
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout.splitlines()[-1]).values()), done.stderr

    return run


@pytest.fixture(scope="session")
def outcome():
    """outcome(run): all that a run leaves but its times: metrics, result, weights of best and last, optimiser."""

    def read(run):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        metrics = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
        rows = [line.split(",")[:7] for line in (run / "metrics.csv").read_text().splitlines()]
        result = json.loads((run / "result.json").read_text())
        result.pop("seconds")
        weights = [(run / name / "model.safetensors").read_bytes() for name in ("best", "last")]
        return metrics, rows, result, weights

    return read
