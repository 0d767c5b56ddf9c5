"""Checkpoints are written while training goes on, of what was there when they were begun."""

import errno
import json
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from sfiformer import ModelConfig, SFiFormer
from sfiformer.errors import TrainingError
from sfiformer.training import train
from sfiformer.training.checkpoint import Checkpoints, read_state
from sfiformer.training.interruption import Interrupted, Interruption
from sfiformer.training.step import Step

PATIENCE = 300  # seconds, after which a test has failed


@pytest.fixture
def run(tmp_path, experiment):
    """run({settings}, …): train quietly, three epochs of three steps; the folder is run.out."""

    def quiet(more=(), **options):
        return train(experiment(more), quiet.out, progress=False, **options)

    quiet.out = tmp_path / "run"
    return quiet


@pytest.fixture
def whole(tmp_path, experiment, outcome):
    """What a run leaves that nothing happened to."""
    train(experiment(), tmp_path / "whole", progress=False)
    return outcome(tmp_path / "whole")


@contextmanager
def writes(begin_with):
    """Every write begins with begin_with(epoch), in its thread."""
    save = Checkpoints.save

    def patched(checkpoints, model, state, *, epoch, **options):
        begin_with(epoch)
        save(checkpoints, model, state, epoch=epoch, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", patched)
        yield


def slow(epoch):
    time.sleep(0.3)


def full(*epochs):
    def fail(epoch):
        if epoch in epochs:
            raise OSError(errno.ENOSPC, "No space left on device")

    return fail


def checkpoint_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_steps_go_on_while_a_checkpoint_is_written(run, whole, outcome, monkeypatch):
    stepped, step, done = [threading.Event() for _ in range(9)], Step.__call__, 0

    def counted(self, batches):
        nonlocal done
        values = step(self, batches)
        stepped[done].set()
        done += 1
        return values

    def two_steps_later(epoch):
        if epoch in (1, 2):
            assert stepped[3 * epoch + 1].wait(PATIENCE), "training waits for the disk"

    monkeypatch.setattr(Step, "__call__", counted)
    with writes(two_steps_later):
        run()
    assert outcome(run.out) == whole


@pytest.fixture
def model():
    config = ModelConfig(layers=1, dim=4, heads=1, head="graph", outputs=1)
    return SFiFormer(config.fitted(level="graph", outputs=1, node_features=2, edge_features=0))


def test_what_is_written_is_what_was_there(tmp_path, model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments, group = torch.ones(3), {"lr": 1.0}
    state = {"optimizer": {"state": {0: {"exp_avg": moments}}, "param_groups": [group]}}
    checkpoints, changed = Checkpoints(tmp_path), threading.Event()
    with writes(lambda epoch: changed.wait(PATIENCE)):
        checkpoints.begin(model, state, epoch=1)
        for tensor in (*model.state_dict().values(), moments):
            tensor.add_(1)
        group["lr"] = 2.0
        assert checkpoints.last is None
        changed.set()
        checkpoints.close()
    assert checkpoints.last == "epoch-0001"
    optimizer = read_state(tmp_path / "last")["optimizer"]
    assert torch.equal(optimizer["state"][0]["exp_avg"], torch.ones(3))
    assert optimizer["param_groups"] == [{"lr": 1.0}]
    kept = SFiFormer.from_pretrained(tmp_path / "last").state_dict()
    assert kept.keys() == before.keys()
    assert all(torch.equal(kept[name], before[name]) for name in kept)


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path, model):
    checkpoints, written = Checkpoints(tmp_path), threading.Event()
    with writes(lambda epoch: written.wait(PATIENCE)):
        checkpoints.begin(model, {}, epoch=1)
        threading.Timer(0.2, written.set).start()
        checkpoints.begin(model, {}, epoch=2)
        assert written.is_set()
        checkpoints.close()
    assert checkpoints.last == "epoch-0002"


def test_many_checkpoints_on_a_slow_disk_change_nothing(run, whole, outcome):
    with writes(lambda epoch: time.sleep(0.05)):
        run({"trainer.checkpoint_steps": 1})
    assert outcome(run.out) == whole


def test_the_end_of_a_run_waits(run, whole, outcome):
    with writes(slow):
        run()
    assert (run.out / "last").resolve().name == "epoch-0003"
    assert outcome(run.out) == whole
    assert not checkpoint_threads()


@pytest.mark.parametrize(
    ("asked", "expected"),  # an epoch asks three times between steps and five times while it is measured
    [(1, "epoch-0000"), (3, "epoch-0000-step-000002"), (10, "epoch-0001-step-000001")],
)
def test_an_interrupted_run_waits(run, whole, outcome, monkeypatch, asked, expected):
    answers = [0] * (asked - 1) + [signal.SIGTERM]
    with monkeypatch.context() as patch, writes(slow):
        patch.setattr(Interruption, "agreed", lambda interruption: answers.pop(0))
        with pytest.raises(Interrupted):
            run()
    assert (run.out / "last").resolve().name == expected
    run(resume=True)
    assert outcome(run.out) == whole


def test_an_error_in_training_waits(run, monkeypatch):
    def broken(self, batches):
        raise ValueError("out of luck")

    monkeypatch.setattr(Step, "__call__", broken)
    with writes(slow), pytest.raises(ValueError, match="out of luck"):
        run()
    assert not checkpoint_threads()


def test_the_first_checkpoint_is_waited_for(run, monkeypatch):
    monkeypatch.setattr(Step, "__call__", lambda *_: pytest.fail("a step was done"))
    with (
        writes(full(0)),
        pytest.raises(TrainingError, match=r"left on device; nothing is lost: mend the disk"),
    ):
        run()


@pytest.mark.parametrize("failing", [(2,), (2, 3), (3,)])
def test_a_write_that_failed_is_told_of_at_the_next_or_at_the_end(run, whole, outcome, failing):
    with writes(full(*failing)), pytest.raises(TrainingError) as caught:
        run()
    kept = failing[0] - 1
    assert str(caught.value) == (
        f"cannot write a checkpoint to {run.out}: No space left on device; the last whole checkpoint, "
        f"epoch-000{kept}, is kept: mend the disk and continue with --resume"
    )
    assert (run.out / "last").resolve().name == f"epoch-000{kept}"
    assert read_state(run.out / "last")["epoch"] == kept
    lines = (run.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == list(range(1, kept + 2))
    assert not (run.out / "result.json").exists()
    run(resume=True)
    assert outcome(run.out) == whole


@pytest.mark.parametrize(
    ("disk", "message"),
    [
        (slow, "epoch 2, step 1: not finite: .* the checkpoint epoch-0001 is kept: continue from it"),
        (full(1), "No space left on device; the last whole checkpoint, epoch-0000, is kept"),
    ],
)
def test_a_loss_that_is_not_finite_names_a_checkpoint_that_is_written(run, monkeypatch, disk, message):
    calls, forward = 0, SFiFormer.forward

    def overflow(model, batch):
        nonlocal calls
        calls += model.training
        return forward(model, batch) * (float("inf") if calls == 4 and model.training else 1)

    monkeypatch.setattr(SFiFormer, "forward", overflow)
    with writes(disk), pytest.raises(TrainingError, match=message):
        run()
