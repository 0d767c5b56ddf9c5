"""What it takes to use a trained model again; nothing here imports what trains or judges one."""

import sys
from pathlib import Path

import torch

from sfiformer.data.encoding_cache import add_encodings
from sfiformer.data.encodings import Encoding, ESLapPE, LapPE, RandomWalkSE
from sfiformer.data.standardize import Standardizer
from sfiformer.data.store import GraphStore
from sfiformer.errors import UserError
from sfiformer.nn.config import ModelConfig
from sfiformer.nn.model import SFiFormer
from sfiformer.training.run_folder import RunFolder


def load_checkpoint(run: RunFolder, checkpoint: str = "best") -> SFiFormer:
    """The model of a run's `best` or `last` checkpoint, in evaluation mode."""
    path = run.path / checkpoint
    if not path.exists():
        other = (
            " (no epoch was finished yet)" if checkpoint == "best" and (run.path / "last").exists() else ""
        )
        raise UserError(f"{run.path} has no checkpoint {checkpoint!r}{other}")
    return SFiFormer.from_pretrained(path)


def pick_device(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"there is no device {name!r}; choose auto, cpu or cuda") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"the device {name!r} cannot be used here: {reason}; auto takes what there is"
        ) from None
    return device


def model_inputs(
    store: GraphStore,
    model: ModelConfig,
    standardizer: Standardizer | None = None,
    cache: Path | None = None,
    progress: bool | None = None,
) -> GraphStore:
    """Raw graphs as the model takes them: features standardised, positional encodings added.

    progress: None shows a bar on a terminal.
    """
    if standardizer is not None:
        store = standardizer.apply(store)
    shown = sys.stderr.isatty() if progress is None else progress
    return add_encodings(store, encodings_of(model), cache=cache, progress=shown)


def encodings_of(model: ModelConfig) -> list[Encoding]:
    """The positional encodings that a model asks of its data."""
    made: dict[str, type[Encoding]] = {"lappe": LapPE, "eslappe": ESLapPE, "rwse": RandomWalkSE}
    return [made[model.pe](model.pe_size)] if model.pe != "none" else []
