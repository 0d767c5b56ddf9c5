"""Processes on this machine, and as jobs through submitit's executor for machines without SLURM."""

import json
import os
import signal
import sys
import time

import pytest

from sfiformer.config import TrainerConfig
from sfiformer.errors import UserError
from sfiformer.suites import engines
from sfiformer.suites.engines import LocalEngine, SlurmEngine
from sfiformer.suites.folder import failure

TELL = "import json, os; print(json.dumps({k: os.environ.get(k) for k in ('OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES')}))"


def ended(job) -> int:
    limit = time.monotonic() + 300
    while (code := job.poll()) is None:
        assert time.monotonic() < limit
        time.sleep(0.02)
    return code


@pytest.fixture
def scripts(monkeypatch):
    """Processes run the Python text that is their first argument."""
    monkeypatch.setattr(engines, "command", lambda arguments: [sys.executable, "-c", *arguments])


def test_threads_are_shared_and_gpus_go_round(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "visible_gpus", lambda: ["4", "7"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    engine = LocalEngine(3)
    seen = []
    for slot in range(3):
        log = tmp_path / "logs" / f"{slot}.log"
        assert ended(engine.start([TELL], log, slot, TrainerConfig())) == 0
        said = json.loads(log.read_text().splitlines()[-1])
        seen.append((said["OMP_NUM_THREADS"], said["CUDA_VISIBLE_DEVICES"]))
    assert seen == [("4", "4"), ("4", "7"), ("4", "4")]
    assert LocalEngine().jobs == 2  # one on each GPU


@pytest.mark.parametrize(
    ("asked", "given"), [("1", "1"), ("2,1", "2"), ("9", "4"), ("many", "4"), ("0", "4")]
)
def test_fewer_threads_may_be_asked_for(scripts, tmp_path, monkeypatch, asked, given):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    log = tmp_path / "run.log"
    assert ended(LocalEngine(1).start([TELL], log, 0, TrainerConfig())) == 0
    assert json.loads(log.read_text().splitlines()[-1])["OMP_NUM_THREADS"] == given


def test_why_a_process_failed(scripts, tmp_path):
    log = tmp_path / "run.log"
    for text, reason in (
        (
            "import sys; print('sfi: no such data', file=sys.stderr); print('bye'); sys.exit(2)",
            "no such data",
        ),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (out of memory?)"),
    ):
        log.unlink(missing_ok=True)
        code = ended(LocalEngine(1).start([text], log, 0, TrainerConfig()))
        assert failure(log, code) == reason


def test_jobs_through_submitit(tmp_path):
    pytest.importorskip("submitit")
    engine = SlurmEngine(tmp_path / "slurm", None, {"timeout_min": 1}, cluster="local")
    cpu = TrainerConfig(accelerator="cpu")
    good = engine.start(["suite", "list"], tmp_path / "good.log", 0, cpu)
    bad = engine.start(["presets", "clustr"], tmp_path / "bad.log", 1, cpu)
    assert (ended(good), ended(bad)) == (0, 2)
    assert "quick" in (tmp_path / "good.log").read_text()
    assert failure(tmp_path / "bad.log", 2).startswith("there is no preset 'clustr'; did you mean 'cluster'?")
    slow = engine.start(["suite", "list"], tmp_path / "slow.log", 2, cpu)
    slow.stop()
    assert ended(slow) in (0, 128 + signal.SIGTERM)


def test_a_parameter_that_submitit_does_not_know(tmp_path):
    pytest.importorskip("submitit")
    engine = SlurmEngine(tmp_path / "slurm", None, {"partitoin": "gpu"}, cluster="local")
    with pytest.raises(UserError, match="--slurm: submitit refused"):
        engine.start(["suite", "list"], tmp_path / "log", 0, TrainerConfig())


def test_the_remedies_are_said(tmp_path, monkeypatch):
    if pytest.importorskip("submitit"):
        with pytest.raises(UserError, match="sbatch"):
            SlurmEngine(tmp_path, None, {})
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"pip install 'sfiformer\[cluster\]'"):
        SlurmEngine(tmp_path, None, {})
