"""Bad input raises, and says which argument was bad, what it was and what would be right."""

import math

import pytest
import torch

from sfiformer.flow import flows_from_scores, solve_flows


def _with(value: float) -> torch.Tensor:
    x = torch.ones(2, 3)
    x[1, 2] = value
    return x


GOOD = torch.ones(2, 3)
STRENGTHS = [
    ({"lam": "x"}, "lam.*number.*'x'"),
    ({"lam": None}, "lam.*number.*None"),
    ({"lam": -0.1}, "lam.*-0.1"),
    ({"lam": math.nan}, "lam.*nan"),
    ({"lam": math.inf}, "lam.*inf"),
    ({"lam": torch.tensor([0.1, -2.0])}, "lam.*-2"),
    ({"lam": torch.tensor([0.1, math.nan])}, "lam.*nan"),
    ({"lam": torch.ones(3)}, r"lam.*\[3\]"),
    ({"alpha": "x"}, "alpha.*number.*'x'"),
    ({"alpha": 0.0}, "alpha.*0.0"),
    ({"alpha": -1.0}, "alpha.*-1"),
    ({"alpha": math.nan}, "alpha.*nan"),
    ({"alpha": torch.tensor([0.1, 0.0])}, "alpha.*0.0"),
    ({"alpha": torch.ones(5)}, r"alpha.*\[5\]"),
    ({"solver": "newton"}, "solver.*newton"),
    ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask.*\[2, 4\]"),
    ({"mask": torch.ones(2, 3)}, "mask.*float32"),
]


@pytest.mark.parametrize("solve", [flows_from_scores, solve_flows])
@pytest.mark.parametrize(("arguments", "message"), STRENGTHS)
def test_strengths(solve, arguments, message):
    with pytest.raises(ValueError, match=message):
        solve(GOOD, GOOD, **({"lam": 0.1, "alpha": 0.1} | arguments))


@pytest.mark.parametrize(
    ("s", "u", "message"),
    [
        (_with(math.nan), GOOD, r"^s must.*nan.*\[1, 2\]"),
        (_with(math.inf), GOOD, r"^s must.*inf"),
        (GOOD, _with(math.nan), r"^u must.*nan.*\[1, 2\]"),
        (GOOD, _with(-math.inf), r"^u must.*-inf"),
        (GOOD, torch.ones(2, 4), r"^u must.*\[2, 3\].*\[2, 4\]"),
        (torch.ones(2, 3, dtype=torch.int64), GOOD, r"^s must.*int64"),
        (GOOD, [1.0], r"^u must"),
    ],
)
def test_scores(s, u, message):
    with pytest.raises(ValueError, match=message):
        flows_from_scores(s, u, lam=0.1)


@pytest.mark.parametrize(
    ("resistance", "friction", "message"),
    [
        (_with(0.0), GOOD, r"^resistance must.*0.0"),
        (_with(-1.0), GOOD, r"^resistance must.*-1"),
        (_with(math.nan), GOOD, r"^resistance must.*nan"),
        (GOOD, _with(-0.5), r"^friction must.*-0.5"),
        (GOOD, _with(math.nan), r"^friction must.*nan"),
        (GOOD, torch.ones(3), r"^friction must.*\[2, 3\].*\[3\]"),
        (GOOD, torch.ones(2, 3, dtype=torch.bool), r"^friction must.*bool"),
    ],
)
def test_resistance_and_friction(resistance, friction, message):
    with pytest.raises(ValueError, match=message):
        solve_flows(resistance, friction, lam=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_that_was_given(dtype):
    bad, good = _with(math.nan).to(dtype), GOOD.to(dtype)
    for solve, given in ((flows_from_scores, (bad, good)), (solve_flows, (good, bad))):
        with pytest.raises(ValueError, match=rf"nan at index \[1, 2\] \({str(dtype)[6:]} tensor"):
            solve(*given, lam=0.1)


def test_scaling():
    with pytest.raises(ValueError, match=r"scaling.*relative"):
        flows_from_scores(GOOD, GOOD, lam=0.1, scaling="relative")


def test_numbers_without_dimension():
    """A score of shape [] is not a row."""
    with pytest.raises(ValueError, match=r"s must"):
        flows_from_scores(torch.tensor(1.0), torch.tensor(1.0), lam=0.1)


def test_check_can_be_turned_off():
    flows_from_scores(GOOD, _with(math.nan), lam=0.1, check=False)
