"""`sfi_attention`: sparse-flow attention on packed graphs."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from sfiformer.attention import kernels
from sfiformer.attention.dropout import drawn_seed
from sfiformer.attention.fused import fused_attend
from sfiformer.attention.inputs import (
    as_offsets,
    in_common,
    require_finite,
    require_no_gradient,
    require_shapes,
    require_values,
)
from sfiformer.attention.iteration import FusedProximal, fused_iteration
from sfiformer.attention.kept_flows import Settings, attention_and_flows
from sfiformer.attention.packed import packed_attention
from sfiformer.attention.side_by_side import attention_side_by_side, side_by_side
from sfiformer.flow import checks
from sfiformer.flow.problem import Scaling, Solver


class _Options(TypedDict, total=False):
    """Of `sfi_attention`, which says what they are."""

    alpha: float
    scaling: Scaling
    scale: float | None
    dropout_p: float
    solver: Solver
    max_nodes: int | None
    check: bool | None
    deterministic: bool


@overload
def sfi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    *,
    lam: float | Tensor,
    return_flows: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def sfi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    *,
    lam: float | Tensor,
    return_flows: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, list[Tensor]]: ...


def sfi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_friction: Tensor,
    k_friction: Tensor,
    ptr: Tensor,
    *,
    lam: float | Tensor,
    alpha: float = 0.1,
    scaling: Scaling = "absolute",
    scale: float | None = None,
    dropout_p: float = 0.0,
    solver: Solver = "exact",
    return_flows: bool = False,
    max_nodes: int | None = None,
    check: bool | None = None,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, list[Tensor]]:
    """Every node draws one unit of flow from the nodes of its graph; its output is the sum of values by those flows.

    For a query i and the keys j of its graph, with s_ij = q_i·k_j · scale and u_ij = q̃_i·k̃_j · scale, the flows z_i are those
    of least energy with resistances softmax(−s_i) and frictions softmax(u_i) (`sfiformer.flow.flows_from_scores`), and
    the output is Σ_j z_ij v_j. A graph's result does not depend on the graphs beside it.

    Reverse mode differentiates it once (`torch.autograd`, and `grad`, `vjp` and `jacrev` of `torch.func`), and again with
    ``return_flows``; the exact solver refuses forward mode (`jvp`, `jacfwd`, `hessian`). `torch.func.vmap` makes a call for
    each sample, and wants ``check=False`` with ``return_flows``. `torch.compile` finds no graph breaks with the exact solver
    and without ``return_flows``.

    Args:
        q, k, q_friction, k_friction: [nodes, heads, width], any width.
        v: [nodes, heads, width of the output].
        ptr: integers [graphs + 1], where each graph starts, as PyG's ``Batch.ptr``; graphs may have no node.
        lam: λ ≥ 0, a number or one value for each graph. Its gradient is made of ∂L/∂log λ, and so is rounding where λ is
            less than some 1e-5 in float32; at λ = 0 it is the derivative from above, on a GPU 0.
        alpha: penalty of the constraint Σ z = 1; ``math.inf`` makes it hard.
        scaling: ``"absolute"``, λ = ``lam``; or ``"potential"``, friction relative to the row's potential: λ = ``lam`` · n/C
            with n the keys and C = (Σ e^s)(Σ e^−s), and a hard constraint.
        scale: of the scores, 1/√width by default.
        dropout_p: probability with which a flow is dropped (the others grow by 1/(1 − p)); set 0 for evaluation.
        solver: ``"exact"``, ``"proximal"`` (the paper's iteration) or a `sfiformer.flow.Proximal`.
        return_flows: also return the flows before dropout, a list of [heads, n, n], one for each graph.
        max_nodes: size of the largest graph, where the caller knows it; on a GPU, asking would wait for the device.
        check: look at values and raise on bad ones; by default on the CPU only.
        deterministic: ask for a bitwise repeatable backward; it always is, there are no atomics.

    Returns:
        [nodes, heads, width of v], in the dtype of v; with ``return_flows`` a pair of it and the flows. Where dtypes
        differ, all is computed in the widest.
    """
    require_shapes(dropout_p, q=q, k=k, v=v, q_friction=q_friction, k_friction=k_friction)
    look, ptr = checks.wanted(check, q), as_offsets(ptr)
    if scaling not in ("absolute", "potential"):
        raise ValueError(f"scaling must be 'absolute' or 'potential', got {scaling!r}")
    checks.require_alpha(alpha, look)
    if isinstance(alpha, Tensor) and alpha.numel() != 1:
        raise ValueError(f"alpha must be one number for all graphs, got a {checks.describe(alpha)}")
    checks.require_lam(lam, check=False)
    lam = _per_graph(lam, ptr, q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = v.dtype
    q, k, v, q_friction, k_friction = in_common(q, k, v, q_friction, k_friction)
    tensors = (q, k, v, q_friction, k_friction)
    if solver != "exact" or return_flows:
        if look:
            require_values(v, ptr, lam, max_nodes)
            require_finite(q=q, k=k, q_friction=q_friction, k_friction=k_friction)
        solver = solver if return_flows else fused_iteration(solver, q)
        settings = Settings(alpha, scaling, scale, dropout_p, solver, look)
        blocks = side_by_side(q, ptr, solver, max_nodes) if isinstance(solver, FusedProximal) else []
        if blocks:
            return attention_side_by_side(tensors, ptr, lam, settings, blocks).to(dtype)
        out, flows = attention_and_flows(tensors, ptr, lam, settings)
        return (out.to(dtype), flows) if return_flows else out.to(dtype)
    require_no_gradient("alpha", alpha, "take return_flows=True, which has one")
    require_no_gradient("scale", scale, "multiply q and q_friction by it, with scale=1.0")
    potential = scaling == "potential"
    if look and kernels.usable(q):  # on other devices the plain operator looks
        require_values(v, ptr, lam, max_nodes)
        require_finite(q=q, k=k, q_friction=q_friction, k_friction=k_friction)
    fused = fused_attend(
        *tensors,
        ptr,
        lam,
        alpha=float(alpha),
        potential=potential,
        scale=scale,
        dropout_p=dropout_p,
        max_nodes=max_nodes,
    )
    if fused is not None:
        return fused.to(dtype)
    options = (float(alpha), potential, scale, dropout_p, max_nodes, look)
    return packed_attention(*tensors, ptr, lam, drawn_seed(dropout_p), *options)[0].to(dtype)


def _per_graph(lam: float | Tensor, ptr: Tensor, like: Tensor) -> Tensor:
    """λ as one number for each graph, [graphs]."""
    graphs = ptr.shape[0] - 1
    if not isinstance(lam, Tensor):
        return torch.full((graphs,), float(lam), dtype=torch.float64, device=like.device)
    if lam.numel() not in (graphs, 1) or lam.dim() > 1:
        raise ValueError(
            f"lam must be a number or one value for each of the {graphs} graphs, got a {checks.describe(lam)}"
        )
    return lam.expand(graphs).to(like.device)
