"""What a model did with one graph: enough to solve every layer's flows again, draw them, and change λ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sfiformer.attention import Adjacency, SFiAttention
from sfiformer.data.batch import GraphBatch
from sfiformer.data.smiles import ATOM_SIZES
from sfiformer.data.task import Task
from sfiformer.errors import UserError
from sfiformer.explain.molecule import SYMBOLS
from sfiformer.flow import Proximal, flows_from_scores
from sfiformer.flow.problem import Scaling, Solver
from sfiformer.nn.model import SFiFormer

Split = Literal["train", "val", "test"]
Checkpoint = Literal["best", "last"]


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """What one attention layer saw and how strongly friction acts, for one graph of n nodes.

    With s = scale · q·k and u = scale · q̃·k̃ its flows are those of least energy under r = softmax(−s) and
    f = softmax(u). A dense layer (dfi, softmax) has no friction: λ = 0, α = ∞, q̃ = k̃ = 0.
    """

    q: Tensor  # [n, heads, width] float32, normalised where the layer normalises, not scaled; so are the next three
    k: Tensor
    q_friction: Tensor
    k_friction: Tensor
    scale: float
    lam: float  # λ as used for this graph; λ* itself where the scaling is "potential"
    lam_star: float  # λ* with its learned factor
    alpha: float  # may be inf
    scaling: Scaling
    gamma: float | None  # weight of the flows beside Ã; None where there is no Ã
    solver: Solver = "exact"  # the model's own

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def dense(self) -> bool:
        """Whether there is no friction, and so no flow is zero."""
        return self.lam == 0

    def scores(self) -> tuple[Tensor, Tensor]:
        """s and u, [heads, n, n] each: a row for each query, a column for each key."""
        q, k, q_friction, k_friction = (
            x.transpose(0, 1) for x in (self.q, self.k, self.q_friction, self.k_friction)
        )
        return q @ k.mT * self.scale, q_friction @ k_friction.mT * self.scale

    def resistance(self) -> Tensor:
        """r = softmax(−s), [heads, n, n]."""
        return (-self.scores()[0]).softmax(-1)

    def friction(self) -> Tensor:
        """f = softmax(u), [heads, n, n]."""
        return self.scores()[1].softmax(-1)

    def flows(self, lam: float | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The exact flows Z, [heads, n, n]: row i says where node i draws its unit from.

        Args:
            lam: another λ (λ* where the scaling is "potential") than the record's.
            dtype: that the scores are solved in; in float64 no flow is so small that it reads as zero.
        """
        return self._solve(lam, "exact", dtype)

    def attention(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The flows as the model itself makes them, [heads, n, n]: exact ones, or those of its iteration."""
        return self._solve(None, self.solver, dtype)

    def proximal(self, iterations: int) -> Tensor:
        """The paper's iteration stopped after so many steps, [heads, n, n]; each head for itself.

        Raises:
            ValueError: where the constraint is hard (α = ∞, or scaling "potential"): there is no penalty to descend.
        """
        return self._solve(None, Proximal(iterations), torch.float32)

    @property
    def has_proximal(self) -> bool:
        """Whether the paper's iteration is defined for this layer."""
        return self.scaling == "absolute" and math.isfinite(self.alpha)

    def _solve(self, lam: float | None, solver: Solver, dtype: torch.dtype) -> Tensor:
        s, u = (x.to(dtype) for x in self.scores())
        lam = self.lam if lam is None else lam
        return flows_from_scores(s, u, lam=lam, alpha=self.alpha, scaling=self.scaling, solver=solver)


@dataclass(frozen=True, eq=False)
class GraphRecord:
    """One graph, what every attention layer of a model did with it, and what the model said."""

    name: str  # such as "val[17]"
    num_nodes: int
    edge_index: Tensor  # [2, E] source above target
    adjacency: Tensor  # Ã [n, n]
    layers: list[LayerRecord]
    outputs: Tensor  # [rows, outputs] raw: `sfiformer.data.decode` says them in the user's terms
    target: Tensor | None
    task: Task
    node_labels: list[str] | None = None  # atom symbols, where the nodes are atoms
    positions: Tensor | None = None  # [n, 2] to the right and down, where nodes have a place of their own
    smiles: str | None = None  # where known
    atoms: Tensor | None = None  # [n, 9] the Open Graph Benchmark's atom features, where the nodes are atoms
    bonds: Tensor | None = None  # [E, 3] and its bond features
    id: str | None = None  # what the user calls the graph

    @property
    def title(self) -> str:
        """Its name and, where it has one, the user's own."""
        return self.name if self.id is None else f"{self.name}, id {self.id}"

    def combined(self, layer: int) -> Tensor:
        """What a layer (numbered from 0) mixes values by, [heads, n, n]: (Ã + γZ)/(1 + γ), or Z where Ã takes no part."""
        flows, gamma = self.layers[layer].attention(), self.layers[layer].gamma
        return flows if gamma is None else (self.adjacency + gamma * flows) / (1 + gamma)


@torch.no_grad()
def record(
    model: SFiFormer,
    batch: GraphBatch,
    *,
    task: Task,
    name: str = "graph",
    positions: Tensor | None = None,
    smiles: str | None = None,
    id: str | None = None,
) -> GraphRecord:
    """Run the model, in evaluation mode, on a batch of one graph and keep what its attention saw.

    Args:
        model: any with attention; its mode is left as it was.
        batch: one graph as the model takes it, with encodings and standardised features.
        task: what the outputs mean.
        name: of the graph.
        positions: [n, 2], where the nodes have a place of their own.
        smiles: where the graph is a molecule and it is known.
        id: what the user calls the graph.
    """
    if batch.num_graphs != 1 or batch.num_nodes == 0:
        raise ValueError(f"a record is of one graph with nodes, but the batch is {batch!r}")
    attentions = attention_layers(model)
    inputs: dict[SFiAttention, Tensor] = {}

    def keep(layer: SFiAttention, given: tuple[Tensor, ...]) -> None:
        inputs[layer] = given[0].float()

    hooks = [layer.register_forward_pre_hook(keep) for layer in attentions]
    training = model.training
    try:
        outputs = model.eval()(batch).float().cpu()
        layers = [_layer(layer, inputs[layer], batch.ptr) for layer in attentions]
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    adjacency = Adjacency.of(batch.edge_index, batch.num_nodes)
    molecular = model.config.node_encoder == "atom" or model.config.node_categories == ATOM_SIZES
    atoms = batch.x.cpu() if molecular else None
    target = batch.fields.get("edge_label" if task.level == "link" else "y")
    return GraphRecord(
        name=name,
        num_nodes=batch.num_nodes,
        edge_index=batch.edge_index.cpu(),
        adjacency=adjacency.matmul(torch.eye(batch.num_nodes, device=batch.device)).cpu(),
        layers=layers,
        outputs=outputs,
        target=None if target is None else target.cpu(),
        task=task,
        node_labels=None if atoms is None else [SYMBOLS[number] for number in atoms[:, 0].tolist()],
        positions=positions,
        smiles=smiles,
        atoms=atoms,
        bonds=batch.edge_attr.cpu() if molecular and batch.edge_attr is not None else None,
        id=id,
    )


def attention_layers(model: SFiFormer) -> list[SFiAttention]:
    """The layers whose flows can be looked at, in order.

    Raises:
        UserError: where there are none.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, SFiAttention) and layer.attention]
    if not layers:
        raise UserError(
            f"the model has attention: {model.config.attention}, so there are no flows to look at; "
            "train one with attention sfi, dfi or softmax"
        )
    return layers


def record_run(
    run: str | Path,
    graph: int | str,
    split: Split = "test",
    checkpoint: Checkpoint = "best",
    data: str | Path | None = None,
    *,
    skip_bad: bool = False,
    smiles_column: str | None = None,
) -> GraphRecord:
    """The record of one graph of a run's data.

    Args:
        run: a run folder of `sfiformer.train`.
        graph: its number in the split, from 0, or its id.
        split: of the run's own data.
        checkpoint: which weights.
        data: another place of the run's data (a folder), or a file of graphs, which are all of one split.
        skip_bad, smiles_column: of that file, as for `sfiformer.evaluate`.
    """
    from sfiformer.explain.runs import ExplainedRun

    opened = ExplainedRun(
        run, split=split, checkpoint=checkpoint, data=data, skip_bad=skip_bad, smiles_column=smiles_column
    )
    return opened.record(graph)


def _layer(layer: SFiAttention, x: Tensor, ptr: Tensor) -> LayerRecord:
    q, k, q_friction, k_friction = (part.float().cpu() for part in layer.scores(x))
    lam, alpha, scaling, solver = layer.strengths(ptr, x)
    return LayerRecord(
        q,
        k,
        q_friction,
        k_friction,
        scale=layer.scale,
        lam=float(lam),
        lam_star=0.0 if layer.mode == "dfi" else float(layer.lam * layer.lam_factor),
        alpha=float(alpha),
        scaling=scaling,
        gamma=float(layer.gamma) if layer.adjacency else None,
        solver=solver,
    )
