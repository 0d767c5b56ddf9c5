"""Training, and what it is judged by."""

from typing import TYPE_CHECKING

from sfiformer.lazy import lazy_names

if TYPE_CHECKING:
    from sfiformer.training.evaluation import evaluate
    from sfiformer.training.launch import train
    from sfiformer.training.preparation import Prepared, prepare
    from sfiformer.training.run_folder import RunFolder
    from sfiformer.training.state import Result

__all__ = ["Prepared", "Result", "RunFolder", "evaluate", "prepare", "train"]

# Lightning takes seconds to import.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Prepared": "sfiformer.training.preparation",
        "Result": "sfiformer.training.state",
        "RunFolder": "sfiformer.training.run_folder",
        "evaluate": "sfiformer.training.evaluation",
        "prepare": "sfiformer.training.preparation",
        "train": "sfiformer.training.launch",
    },
)
