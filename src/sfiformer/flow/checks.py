"""Errors that name the argument, what it is, and what was expected."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor


def wanted(check: bool | None, tensor: Tensor) -> bool:
    """Whether to look at values: by default only where that does not make a device wait."""
    return tensor.device.type == "cpu" if check is None else check


def describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}"


def require_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        given = describe(tensor) if isinstance(tensor, Tensor) else repr(tensor)
        raise ValueError(f"{name} must be a floating-point tensor, got {given}")


def require_rows(name: str, tensor: Tensor) -> None:
    require_floating(name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have a last dimension of links, [..., n], got a {describe(tensor)}")


def require_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} must have the shape of {other_name}, {list(other.shape)}, got a {describe(tensor)}"
        )


def require_all(condition: Tensor, name: str, tensor: Tensor, expected: str) -> None:
    """Raises with the first offending value and its place where ``condition`` (same shape) does not hold."""
    if bool(condition.all()):
        return
    place = (~condition).nonzero()[0].tolist()
    value = tensor[tuple(place)].item() if place else tensor.item()
    where = f" at index {place}" if place else ""
    raise ValueError(f"{name} must be {expected}, got {value}{where} ({describe(tensor)})")


def require_alpha(alpha: float | Tensor, check: bool) -> None:
    if isinstance(alpha, Tensor):
        if check:
            require_all(alpha > 0, "alpha", alpha, "positive (math.inf is the hard constraint)")
    elif not (isinstance(alpha, Real) and alpha > 0):
        raise ValueError(f"alpha must be a positive number (math.inf is the hard constraint), got {alpha!r}")


def require_lam(lam: float | Tensor, check: bool) -> None:
    if isinstance(lam, Tensor):
        if check:
            require_all((lam >= 0) & lam.isfinite(), "lam", lam, "finite and not negative")
    elif not (isinstance(lam, Real) and 0 <= lam < math.inf):
        raise ValueError(f"lam must be a number or a tensor, finite and not negative, got {lam!r}")


def require_mask(mask: Tensor | None, like: Tensor, name: str) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool or mask.shape != like.shape:
        raise ValueError(
            f"mask must be a bool tensor of the shape of {name}, {list(like.shape)}, got a {describe(mask)}"
        )


def row_scalar(name: str, value: float | Tensor, rows: torch.Size, like: Tensor) -> Tensor:
    """A number, or one value a row, as a tensor that broadcasts over the keys: [...] → [..., 1]."""
    if isinstance(value, Tensor):
        tensor = value.to(like.device)
    else:  # made where it is wanted, so that nothing is sent there
        tensor = torch.full((), float(value), dtype=torch.float64, device=like.device)
    try:
        fits = torch.broadcast_shapes(tensor.shape, rows) == rows
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} must be a number or broadcast over the rows {list(rows)}, got a {describe(tensor)}"
        )
    return tensor.unsqueeze(-1) if tensor.dim() else tensor.reshape(1)
