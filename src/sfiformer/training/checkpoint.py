"""Checkpoints: whole or not at all, and `best` and `last` always of one history.

    checkpoints/epoch-0003/         after three epochs; epoch-0003-step-000120 is 120 steps into the fourth
        model.safetensors, config.json    as `SFiFormer.save_pretrained` writes them
        state.pt                          all else that training goes on from
    last -> checkpoints/epoch-0003
    best -> checkpoints/epoch-0002

A checkpoint is written under another name, synced, renamed into place, and only then do the links move, each by
one rename. `last` moves first and its state says which checkpoint is the best, so that a run that was killed
between the two is put right when it is opened again.

Training goes on meanwhile (`Checkpoints.begin`): what is written is a copy in host memory, by one other thread.
"""

import io
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sfiformer.errors import UserError
from sfiformer.files import sync_folder, whole_file, whole_folder
from sfiformer.nn.model import SFiFormer
from sfiformer.nn.pretrained import Pretrained
from sfiformer.pickles import foreign_names

FORMAT = 1
STATE = "state.pt"
PARTIAL = re.compile(
    r"\..+\.[0-9a-f]{16}"
)  # the names under which files are written before they take their place


class Checkpoints:
    """The checkpoints of the run in a folder."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.folder = run / "checkpoints"
        self.last: str | None = None  # names of the checkpoints that the links point at
        self.best: str | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None
        # What is being written: kept here, so that it is freed by the caller's thread and not by the other.
        self._copies: tuple[Snapshot, dict[str, Any]] | None = None

    def open(self) -> dict[str, Any] | None:
        """The state of `last`, with links and folders put right; None where there is no checkpoint yet."""
        state = read_state(self.run / "last") if (self.run / "last").exists() else None
        if state is not None:
            self.last, self.best = state["name"], state["best"]
            if self.best is not None:
                self._point("best", self.best)
        elif os.path.lexists(self.run / "best"):
            (self.run / "best").unlink()
        for path in self.run.glob(".*"):
            if PARTIAL.fullmatch(path.name):
                path.unlink()
        self._prune()
        return state

    def begin(
        self, model: SFiFormer, state: dict[str, Any], *, epoch: int, step: int = 0, best: bool = False
    ) -> None:
        """`save` model and state as they are now while the caller goes on, and changes them.

        One write is under way at a time: this waits for the one before.

        Raises:
            OSError: of the one before.
        """
        self.wait()
        # In host memory: a CUDA graph may be captured meanwhile, and then no other thread may touch the GPU.
        self._copies = Snapshot(model), on_host(state)
        self._under_way = self._thread.submit(self.save, *self._copies, epoch=epoch, step=step, best=best)

    def wait(self) -> None:
        """Until the write under way, if there is one, is on the disk: from then on `last` and `best` tell of it.

        Raises:
            OSError: and then they are what they were before that write.
        """
        try:
            if self._under_way is not None:
                self._under_way.result()
        finally:
            self._under_way = None

    def close(self) -> None:
        """Wait for the last write, and raise as `wait` does; none can begin from now on."""
        self._thread.shutdown()
        self._copies = None
        self.wait()

    def save(
        self, model: Pretrained, state: dict[str, Any], *, epoch: int, step: int = 0, best: bool = False
    ) -> None:
        """Write the checkpoint of `step` steps after `epoch` whole epochs; it is `last` from now on.

        Raises:
            OSError: and then `last` and `best` are what they were.
        """
        name = f"epoch-{epoch:04d}" + (f"-step-{step:06d}" if step else "")
        if name == self.last:
            return  # nothing was done since
        state = {**state, "format": FORMAT, "name": name, "best": name if best else self.best}
        buffer = io.BytesIO()  # PyTorch's own writer would turn a full disk into an error of another class
        torch.save(state, buffer)
        with whole_folder(self.folder / name) as partial:
            model.save_pretrained(partial)
            with whole_file(partial / STATE) as file:
                file.write(buffer.getbuffer())
            sync_folder(partial)
        sync_folder(self.folder)
        self._point("last", name)
        self.last = name
        if best:
            self._point("best", name)
            self.best = name
        self._prune()

    def _point(self, link: str, name: str) -> None:
        path = self.run / link
        if path.is_dir() and not path.is_symlink():  # a copy of the run that followed links
            shutil.rmtree(path)
        fresh = self.run / f".{link}.{secrets.token_hex(8)}"
        os.symlink(Path(self.folder.name) / name, fresh, target_is_directory=True)
        os.replace(fresh, path)
        sync_folder(self.run)

    def _prune(self) -> None:
        """Remove what neither link points at, and the state of an old best: twice the size of the weights, and three times
        where they are averaged.
        """
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in (self.last, self.best):
                shutil.rmtree(path, ignore_errors=True)
        if self.best not in (None, self.last):
            (self.folder / str(self.best) / STATE).unlink(missing_ok=True)


class Snapshot(Pretrained):
    """A model's settings and its weights as they are now, to be saved while it goes on learning."""

    def __init__(self, model: SFiFormer) -> None:
        self.config = model.config
        self._weights = on_host(model.state_dict())

    def state_dict(self) -> Mapping[str, Tensor]:
        return self._weights


def on_host(values: Any) -> Any:
    """A copy of nested dicts and lists, with all tensors in them copied to host memory (those of a GPU all at once)."""
    gpus = set()

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            gpus.add(tensor.device)
        return tensor.detach().to("cpu", copy=True, non_blocking=True)

    copies = tree_map_only(Tensor, copy, values)
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()
    return copies


def read_state(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint; nothing in the file is executed.

    Raises:
        UserError: where it is missing or damaged.
    """
    path = folder / STATE
    try:
        if foreign := foreign_names(path):
            raise ValueError(f"it holds {', '.join(foreign)}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError("it is not a state of this release")
    except FileNotFoundError:
        raise UserError(f"{folder} is no checkpoint to resume from: it has no {STATE}") from None
    except Exception as error:  # bytes that are no state have all kinds of errors
        reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
        raise UserError(f"{path} is damaged ({reason}); start the run anew in another folder") from None
    return state
