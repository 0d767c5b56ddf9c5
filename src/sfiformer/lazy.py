"""Packages whose names are imported when they are first used, since PyTorch takes seconds to import."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__getattr__`, which finds each name in the module that `homes` gives for it, and its `__dir__`."""

    def find(name: str) -> object:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted({*vars(sys.modules[package]), *homes})
