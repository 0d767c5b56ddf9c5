"""Work on PyTorch's own threads, or on others where there is no way to them."""

import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from packing import attend, packed
from sfiformer import sfi_attention
from sfiformer.attention import cpu, threads
from sfiformer.attention.threads import at_once, free, side_by_side

CPU = torch.device("cpu")
REACHED = threads._openmp(threads.os.getpid()) is not None


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["PyTorch's", "others"])
def either(request, monkeypatch):
    if request.param == "others":
        monkeypatch.setattr(threads, "_openmp", lambda process: None)
    elif not REACHED:
        pytest.skip("PyTorch does not say how its threads are reached")


def meet(seconds=60):
    """Work that two threads must do at once, or it ends in an error."""
    barrier, seen = threading.Barrier(2), []

    def work(piece=None):
        barrier.wait(seconds)
        seen.append((piece, threading.get_ident(), free()))

    return work, seen


def test_all_threads_work_at_once(either):
    work, seen = meet()
    at_once(work, 2)
    assert len({ident for _, ident, _ in seen}) == 2


def test_an_error_in_a_thread_is_raised(either):
    lock, calls = threading.Lock(), []

    def work():
        with lock:
            calls.append(None)
            if len(calls) == 2:
                raise IndexError("the second")

    with pytest.raises(IndexError, match="the second"):
        at_once(work, 2)
    at_once(lambda: None, 2)  # and nothing is left of it


@pytest.mark.skipif(not REACHED, reason="PyTorch does not say how its threads are reached")
def test_pieces_go_side_by_side_each_computed_by_one_thread():
    work, seen = meet()
    side_by_side(work, range(6), CPU)
    assert sorted(piece for piece, _, _ in seen) == list(range(6))
    assert {count for *_, count in seen} == {1}
    assert free() == 2


@pytest.mark.skipif(not REACHED, reason="PyTorch does not say how its threads are reached")
def test_a_piece_larger_than_all_others_is_worked_on_by_all_threads_ahead_of_them():
    costs = {
        "small": 9,
        "huge": 40 * threads.LARGE,
        "middling": threads.LARGE // 2,
        "large": 4 * threads.LARGE,
    }
    met, seen = threading.Barrier(2), []

    def work(piece):
        seen.append((piece, free()))
        if piece in ("small", "middling"):
            met.wait(300)

    side_by_side(work, costs, CPU, costs.__getitem__)
    assert seen[:2] == [("huge", 2), ("large", 2)]
    assert sorted(seen[2:]) == [("middling", 1), ("small", 1)]


@pytest.mark.skipif(not REACHED, reason="PyTorch does not say how its threads are reached")
def test_pieces_of_like_cost_go_side_by_side_however_large():
    work, seen = meet()
    side_by_side(work, range(4), CPU, lambda piece: 10 * threads.LARGE)
    assert {count for *_, count in seen} == {1}


COMPILED = """
import threading
import torch
from numba.core import event
from sfiformer import dfi_attention, sfi_attention

class Listener(event.Listener):
    def on_start(self, event):
        found.add(threading.get_ident())
    def on_end(self, event):
        pass

found = set()
event.register("numba:compile", Listener())
torch.set_num_threads(2)
ptr = torch.arange(0, 3001, 30)
q, k, v, q_friction, k_friction = torch.randn(5, 3000, 4, 32, requires_grad=True)
out = sfi_attention(q, k, v, q_friction, k_friction, ptr, lam=1.0, scaling="potential") + dfi_attention(q, k, v, ptr)
out.sum().backward()
print(found == {threading.main_thread().ident})
"""


@pytest.mark.skipif(not cpu.usable(torch.zeros(1, 1, 1)), reason="no Numba")
def test_no_thread_of_a_team_compiles(tmp_path):
    """It would hold Numba's lock, or wait for it, where no interrupt reaches it."""
    run = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr


@pytest.mark.parametrize("alone", ["thread", "piece", "device", "way"])
def test_else_pieces_go_in_turn_and_share_all_threads(alone, monkeypatch):
    pieces, device, here, seen = range(4), CPU, threading.get_ident(), []
    if alone == "thread":
        torch.set_num_threads(1)
    elif alone == "piece":
        pieces = [7]
    elif alone == "device":
        device = torch.device("meta")
    else:
        monkeypatch.setattr(threads, "_openmp", lambda process: None)
    count = torch.get_num_threads()
    side_by_side(lambda piece: seen.append((piece, threading.get_ident(), free())), pieces, device)
    assert seen == [(piece, here, count) for piece in pieces]


