"""Modules begun anew."""

from torch import nn


def reset(module: nn.Module) -> None:
    """Draw a module's parameters again; where it has no `reset_parameters`, those of its parts.

    Parameters of such a module's own stay as they are, unless it has a `_reset_parameters`, as PyTorch's MultiheadAttention and
    Transformer do.
    """
    if callable(own := getattr(module, "reset_parameters", None)):
        own()
        return
    for part in module.children():
        reset(part)
    if callable(own := getattr(module, "_reset_parameters", None)):  # which leaves some to the parts
        own()
