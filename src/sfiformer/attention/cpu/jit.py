"""How the loops for a CPU are compiled."""

from typing import Any

import numpy as np
from numba import njit

F = np.float32


def jitted(function: Any) -> Any:
    """Sums may be made in any order, so that a processor adds up many terms at once."""
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": {"reassoc", "nsz", "contract"},
    }
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no place to keep what is compiled
        return njit(**options)(function)
