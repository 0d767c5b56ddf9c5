"""Two processes over gloo train as one does."""

import json

import pytest
import torch

from sfiformer import SFiFormer
from sfiformer.training import evaluate, prepare, train

# Dropout differs from rank to rank; all else is of the global batch.
SETTINGS = {
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.lam_scaling": "largest",
    "model.pe": "lappe",
    "model.pe_dim": 4,
    "model.sign_flip": False,
    "trainer.accumulate": 2,
}


def test_two_processes_equal_one(tmp_path, experiment, drive, in_float64):
    one, two = tmp_path / "one", tmp_path / "two"
    train(experiment(SETTINGS), one, progress=False)
    drive({two: None}, {**SETTINGS, "trainer.devices": 2})

    records = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, two)
    ]
    assert len(records[0]) == 3
    losses = [[record["loss"] for record in run] for run in records]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    # Not weight by weight: where a gradient is zero, as of a bias before a norm, AdamW makes steps of its
    # rounding error. Normalised by its own statistics, a batch does not feel them.
    batch = prepare(experiment(SETTINGS)).stores["test"].batch(range(6))
    left, right = (SFiFormer.from_pretrained(run / "last").train()(batch) for run in (one, two))
    torch.testing.assert_close(right, left, rtol=0, atol=1e-6)
    # Metrics over all ranks are exact: one process finds the same for the same weights.
    for split in ("val", "test"):
        found = evaluate(two, split=split, checkpoint="last", device="cpu")
        assert found["mean_recall"] == records[1][-1][split]
    assert json.loads((two / "about.json").read_text())["processes"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_the_only_one_told(tmp_path, drive, rank):
    said = drive({tmp_path / "run": None}, {"trainer.devices": 2}, fail_on=rank)
    assert said.count("Traceback") == 1, said
    assert f"ValueError: rank {rank} is out of luck" in said
    assert "onnection" not in said
