"""Without checks (the default on a GPU) bad scores may give NaN, but the solver must end."""

import math
import signal
from contextlib import contextmanager

import pytest
import torch

from packing import attend, packed
from sfiformer.flow import flows_from_scores


@contextmanager
def _within(seconds: float):
    def stop(*_):
        raise AssertionError(f"did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_flows(bad):
    good = torch.randn(3, 4)
    spoilt = good.clone()
    spoilt[1, 2] = bad
    with _within(240):
        for arguments in ({"alpha": 0.1}, {"alpha": math.inf}, {"scaling": "potential"}):
            flows_from_scores(good, spoilt, lam=0.1, check=False, **arguments)
            z = flows_from_scores(spoilt, good, lam=0.1, check=False, **arguments)
            clean = flows_from_scores(good, good, lam=0.1, **arguments)
            torch.testing.assert_close(z[[0, 2]], clean[[0, 2]])  # other rows are not spoilt


@pytest.mark.parametrize("name", ["q", "q_friction"])
def test_attention(name):
    inputs = packed((5, 4), dtype=torch.float32)
    spoilt = getattr(inputs, name).clone()
    spoilt[2, 0, 0] = math.nan
    with _within(240):
        out = attend(inputs._replace(**{name: spoilt}), lam=0.1, check=False)
    torch.testing.assert_close(out[5:], attend(inputs, lam=0.1)[5:])
