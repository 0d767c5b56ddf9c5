"""The attention layer of SFi-Former: sparse flows beside hard-wired adjacency."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfiformer import ranks
from sfiformer.attention import kernels
from sfiformer.attention.adjacency import Adjacency
from sfiformer.attention.dense import dfi_attention
from sfiformer.attention.functional import sfi_attention
from sfiformer.attention.heads import split_heads
from sfiformer.attention.inputs import (
    Scores,
    Strengths,
    as_offsets,
    as_pair,
    graph_sizes,
    require_choice,
    require_count,
    require_nodes,
)
from sfiformer.attention.products import product
from sfiformer.attention.widths import by_parts, is_plain, joined, resized, wide, wide_head, widened
from sfiformer.branches import ahead
from sfiformer.flow import Proximal, checks
from sfiformer.flow.problem import Solver
from sfiformer.resetting import reset

Friction = Literal["learned", "tied"] | Callable[[Tensor], tuple[Tensor, Tensor]]

_SOFTPLUS_ONE = math.log(math.e - 1)  # softplus of this is 1


class SFiAttention(nn.Module):
    """Adjacency-enhanced multi-head attention (the paper's equation for it), normalised:

        LayerNorm( (1 + γ)⁻¹ Σ_h [Ã + γ Z^h] X W_V^h W_O^h + b_O )

    with Z^h the flows of least energy that head h finds. Every head has the full width unless ``head_width`` says otherwise.
    By linearity the Ã term is one sparse product of width ``dim``.

    Args:
        dim: width of the node features.
        heads: number of heads, H.
        mode: ``"sfi"``, sparse flows, or ``"dfi"``, flows without friction under the hard constraint: softmax attention.
        head_width: width of a head; None for ``dim``.
        adjacency: whether Ã takes part. Without it the layer is Σ_h Z^h X W_V^h W_O^h.
        attention: whether the flows take part. Without them the layer is Σ_h Ã X W_V^h W_O^h.
        friction: ``"learned"``, from projections Q̃ and K̃ of its own; ``"tied"``, f ∝ exp(−s), with no parameters; or a
            callable from x [nodes, dim] to queries and keys of friction, each [nodes, heads, head_width].
        lam: λ*, which a learnable factor (1 to begin with) multiplies.
        lam_scaling: ``"potential"``: friction relative to the row's potential, with a hard constraint, and so of one strength
            however the scores spread; ``"graph"``: λ = λ*/n with n the size of the query's graph; ``"largest"``, the paper's:
            λ = λ*/N* with N* the largest graph of the batch in training, and the largest graph seen in training afterwards.
        alpha: penalty of the constraint Σ z = 1, under ``"graph"`` and ``"largest"``; not used under ``"potential"``.
        qk_norm: divide the queries and keys of both scores by their root mean square over the head, which bounds the scores.
        norm: whether the LayerNorm is there.
        gain: where that norm's gain starts: 0 for a layer that starts as nothing, and is learnt as far as it helps.
        dropout: of the flows, in training.
        solver: of `sfi_attention`.
    """

    largest: Tensor
    across_ranks = False  # whether "the batch" is that of all ranks of a distributed run: see `ranks.join`

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mode: Literal["sfi", "dfi"] = "sfi",
        head_width: int | None = None,
        adjacency: bool = True,
        attention: bool = True,
        friction: Friction = "learned",
        lam: float = 1.0,
        lam_scaling: Literal["potential", "graph", "largest"] = "potential",
        alpha: float = 0.1,
        qk_norm: bool = True,
        norm: bool = True,
        gain: float = 1.0,
        dropout: float = 0.0,
        solver: Solver = "exact",
    ) -> None:
        super().__init__()
        require_choice("mode", mode, ("sfi", "dfi"))
        require_choice("lam_scaling", lam_scaling, ("potential", "graph", "largest"))
        if not callable(friction):
            require_choice("friction", friction, ("learned", "tied"))
        if not (adjacency or attention):
            raise ValueError("adjacency and attention are both off: nothing is left of the layer")
        for name, count in (
            ("dim", dim),
            ("heads", heads),
            ("head_width", dim if head_width is None else head_width),
        ):
            require_count(name, count)
        checks.require_lam(lam, check=True)
        checks.require_alpha(alpha, check=True)
        soft = isinstance(solver, Proximal) or solver == "proximal"
        if not isinstance(solver, Proximal):
            require_choice("solver", solver, ("exact", "proximal"))
        if soft and lam_scaling == "potential" and mode == "sfi":
            raise ValueError(
                "solver='proximal' has only a soft constraint: use lam_scaling='graph' or 'largest'"
            )
        if not math.isfinite(gain):
            raise ValueError(f"gain must be finite, got {gain}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")
        self.dim, self.heads, self.head_width = dim, heads, dim if head_width is None else head_width
        self.mode, self.friction, self.lam, self.lam_scaling = mode, friction, lam, lam_scaling
        self.alpha, self.qk_norm, self.dropout, self.solver = alpha, qk_norm, dropout, solver
        self.adjacency, self.attention, self.gain = adjacency, attention, gain

        inner = heads * self.head_width
        self.value = nn.Linear(dim, inner)
        self.out = nn.Linear(inner, dim)
        self.norm = nn.LayerNorm(dim) if norm else None
        if attention:
            self.query, self.key = nn.Linear(dim, inner), nn.Linear(dim, inner)
            if mode == "sfi":
                self.raw_lam_factor = nn.Parameter(torch.empty(()))
                if friction == "learned":
                    self.friction_query, self.friction_key = nn.Linear(dim, inner), nn.Linear(dim, inner)
            if adjacency:
                self.raw_gamma = nn.Parameter(torch.empty(()))
        if lam_scaling == "largest":
            self.register_buffer("largest", torch.zeros((), dtype=torch.int64))
        # A friction of one's own comes as it is.
        self._begin(module for module in self.children() if module is not friction)

    def reset_parameters(self) -> None:
        self._begin(self.children())

    def _begin(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            reset(module)
        if self.norm is not None:
            nn.init.constant_(self.norm.weight, self.gain)
        if self.lam_scaling == "largest":
            self.largest.zero_()
        for name in ("raw_lam_factor", "raw_gamma"):
            if hasattr(self, name):
                nn.init.constant_(getattr(self, name), _SOFTPLUS_ONE)

    @property
    def gamma(self) -> Tensor:
        """γ > 0, the weight of the flows beside the adjacency."""
        return F.softplus(self.raw_gamma)

    @property
    def lam_factor(self) -> Tensor:
        """The learnable factor of λ*."""
        return F.softplus(self.raw_lam_factor)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        ptr: Tensor,
        *,
        max_nodes: int | None = None,
        adjacency: Adjacency | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """[nodes, dim] → [nodes, dim].

        Args:
            x: node features.
            edge_index: edges [2, E], source above target, as PyG has them.
            ptr: where each graph starts, [graphs + 1].
            max_nodes: size of the largest graph, if known.
            adjacency: Ã, if already made from ``edge_index``: a stack of layers needs it only once.
            sizes: what `graph_sizes` makes of ``ptr``, likewise.
        """
        require_nodes(x, self.dim)
        ptr = as_offsets(ptr)
        if not is_plain(self.out):
            return self._as_written(x, edge_index, ptr, max_nodes, adjacency, sizes)
        in_kernel = self._ends_in_kernel(x)
        width = wide_head(self.head_width, x)
        weight, bias = joined([self.out], x, in_parts=self.heads, in_width=width, bias_elsewhere=in_kernel)
        if not self.attention:
            values = by_parts(x, [self.value], self.heads, width=width).flatten(1)
            out = self._along_edges(F.linear(values, weight), edge_index, adjacency) + bias
        else:
            scores, values = self._scores_and_values(x)
            flowed = self._flow(x, scores, values, ptr, max_nodes, sizes).flatten(1)
            if self.adjacency:
                near = self._along_edges(product(values.flatten(1), weight), edge_index, adjacency)
                far = product(flowed, weight)
                if in_kernel and self.norm is not None:
                    from sfiformer.attention.kernels.mixing import mixed_norm

                    vectors = (self.out.bias, self.norm.weight, self.norm.bias)
                    return mixed_norm(near, far, self.raw_gamma, *vectors, self.norm.eps)
                gamma = self.gamma
                out = torch.lerp(near, far, (gamma / (1 + gamma)).to(near.dtype)) + bias
            else:
                out = F.linear(flowed, weight, bias)
        out = resized(out, self.dim)
        return out if self.norm is None else self.norm(out)

    def _as_written(
        self,
        x: Tensor,
        edge_index: Tensor,
        ptr: Tensor,
        max_nodes: int | None,
        adjacency: Adjacency | None,
        sizes: Tensor | None,
    ) -> Tensor:
        """The equation from the inside out, for an output layer that is more than its weight and bias."""
        if self.attention:
            scores, values = self._scores_and_values(x)
            mixed = far = self._heads(self._flow(x, scores, values, ptr, max_nodes, sizes))
        else:
            values = by_parts(x, [self.value], self.heads)[:, 0]
        if self.adjacency:
            mixed = near = self._along_edges(self._heads(values), edge_index, adjacency)
            if self.attention:
                mixed = torch.lerp(near, far, (self.gamma / (1 + self.gamma)).to(near.dtype))
        out = self.out(mixed)
        return out if self.norm is None else self.norm(out)

    def _heads(self, x: Tensor) -> Tensor:
        """Heads side by side, without padding: [nodes, heads, …] → [nodes, heads · head_width]."""
        return x[..., : self.head_width].flatten(1)

    def _ends_in_kernel(self, x: Tensor) -> bool:
        """What follows the products is one kernel for parameters in float32, and for rows that stay on chip."""
        whole = self.attention and self.adjacency and self.norm is not None
        fits = kernels.usable(x) and wide(self.dim, x) <= kernels.MAX_DIM
        return whole and fits and self.raw_gamma.dtype == torch.float32

    def flows(self, x: Tensor, ptr: Tensor) -> list[Tensor]:
        """The flows Z of every graph, a list of [heads, n, n]: row i says where node i draws its unit from."""
        require_nodes(x, self.dim)
        ptr = as_offsets(ptr)
        (q, k, qf, kf), values = self._scores_and_values(x)
        _, flows = sfi_attention(
            q,
            k,
            values,
            qf,
            kf,
            ptr,
            return_flows=True,
            scale=self.scale * self._share(q),
            **self.strengths(ptr, x)._asdict(),
        )
        return flows

    def _flow(
        self,
        x: Tensor,
        scores: Scores,
        values: Tensor,
        ptr: Tensor,
        max_nodes: int | None,
        sizes: Tensor | None,
    ) -> Tensor:
        q, k, q_friction, k_friction = scores
        options: dict[str, Any] = {
            "scale": self.scale * self._share(q),
            "dropout_p": self.dropout if self.training else 0.0,
            "max_nodes": max_nodes,
        }
        if self.mode == "dfi":
            return dfi_attention(q, k, values, ptr, **options)
        strengths = ahead(
            x,
            lambda: self.strengths(ptr, x, sizes, learn=True).for_each(ptr.shape[0] - 1),
            self.raw_lam_factor,
            uses=(ptr, sizes),
        )
        options |= strengths._asdict()
        return sfi_attention(q, k, values, q_friction, k_friction, ptr, **options)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.head_width**-0.5

    def scores(self, x: Tensor) -> Scores:
        """What the scores of both kinds are made of, normalised but not scaled; without friction its pair is 0.

        Heads are padded with zeros where the device likes another width.
        """
        require_nodes(x, self.dim)
        parts, _ = self._scores_and_values(x)
        factor = self._share(parts.q) ** 0.5
        return parts if factor == 1 else Scores(*(part * factor for part in parts))

    def _scores_and_values(self, x: Tensor) -> tuple[Scores, Tensor]:
        """All projections of x, as one product."""
        learned = self.mode == "sfi" and self.friction == "learned"
        pairs = [self.query, self.key, *([self.friction_query, self.friction_key] if learned else [])]
        width = wide_head(self.head_width, x)
        packed = by_parts(x, [*pairs, self.value], self.heads, width=width)  # [nodes, 3 or 5, heads, width]
        *parts, values = split_heads(packed, len(pairs) if self.qk_norm else 0, self._eps(packed))
        if learned:
            return Scores(*parts), values
        q, k = parts
        if self.mode == "dfi":
            nothing = torch.zeros((), dtype=q.dtype, device=q.device).expand_as(q)
            return Scores(q, k, nothing, nothing), values
        if self.friction == "tied":
            return Scores(q, k, -q, k), values
        assert callable(self.friction)
        pair = as_pair(self.friction(x), (len(x), self.heads, self.head_width))
        of_friction = torch.stack([widened(part, q.shape[-1]) for part in pair], dim=1)
        q_friction, k_friction = split_heads(of_friction, 2 if self.qk_norm else 0, self._eps(q))
        return Scores(q, k, q_friction, k_friction), values

    def _eps(self, x: Tensor) -> float:
        """Of the root mean square over a head, zero columns and all. Half precision's own would be no small number there.

        Zero columns should not count: that makes a factor √share of queries and of keys, left to the scale of their scores.
        """
        return self._share(x) * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps

    def _share(self, x: Tensor) -> float:
        """The share of a head's columns that are not padding, where it is normalised (else 1)."""
        return self.head_width / x.shape[-1] if self.qk_norm else 1.0

    def strengths(
        self, ptr: Tensor, x: Tensor, sizes: Tensor | None = None, *, learn: bool = False
    ) -> Strengths:
        """λ, α, scaling and solver of a batch; without friction λ = 0 and α = ∞. Only what is learnt from changes N*."""
        if self.mode == "dfi":
            return Strengths(0.0, math.inf, "absolute", "exact")
        strength = self.lam * self.lam_factor
        if self.lam_scaling == "potential":
            return Strengths(strength, math.inf, "potential", self.solver)
        if self.lam_scaling == "largest":
            largest = self._largest(ptr.diff(), learn).clamp(min=1)
            sizes = largest.to(torch.promote_types(x.dtype, torch.float32))
        elif sizes is None:
            sizes = graph_sizes(ptr, x.dtype)
        return Strengths(strength / sizes, self.alpha, "absolute", self.solver)

    def _largest(self, sizes: Tensor, learn: bool) -> Tensor:
        """N* for every graph: of the batch in training; in evaluation the largest of training, if there was any."""
        here = torch.cat([sizes, sizes.new_zeros(1)]).amax()
        if self.training:
            if self.across_ranks:
                here = ranks.largest(here)
            if learn:
                self.largest.copy_(torch.maximum(self.largest, here))
        return (here if self.training else torch.where(self.largest > 0, self.largest, here)).expand_as(sizes)

    def _along_edges(self, y: Tensor, edge_index: Tensor, adjacency: Adjacency | None) -> Tensor:
        return (adjacency or Adjacency.of(edge_index, y.shape[0], y.dtype)).matmul(y)

    def extra_repr(self) -> str:
        parts = [f"{self.dim}, heads={self.heads}, mode={self.mode!r}"]
        if self.head_width != self.dim:
            parts.append(f"head_width={self.head_width}")
        if self.mode == "sfi" and self.attention:
            parts.append(f"lam={self.lam}, lam_scaling={self.lam_scaling!r}")
            if self.lam_scaling != "potential":
                parts.append(f"alpha={self.alpha}")
        parts += [
            f"{name}=False" for name in ("adjacency", "attention", "qk_norm") if not getattr(self, name)
        ]
        return ", ".join(parts)
