import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sfiformer import SFiFormer
from sfiformer.attention import kernels
from sfiformer.training import prepare, train
from sfiformer.training.compiling import MESSAGE, announced, compiled_only, rehearse
from sfiformer.training.replay import Replay

knobs = pytest.importorskip("triton").knobs
GPU = torch.device("cuda")


def compiled(**event):
    """What Triton does once it has a kernel."""
    knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, **event)


def test_the_first_kernel_that_is_not_cached_is_announced_once():
    said = []
    before = knobs.compilation.listener
    with announced(said.append, GPU):
        compiled(cache_hit=True)
        assert said == []
        compiled(cache_hit=False)
        compiled(cache_hit=False)
    assert said == [MESSAGE]
    assert knobs.compilation.listener is before


def test_a_listener_of_the_users_own_still_hears_of_every_kernel(monkeypatch):
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: heard.append(event))
    with announced(lambda text: None, GPU):
        compiled(cache_hit=True)
        compiled(cache_hit=False)
    compiled(cache_hit=True)
    assert [event["cache_hit"] for event in heard] == [True, False, True]
    assert all(set(event) == {"src", "metadata", "metadata_group", "times", "cache_hit"} for event in heard)


@pytest.mark.parametrize(("device", "has_triton"), [("cpu", True), ("cuda", False)])
def test_without_a_gpu_or_triton_there_is_nothing_to_hear(monkeypatch, device, has_triton):
    before = knobs.compilation.listener
    monkeypatch.setattr(kernels, "HAS_TRITON", has_triton)
    with announced(print, torch.device(device)):
        assert knobs.compilation.listener is before


def test_a_rehearsal_compiles_every_kernel_once_and_launches_none(tmp_path):
    pytest.importorskip("triton.backends.nvidia", reason="a compiler for GPUs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("rehearsal.py")],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert {"forward_kernel", "steep_forward_kernel", "query_kernel", "key_kernel"} <= set(first.split())
    assert second == ""


def test_what_other_threads_launch_meanwhile_is_launched(monkeypatch):
    from triton import JITFunction

    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *, warmup, **options: seen.append(warmup))

    def launch():
        JITFunction.run(None, warmup=False)

    with compiled_only():
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()
    launch()
    assert seen == [True, False, False]


def test_after_a_kernel_that_does_not_compile_others_do():
    from triton import JITFunction
    from triton.runtime._async_compile import active_mode

    launched = JITFunction.run
    with pytest.raises(ZeroDivisionError), compiled_only():
        active_mode.get().submit("broken", lambda: 1 / 0, lambda kernel: None)
    assert JITFunction.run is launched
    assert active_mode.get() is None
    with compiled_only():
        kernel = active_mode.get().submit("whole", lambda: 7, lambda kernel: None)
    assert kernel.result() == 7


def test_a_rehearsal_leaves_the_model_as_it_is(experiment):
    prepared = prepare(experiment({}))
    model = SFiFormer(prepared.config.model).eval()
    before = deepcopy(model.state_dict())
    replay = SimpleNamespace(example=lambda graphs: prepared.stores["train"].batch(graphs))
    rehearse(model, dict.fromkeys(["train", "val", "step"], (replay, np.arange(3))), nullcontext)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_is_rehearsed_is_what_a_run_begins_with(tmp_path, experiment, monkeypatch):
    """Of each split in the order of its epoch: graphs sorted by size would make a first batch that never comes."""
    settings = {"trainer.epochs": 1, "data.batch_size": 4}
    rehearsed, replayed = {}, {}
    monkeypatch.setattr("sfiformer.training.replays.replayable", lambda *_: True)
    monkeypatch.setattr("sfiformer.training.replay.WARM_UPS", 10**9)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(
        "sfiformer.training.trainer.rehearse", lambda model, firsts, autocast: rehearsed.update(firsts)
    )
    call = Replay.__call__

    def noting(replay, parts, then=None, **seeds):
        replayed.setdefault(id(replay), parts[0])
        return call(replay, parts, then, **seeds)

    monkeypatch.setattr(Replay, "__call__", noting)
    train(experiment(settings), tmp_path / "run", progress=False)
    assert set(rehearsed) == {"train", "val", "test", "step"}
    for replay, graphs in rehearsed.values():
        assert np.array_equal(graphs, replayed[id(replay)])


def test_a_rehearsal_counts_among_the_seconds_of_its_epoch(tmp_path, experiment, monkeypatch):
    took = 0.0

    def rehearsed(model, firsts, autocast):
        nonlocal took
        took = 1e6

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + took)
    monkeypatch.setattr("sfiformer.training.trainer.time", clock)
    monkeypatch.setattr("sfiformer.training.trainer.rehearse", rehearsed)
    monkeypatch.setattr("sfiformer.training.trainer.make_replays", lambda *_: {"none": SimpleNamespace()})
    monkeypatch.setattr("sfiformer.training.trainer.Trainer._firsts", lambda trainer: {})
    result = train(experiment({"trainer.epochs": 2}), tmp_path / "run", progress=False)
    assert 1e6 < result.seconds < 2e6


def test_without_what_compiles_ahead_nothing_is_rehearsed(monkeypatch):
    monkeypatch.setattr("sfiformer.training.compiling.find_spec", lambda name: None)
    rehearse(torch.nn.Linear(1, 1), {"step": (None, None)}, nullcontext)
