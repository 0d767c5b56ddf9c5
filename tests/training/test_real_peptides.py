"""Real Peptides-func, a small slice of it: unpacked, loaded, and learnt from."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from sfiformer.config import ExperimentConfig
from sfiformer.training import train

SHARED = Path(os.environ.get("SFIFORMER_SHARED", Path(__file__).parents[2].parent / "shared")) / "data"


@pytest.mark.skipif(
    not (SHARED / "peptides-func.npz").exists(), reason="needs the real data in ../shared/data"
)
def test_the_loss_falls_on_real_peptides(tmp_path):
    unpack = [sys.executable, SHARED / "unpack.py", "peptides-func", "--root", tmp_path, "--limit", "48"]
    subprocess.run(unpack, check=True, capture_output=True)
    config = ExperimentConfig.from_preset(
        "peptides-func",
        {
            "data.root": str(tmp_path),
            "data.batch_size": 8,
            "model.dim": 32,
            "model.dropout": 0.0,
            "model.attention_dropout": 0.0,
            "trainer.epochs": 4,
            "optim.warmup_epochs": 1,
        },
    )
    with pytest.warns(
        UserWarning, match="10,?873"
    ):  # a slice: the official split is larger, and that is said
        train(config, tmp_path / "run", progress=False)
    losses = [
        json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 4
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert losses[-1] < losses[0] - 0.03
