import pytest
import torch

from sfiformer.attention import kernels
from sfiformer.training.compiling import MESSAGE, announced

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
