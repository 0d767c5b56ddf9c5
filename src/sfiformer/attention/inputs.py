"""What the attention functions and layers are given, and what they expect of it."""

from __future__ import annotations

from functools import reduce
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfiformer.flow import checks
from sfiformer.flow.problem import Scaling, Solver


class Scores(NamedTuple):
    """Queries and keys of resistance and of friction, [nodes, heads, width] each."""

    q: Tensor
    k: Tensor
    q_friction: Tensor
    k_friction: Tensor


class Strengths(NamedTuple):
    """How strongly friction acts, and how flows are solved for: arguments of `sfi_attention`."""

    lam: float | Tensor  # a number, or one for each graph
    alpha: float
    scaling: Scaling
    solver: Solver

    def for_each(self, graphs: int) -> Strengths:
        """With its λ, a tensor, in place for each of so many graphs."""
        assert isinstance(self.lam, Tensor)
        return self._replace(lam=self.lam.expand(graphs).contiguous())


def require_shapes(dropout_p: float, **tensors: Tensor) -> None:
    """Every tensor [nodes, heads, width] like the first, v with a width of its own."""
    (first_name, first), *_ = tensors.items()
    for name, x in tensors.items():
        checks.require_floating(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name} must have the shape [nodes, heads, width], got a {checks.describe(x)}")
        if not (x.shape[1] and x.shape[2]):
            raise ValueError(
                f"{name} must have one head and a width of 1 at least, got a {checks.describe(x)}"
            )
        if name != "v":
            checks.require_same_shape(name, x, first_name, first)
        elif x.shape[:2] != first.shape[:2]:
            raise ValueError(
                f"v must have the nodes and heads of {first_name}, {list(first.shape[:2])}, got a {checks.describe(x)}"
            )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, got {dropout_p}")


def require_no_gradient(name: str, value: object, remedy: str) -> None:
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} has no gradient here, but the tensor that was given asks for one: {remedy}")


def as_pair(made: Any, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """What a callable made of x: the queries and the keys of friction, [nodes, heads, head_width] each."""
    pair = made if isinstance(made, tuple | list) and len(made) == 2 else [made]
    wrong = [x for x in pair if not isinstance(x, Tensor) or x.shape != shape]
    if wrong or len(pair) < 2:
        got = wrong[0] if wrong else pair[0]
        raise ValueError(
            f"friction must make two tensors [nodes, heads, head_width] of x, its queries and its keys, here {list(shape)}; "
            f"got {f'a {checks.describe(got)}' if isinstance(got, Tensor) else type(got).__name__}"
        )
    return pair[0], pair[1]


def require_nodes(x: Tensor, dim: int) -> None:
    checks.require_floating("x", x)
    if x.dim() != 2 or x.shape[1] != dim:
        raise ValueError(f"x must have the shape [nodes, {dim}], got a {checks.describe(x)}")


def as_offsets(ptr: Tensor) -> Tensor:
    """``ptr`` in int64."""
    whole = isinstance(ptr, Tensor) and not (
        ptr.is_floating_point() or ptr.is_complex() or ptr.dtype == torch.bool
    )
    if not whole or ptr.dim() != 1 or ptr.shape[0] < 1:
        given = f"a {checks.describe(ptr)}" if isinstance(ptr, Tensor) else repr(ptr)
        raise ValueError(f"ptr must be a tensor of integer offsets, [graphs + 1], got {given}")
    return ptr.long()


def in_common(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the least dtype that holds them all."""
    common = reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(common) for x in tensors)


def require_finite(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not bool(x.sum().isfinite()):  # else there is neither NaN nor inf, at a fraction of the time
            checks.require_all(x.isfinite(), name, x, "finite")


def require_ptr(ptr: Tensor, nodes: int, max_nodes: int | None = None) -> None:
    """Offsets from 0 to the number of nodes that never decrease."""
    sizes = ptr.diff()
    if int(ptr[0]) != 0:
        raise ValueError(f"ptr must start at 0, got {int(ptr[0])}")
    if bool((sizes < 0).any()):
        place = int((sizes < 0).nonzero()[0])
        here, after = ptr[place : place + 2].tolist()
        raise ValueError(f"ptr must not decrease, but ptr[{place}] = {here} and ptr[{place + 1}] = {after}")
    if int(ptr[-1]) != nodes:
        raise ValueError(f"ptr must end at the number of nodes, {nodes}, got {int(ptr[-1])}")
    if max_nodes is not None and len(sizes) and int(sizes.max()) > max_nodes:
        raise ValueError(f"max_nodes must be at least the largest graph, {int(sizes.max())}, got {max_nodes}")


def require_values(v: Tensor, ptr: Tensor, lam: Tensor, max_nodes: int | None) -> None:
    """Looks at what is in the tensors of `sfi_attention` (the scores are looked at where they are made)."""
    require_ptr(ptr, len(v), max_nodes)
    require_finite(v=v)
    checks.require_lam(lam, check=True)


def graph_sizes(ptr: Tensor, dtype: torch.dtype) -> Tensor:
    """n of each graph, [graphs], but 1 for one without nodes; in ``dtype``, or float32 where that is narrower."""
    return ptr.diff().clamp(min=1).to(torch.promote_types(dtype, torch.float32))


def require_count(name: str, value: object) -> None:
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of 1 at least, got {value!r}")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
