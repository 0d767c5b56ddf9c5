import math

import pytest

from sfiformer.config import OptimConfig
from sfiformer.training.schedule import learning_rate


def test_linear_warm_up_then_half_a_cosine():
    settings = OptimConfig(lr=0.8, warmup_epochs=4)
    rates = [learning_rate(settings, 12, epoch) for epoch in range(12)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rates[8] == pytest.approx(0.4)  # half-way down
    assert rates[11] == pytest.approx(0.4 * (1 + math.cos(math.pi * 7 / 8)))
    assert learning_rate(settings, 12, 12) == pytest.approx(0, abs=1e-12)


def test_runs_shorter_than_the_warm_up_and_without_one():
    assert learning_rate(OptimConfig(lr=1.0, warmup_epochs=5), 2, 1) == pytest.approx(0.4)
    assert learning_rate(OptimConfig(lr=1.0, warmup_epochs=0), 2, 0) == 1.0
    assert learning_rate(OptimConfig(lr=1.0, warmup_epochs=0), 2, 1) == pytest.approx(0.5)
