"""Real Peptides-func, a small slice of it: unpacked, loaded, and learnt from."""

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from sfiformer.config import ExperimentConfig
from sfiformer.data.official import load
from sfiformer.training import train

SHARED = Path(os.environ.get("SFIFORMER_SHARED", Path(__file__).parents[2].parent / "shared")) / "data"


REAL = pytest.mark.skipif(
    not (SHARED / "peptides-func.npz").exists(), reason="needs the real data in ../shared/data"
)


@REAL
def test_the_official_split_is_whole(tmp_path):
    """Takes about 10 seconds of one core, and 350 MB of disk while it runs."""
    try:
        unpack = [sys.executable, SHARED / "unpack.py", "peptides-func", "--root", tmp_path]
        subprocess.run(unpack, check=True, capture_output=True)
        stores = load("peptides-func", tmp_path)
        assert {split: len(store) for split, store in stores.items()} == {
            "train": 10_873,
            "val": 2_331,
            "test": 2_331,
        }
        nodes, edges = (
            sum(getattr(store, count) for store in stores.values()) / 15_535
            for count in ("num_nodes", "num_edges")
        )
        assert nodes == pytest.approx(150.94, abs=0.005)  # as published
        assert edges == pytest.approx(307.30, abs=0.005)
    finally:
        shutil.rmtree(tmp_path)


@REAL
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
