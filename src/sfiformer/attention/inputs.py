"""What `sfi_attention` expects of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from sfiformer.flow import checks


def require_shapes(
    q: Tensor, k: Tensor, v: Tensor, q_friction: Tensor, k_friction: Tensor, ptr: Tensor
) -> None:
    named = {"q": q, "k": k, "v": v, "q_friction": q_friction, "k_friction": k_friction}
    for name, x in named.items():
        checks.require_floating(name, x)
        if x.dim() != 3:
            raise ValueError(f"{name} must have the shape [nodes, heads, width], got a {checks.describe(x)}")
        if name != "v":
            checks.require_same_shape(name, x, "q", q)
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"v must have the nodes and heads of q, {list(q.shape[:2])}, got a {checks.describe(v)}"
        )
    if ptr.dtype != torch.int64 or ptr.dim() != 1 or len(ptr) < 1:
        raise ValueError(f"ptr must be int64 offsets of shape [graphs + 1], got a {checks.describe(ptr)}")


def require_values(v: Tensor, ptr: Tensor, lam: Tensor, max_nodes: int | None) -> None:
    """Looks at what is in the tensors (the scores are looked at where they are made)."""
    checks.require_all(v.isfinite(), "v", v, "finite")
    checks.require_lam(lam, check=True)
    sizes = ptr.diff()
    if int(ptr[0]) != 0:
        raise ValueError(f"ptr must start at 0, got {int(ptr[0])}")
    if bool((sizes < 0).any()):
        place = int((sizes < 0).nonzero()[0])
        raise ValueError(
            f"ptr must not decrease, but ptr[{place}] = {int(ptr[place])} and ptr[{place + 1}] = {int(ptr[place + 1])}"
        )
    if int(ptr[-1]) != len(v):
        raise ValueError(f"ptr must end at the number of nodes, {len(v)}, got {int(ptr[-1])}")
    if max_nodes is not None and len(sizes) and int(sizes.max()) > max_nodes:
        raise ValueError(f"max_nodes must be at least the largest graph, {int(sizes.max())}, got {max_nodes}")
