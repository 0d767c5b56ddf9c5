"""Modules begun anew."""

from torch import nn


def reset(module: nn.Module) -> None:
    """Draw a module's parameters again; where it has no way of its own, those of its parts."""
    if callable(own := getattr(module, "reset_parameters", None)):
        own()
        return
    for part in module.children():
        reset(part)