@pytest.mark.skipif(not REACHED, reason="PyTorch does not say how its threads are reached")
def test_after_an_error_nothing_more_is_begun(monkeypatch):
    both, ended, begun = threading.Barrier(2), threading.Event(), []

    @contextmanager
    def noted(openmp):
        try:
            yield
        finally:
            ended.set()

    def work(piece):
        begun.append(piece)
        both.wait(300)
        if piece == 0:
            raise KeyboardInterrupt
        assert ended.wait(300)  # until the other thread has come to its end

    monkeypatch.setattr(threads, "_alone", noted)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(work, range(1000), CPU)
    assert sorted(begun) == [0, 1]


@pytest.mark.skipif(not REACHED, reason="PyTorch does not say how its threads are reached")
def test_an_interrupt_at_the_door_is_not_lost(monkeypatch):
    """ctypes prints and forgets what is raised before the work can be careful."""
    openmp = threads._openmp(threads.os.getpid())
    team = SimpleNamespace(GOMP_parallel=lambda *_: None, omp_in_parallel=openmp.omp_in_parallel)
    monkeypatch.setattr(threads, "_openmp", lambda process: team)
    with pytest.raises(KeyboardInterrupt):
        at_once(lambda: None, 2)


@pytest.mark.skipif(not REACHED, reason="PyTorch does not say how its threads are reached")
def test_every_interrupt_comes_through():
    out = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (0, "100\n"), out.stderr


INTERRUPTED = """
import random, signal, threading, time
import torch
from sfiformer import sfi_attention

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background, where it is ignored
torch.set_num_threads(2)
sizes = torch.arange(10, 60)
ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
inputs = [torch.randn(int(ptr[-1]), 4, 40) for _ in range(5)]
sfi_attention(*inputs, ptr, lam=1.0, scaling="potential")  # a first call imports and compiles
caught = 0
for _ in range(100):
    sender = threading.Timer(0.02 * random.random(), signal.raise_signal, [signal.SIGINT])
    try:
        sender.start()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            sfi_attention(*inputs, ptr, lam=1.0, scaling="potential")
    except KeyboardInterrupt:
        caught += 1
    sender.join()
print(caught)
"""


def test_no_pieces_are_no_work():
    side_by_side(lambda piece: pytest.fail("there is none"), [], CPU)


def results(precision=torch.float64, **options):
    """Output and gradients of graphs that make several spans, one of them in blocks of rows."""
    torch.manual_seed(0)
    inputs = packed((7, 30, 12, 1, 30, 0, 25), heads=2, width=8, dtype=precision).leaves()
    lam = torch.full((7,), 0.4, requires_grad=True)
    out = attend(inputs, lam=lam, **options)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), (*inputs[:5], lam))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("sfiformer.attention.few.MOST", 0)
    monkeypatch.setattr("sfiformer.attention.chunks.CHUNK_SIZE", 400)
    monkeypatch.setattr("sfiformer.attention.spans.SPAN_SIZE", 200)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_attention_is_the_same_on_any_number_of_threads(small_pieces, precision, dropout_p):
    found = []
    for count in (1, 2, 3, 3):
        torch.set_num_threads(count)
        found.append(results(precision, dropout_p=dropout_p))
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            torch.testing.assert_close(x, y)
    assert all(torch.equal(x, y) for x, y in zip(found[2], found[3], strict=True))  # two runs, to the bit


def test_float64_is_the_same_to_the_bit_after_the_number_of_threads_was_raised():
    sizes = [153, 1, 42, 32, 31, 33, 172, 2, 1, 28, 131, 1, 5, 46, 0, 1, 104, 1, 3, 40]
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    inputs = [torch.randn(sum(sizes), 2, 70, dtype=torch.float64) for _ in range(5)]
    for count in (2, 3, 4):
        torch.set_num_threads(count)
        first, *others = (sfi_attention(*inputs, ptr, lam=0.5) for _ in range(25))
        assert all(torch.equal(first, other) for other in others), count


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attention_without_gradients(small_pieces, mode):
    expected, *_ = results()
    with mode():
        inputs = packed((7, 30, 12, 1, 30, 0, 25), heads=2, width=8)
        torch.testing.assert_close(attend(inputs, lam=0.4), expected)


def test_autocast_reaches_no_thread(small_pieces):
    expected, *_ = results()
    with torch.autocast("cpu", torch.bfloat16):
        out, *_ = results()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_what_is_not_finite_is_an_error_as_ever(small_pieces):
    inputs = packed((7, 30, 12, 25), heads=2, width=8)
    inputs.k_friction[40, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        attend(inputs, lam=0.4)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_a_forked_process_does_without_the_threads_of_its_parent(small_pieces):
    at_once(lambda: None, 2)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map_async(_alone, [0]).get(timeout=300) == [True]


def _alone(_):
    work, seen = meet()
    at_once(work, 2)
    return len(seen) == 2 and threads._openmp(threads.os.getpid()) is None
