"""Training, and what it is judged by."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sfiformer.training.evaluation import evaluate
    from sfiformer.training.launch import train
    from sfiformer.training.preparation import Prepared, prepare
    from sfiformer.training.run_folder import RunFolder
    from sfiformer.training.state import Result

__all__ = ["Prepared", "Result", "RunFolder", "evaluate", "prepare", "train"]

_PLACES = {
    "Prepared": "preparation",
    "Result": "state",
    "RunFolder": "run_folder",
    "evaluate": "evaluation",
    "prepare": "preparation",
    "train": "launch",
}


def __getattr__(name: str) -> object:
    if name in _PLACES:  # Lightning takes seconds to import
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
