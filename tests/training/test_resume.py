"""Runs that are really killed, at any moment, end as if they had not been."""

import random

import pytest
import torch

MOMENTS = [random.Random(seed).uniform(0.05, 0.6) for seed in range(5)]
# The first calls describe the run, the next forty or so write its first checkpoints.
CALLS = [{"call": number} for number in (1, 3, 9, *range(14, 40, 2))]
PLANS = {
    "whole": [None],
    "moments": [*MOMENTS, None],
    "writes": [*CALLS, None],
    "sigterm": [{"signal": 15}, None],
    "sigint": [{"signal": 2}, None],
}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory, drive):
    """The folder of all runs, the exit codes of each, and standard error."""
    folder = tmp_path_factory.mktemp("runs")
    plans = {folder / name: plan for name, plan in PLANS.items()}
    codes, stderr = drive(plans, {"trainer.epochs": 4, "trainer.checkpoint_steps": 2})
    return folder, dict(zip(PLANS, codes, strict=True)), stderr


def optimizer_of(run):
    state = torch.load(run / "last" / "state.pt", weights_only=True)["optimizer"]["state"]
    return {(i, key): value for i, slots in state.items() for key, value in slots.items()}


@pytest.mark.parametrize("name", [name for name in PLANS if name != "whole"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(campaign, outcome, name):
    folder, codes, stderr = campaign
    assert codes[name][-1] == 0, stderr
    found, whole = folder / name, folder / "whole"
    assert outcome(found) == outcome(whole)
    left, right = optimizer_of(found), optimizer_of(whole)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    # Two checkpoints at most, and nothing half-written.
    kept = {(found / link).resolve().name for link in ("best", "last")}
    assert {path.name for path in (found / "checkpoints").iterdir()} == kept
    assert [path.name for path in found.glob(".*")] == [".lock"]


def test_kills_hit_a_run_under_way(campaign):
    _, codes, stderr = campaign
    for name in ("moments", "writes"):
        killed = codes[name][:-1]
        assert set(killed) <= {-9, 0}, stderr
        assert killed.count(-9) >= 2


def test_signals_leave_a_line_and_their_exit_code(campaign):
    folder, codes, stderr = campaign
    assert (codes["sigterm"], codes["sigint"]) == ([143, 0], [130, 0])
    for line, name in zip(stderr.splitlines(), ("sigterm", "sigint"), strict=True):
        assert line.startswith(f"stopped by {name.upper()} after epoch ")
        assert line.endswith(f"the checkpoint is in {folder / name / 'last'}: continue with --resume")
