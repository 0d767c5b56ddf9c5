"""One layer of the model: local message passing beside global attention, then a feed-forward block."""

from torch import Tensor, nn

from sfiformer.attention import SFiAttention
from sfiformer.attention.dropout import Dropout
from sfiformer.attention.widths import has_hooks, linear, resized
from sfiformer.branches import Branches
from sfiformer.flow import Proximal
from sfiformer.nn.config import ModelConfig
from sfiformer.nn.gated_gcn import ACTIVATIONS
from sfiformer.nn.hidden import hidden_linear
from sfiformer.nn.local import make_local
from sfiformer.nn.norms import add_and_norm, make_norm
from sfiformer.nn.partition import Structure


def make_attention(config: ModelConfig) -> SFiAttention:
    """The attention that `config.attention` names."""
    head_width = None if config.head_width == "full" else config.head_dim
    if config.attention == "softmax":
        return SFiAttention(
            config.dim,
            config.heads,
            mode="dfi",
            head_width=head_width,
            adjacency=False,
            qk_norm=False,
            norm=False,
            dropout=config.attention_dropout,
        )
    return SFiAttention(
        config.dim,
        config.heads,
        mode="sfi" if config.attention == "sfi" else "dfi",
        head_width=head_width,
        adjacency=config.adjacency or config.attention == "adjacency",
        attention=config.attention != "adjacency",
        friction=config.friction,
        lam=config.lam,
        lam_scaling=config.lam_scaling,
        alpha=config.alpha,
        qk_norm=config.qk_norm,
        gain=config.attention_gain,
        dropout=config.attention_dropout,
        solver=Proximal(config.proximal_iterations) if config.solver == "proximal" else "exact",
    )


class FeedForward(nn.Sequential):
    """Linear, activation, dropout, Linear, at widths that the device likes: what is 0 stays 0 on the way."""

    def forward(self, x: Tensor) -> Tensor:
        first, activation, dropout, last = self
        hidden = linear(x, first)
        if type(dropout) is Dropout and not has_hooks(dropout):
            out = hidden_linear(hidden, last, activation, dropout.p, dropout.training)
        else:
            out = linear(dropout(activation(hidden)), last)
        return resized(out, x.size(1))


def make_feed_forward(config: ModelConfig) -> FeedForward:
    """The feed-forward block of a layer."""
    wide = 2 * config.dim
    activation, dropout = ACTIVATIONS[config.activation](), Dropout(config.dropout)
    return FeedForward(nn.Linear(config.dim, wide), activation, dropout, nn.Linear(wide, config.dim))


class GPSLayer(nn.Module):
    """Post-norm GPS layer (Rampášek et al., 2022).

        x_local = norm(local(x, e))                     (the residual is part of local)
        x_global = norm(x + dropout(attention(x)))      (without x, for residual: false)
        h = x_local + x_global
        x ← norm(h + dropout(FFN(h))),     FFN = Linear(d, 2d), act, dropout, Linear(2d, d)

    With one of the two left out, h is the other; with both, h = x. With feed_forward: false, x ← h.
    """

    def __init__(self, config: ModelConfig, *, last: bool = False) -> None:
        super().__init__()
        dim = config.dim
        self.dropout, self.residual = config.dropout, config.residual
        self.local = make_local(config, last=last) if config.local != "none" else None
        self.local_norm = make_norm(config.norm, dim) if config.local != "none" else None
        self.attention = make_attention(config) if config.attention != "none" else None
        self.attention_norm = make_norm(config.norm, dim) if config.attention != "none" else None
        self.feed_forward = make_feed_forward(config) if config.feed_forward else None
        self.norm = make_norm(config.norm, dim) if config.feed_forward else None

    def forward(self, x: Tensor, e: Tensor | None, structure: Structure) -> tuple[Tensor, Tensor | None]:
        """x [N, d], e [E, d] → new x, new e."""
        edge_index, graphs, adjacency, distance, order, real_edges, sizes, _ = structure
        h: Tensor | None = None
        update: Tensor | None = None
        branches = Branches("message passing", x)  # message passing beside attention
        if self.local is not None and self.local_norm is not None:
            known = (distance, *(order or ()), graphs.real_nodes, real_edges)
            with branches.next(x, e, edge_index, *known):
                local, e = self.local(x, e, edge_index, distance, order, graphs.real_nodes, real_edges)
                h = self.local_norm(local, graphs)
        if self.attention is not None:
            update = self.attention(
                x, edge_index, graphs.ptr, max_nodes=graphs.max_nodes, adjacency=adjacency, sizes=sizes
            )
        branches.join(h, e)
        if self.attention_norm is not None and update is not None:
            old = x if self.residual else None
            h = add_and_norm(self.attention_norm, old, update, graphs, dropout=self.dropout, residual=h)
        h = x if h is None else h
        if self.feed_forward is None or self.norm is None:
            return h, e
        return add_and_norm(self.norm, h, self.feed_forward(h), graphs, dropout=self.dropout), e
