"""Models on disk and on the Hugging Face Hub: weights in `model.safetensors`, settings in `config.json`."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sfiformer.files import whole_file
from sfiformer.nn.config import ModelConfig
from sfiformer.schema import Layer, build, plain

if TYPE_CHECKING:
    from sfiformer.nn.model import SFiFormer

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MODEL_TYPE = "sfiformer"
# What Hugging Face's tools read in config.json, besides our settings.
_LABELS = {"model_type": MODEL_TYPE, "architectures": ["SFiFormer"]}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Pretrained:
    """`save_pretrained` and `from_pretrained` for a model that is made from its `config` alone."""

    config: ModelConfig

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` into `folder`; other files there are left alone.

        Each file is replaced whole or not at all.
        """
        folder = Path(folder)
        # JSON has no infinity; the reader takes the text "inf" for one.
        settings = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in plain(self.config).items()
        }
        state = {key: tensor.contiguous() for key, tensor in cast("SFiFormer", self).state_dict().items()}
        with whole_file(folder / CONFIG) as file:
            file.write(json.dumps(_LABELS | settings, indent=2, allow_nan=False).encode())
        with whole_file(folder / WEIGHTS) as file:
            file.write(save(state, metadata={"format": "pt"}))

    @classmethod
    def from_pretrained(cls, folder_or_hub_id: str | Path, *, revision: str | None = None) -> Self:
        """The model of a folder that `save_pretrained` wrote, or of a repository OWNER/NAME on the Hub.

        It comes back in evaluation mode, on the CPU. Nothing in the files is executed.

        Args:
            folder_or_hub_id: a folder, if there is one of this name; else a repository (needs the extra `hub`), unless
                there is a folder OWNER.
            revision: branch, tag or commit of the repository, which is then asked for in any case.

        Raises:
            ValueError: where a file is missing, damaged, or of something else.
        """
        config_file, weights_file = _locate(folder_or_hub_id, revision)
        config = _read_config(config_file)
        with torch.device("meta"):  # a config that does not fit its weights may ask for any amount of memory
            expected = cast("SFiFormer", cls(config)).state_dict()  # type: ignore[call-arg]
        state = _read_weights(weights_file)
        if problem := mismatch(expected, state):
            raise ValueError(f"{weights_file} does not hold the model of {config_file}: {problem}")
        with torch.random.fork_rng(devices=[]):  # drawing weights only to replace them leaves no trace
            model = cls(config)  # type: ignore[call-arg]
        cast("SFiFormer", model).load_state_dict(state)
        cast("SFiFormer", model).eval()
        return model


def mismatch(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """What first sets a state apart from the expected one, in words; None where names and shapes agree."""
    problems = [f"{key} is missing" for key in expected if key not in found]
    problems += [f"{key} is unknown" for key in found if key not in expected]
    problems += [
        f"{key} has shape {list(found[key].shape)}, not {list(expected[key].shape)}"
        for key in expected
        if key in found and found[key].shape != expected[key].shape
    ]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more if problems else None


def _locate(name: str | Path, revision: str | None) -> tuple[Path, Path]:
    """Where the two files lie, downloaded if need be."""
    folder = Path(name)
    if folder.is_dir():
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                hint = f"; did you mean {folder / 'best'}?" if (folder / "best" / file).is_file() else ""
                raise ValueError(f"{folder} holds no {file}, so it is no saved model{hint}")
        return folder / CONFIG, folder / WEIGHTS
    if isinstance(name, Path) or not _HUB_ID.fullmatch(name):
        raise ValueError(f"there is no folder {name}")
    if revision is None and folder.parent.is_dir():
        raise ValueError(
            f"there is no folder {name}; nor was the Hub asked for it, as there is a folder {folder.parent}: "
            "revision='main' asks it"
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ValueError(
            f"there is no folder {name}; to look for it on the Hugging Face Hub: pip install 'sfiformer[hub]'"
        ) from None
    try:
        return (
            Path(hf_hub_download(name, CONFIG, revision=revision)),
            Path(hf_hub_download(name, WEIGHTS, revision=revision)),
        )
    except (
        Exception
    ) as error:  # a missing repository or file, no network, no permission: each has its own class
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"there is no folder {name}, and the Hub's repository of this name is of no help: {reason}"
        ) from error


def _read_config(path: Path) -> ModelConfig:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, it is not readable JSON: {error}") from None
    if not isinstance(values, dict) or values.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{path} is not of an SFiFormer: its model_type must be {MODEL_TYPE!r}")
    return build(ModelConfig, [Layer(str(path), {k: v for k, v in values.items() if k not in _LABELS})])


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged, it is not a readable safetensors file: {error}") from None
