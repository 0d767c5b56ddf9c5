"""A disk that is really full: a small one in memory, which only root may mount."""

import contextlib
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from sfiformer.errors import TrainingError, UserError
from sfiformer.training import train
from sfiformer.training.checkpoint import Checkpoints, read_state

SIZE = 8 << 20


@pytest.fixture
def disk(tmp_path):
    """The folder of a file system of its own, of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path):
    """Take all that is left of the disk."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_named_keeps_the_last_checkpoint_and_goes_on_after(
    disk, tmp_path, experiment, outcome, monkeypatch
):
    config, run, filler = experiment(), disk / "run", disk / "filler"
    train(config, tmp_path / "whole", progress=False)
    save = Checkpoints.save

    def save_and_fill(checkpoints, model, state, *, epoch, **options):
        save(checkpoints, model, state, epoch=epoch, **options)
        if epoch == 1:  # somebody else's file takes the rest
            fill(filler)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_fill)
        with pytest.raises(TrainingError) as caught:
            train(config, run, progress=False)
    assert str(caught.value) == (
        f"cannot write a checkpoint to {run}: No space left on device; the last whole checkpoint, epoch-0001, "
        "is kept: mend the disk and continue with --resume"
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["epoch-0001"]
    assert read_state(run / "last")["epoch"] == 1
    assert all(
        torch.isfinite(weights).all() for weights in load_file(run / "last/model.safetensors").values()
    )

    with pytest.raises(
        UserError, match=f"the disk of {run} has 0.0 MB left, and the checkpoints of this run need"
    ):
        train(config, run, resume=True, progress=False)
    filler.unlink()
    train(config, run, resume=True, progress=False)
    assert outcome(run) == outcome(tmp_path / "whole")
