"""The training loops to compare: ours, and an ordinary one of PyG."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.profiler import record_function
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GPSConv, ResGatedGraphConv, global_mean_pool

from breakdown import DATA
from sfiformer.data.shapes import BatchShape
from sfiformer.nn.config import ModelConfig
from sfiformer.nn.encoders import LapPE
from sfiformer.nn.features import (
    ATOM_VOCABULARY,
    BOND_VOCABULARY,
    ConstantEncoder,
    EmbeddingSum,
    LinearEncoder,
)
from sfiformer.nn.heads import MLP
from sfiformer.nn.model import SFiFormer
from sfiformer.nn.partition import Partition
from sfiformer.training.compiling import rehearse
from sfiformer.training.distributed import make_fabric
from sfiformer.training.launch import make_optimizer
from sfiformer.training.preparation import objective
from sfiformer.training.replay import WARM_UPS, Replay
from sfiformer.training.sampling import Stream, derived_seed, epoch_order, in_batches
from sfiformer.training.step import Step
from sfiformer.training.trainer import on_device, read_every
from training_graphs import Problem

ORDERS = 3  # different orders of the graphs; epochs take turns with them


class Loop(ABC):
    """A model and all that it takes to train it."""

    model: nn.Module

    @abstractmethod
    def epoch(self, number: int, steps: int | None = None) -> None:
        """One pass over the graphs, or its first steps."""

    def warm_up(self, steps: int | None) -> None:
        """Whatever happens at first only: kernels are compiled, memory is asked for, graphs are captured."""
        self.epoch(0, steps)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


class Ours(Loop):
    """The project's own training step, as `Trainer` does it; on a GPU captured, unless told not to."""

    def __init__(
        self, problem: Problem, model: ModelConfig, device: torch.device, *, capture: bool = True
    ) -> None:
        config = replace(problem.config, model=model)
        fabric = make_fabric(config.trainer)
        fabric.launch()
        torch.manual_seed(0)
        self.model = SFiFormer(config.model).to(device).train()
        loss, _ = objective(config, problem.task)
        self.step = Step(
            fabric, self.model, make_optimizer(self.model, config), loss, problem.task, config.optim.clip_norm
        )
        self.store, self.batch_size = (
            on_device({"train": problem.store}, device)["train"],
            config.data.batch_size,
        )
        self.captured = capture and device.type == "cuda"
        self.replay = Replay(
            self.store,
            self.batch_size,
            lambda batches: (self.step(batches),),
            structure=self.model.structure,
        )
        self.patience = read_every(device)

    def epoch(self, number: int, steps: int | None = None) -> None:
        number %= ORDERS
        unread, read_at = [], time.perf_counter()
        orders = self._orders(number)[:steps]
        for index, graphs in enumerate(orders):
            torch.manual_seed(derived_seed(0, Stream.STEP, number, index))
            then = orders[index + 1 : index + 2] or None
            unread.append(self.replay([graphs], then)[0] if self.captured else self._plainly(graphs))
            if time.perf_counter() - read_at >= self.patience:
                torch.cat(unread).tolist()
                unread, read_at = [], time.perf_counter()
        if unread:
            torch.cat(unread).tolist()

    def warm_up(self, steps: int | None) -> None:
        """Goes through every epoch that will be measured, until all shapes of batches are captured."""
        if not self.captured:
            return super().warm_up(steps)
        rehearse(self.model, {"step": (self.replay, self._orders(0)[0])}, self.step.fabric.autocast)
        for number in range(ORDERS * (WARM_UPS + 1)):
            self.epoch(number)

    def padded(self, steps: int) -> None:
        """The same work as in a captured step, launched kernel by kernel, so that a profiler sees what belongs where."""
        for graphs in self._orders(0)[:steps]:
            shape = self.replay.ladder.shape(graphs) if self.captured else None
            self._plainly(graphs, shape)

    def _plainly(self, graphs: np.ndarray, shape: BatchShape | None = None) -> Tensor:
        with record_function(DATA):
            batch = self.store.batch(graphs, shape)
        return self.step([batch])

    def _orders(self, number: int) -> list[np.ndarray]:
        return list(in_batches(epoch_order(len(self.store), 0, number), self.batch_size))


class PyG(Loop):
    """An ordinary loop: DataLoader, AdamW, clipped gradients, the loss read at every step."""

    def __init__(self, problem: Problem, device: torch.device, *, workers: int = 0) -> None:
        config, self.device = problem.config, device
        torch.manual_seed(0)
        self.model = GPS(config.model).to(device).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay
        )
        self.loss, _ = objective(config, problem.task)
        self.clip_norm, self.half = config.optim.clip_norm, config.trainer.precision == "bf16-mixed"
        self.loader = DataLoader(
            problem.store.to_pyg(),
            batch_size=config.data.batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

    def epoch(self, number: int, steps: int | None = None) -> None:
        batches, total = iter(self.loader), 0.0
        for _ in range(len(self.loader) if steps is None else steps):
            with record_function(DATA):
                batch = next(batches).to(self.device)
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                outputs = self.model(batch)
            loss = self.loss(outputs.float(), batch.y)
            loss.backward()
            clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            total += loss.item() * batch.num_graphs


class GPS(nn.Module):
    """A preset's model from PyG's parts: GPSConv with softmax attention and ResGatedGraphConv.

    Encoders and head are the very modules of our model. ESLapPE, which gates messages in ours, is added to the
    node features here: less work, since PyG's convolution takes no such gate.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = self.dim = (
            -(-config.dim // config.heads) * config.heads
        )  # 236 in place of 235: heads must divide it
        assert config.outputs is not None
        pe_dim = config.pe_dim if config.pe == "lappe" else 0
        self.node, self.edge = _encoder(config, "node", dim - pe_dim), _encoder(config, "edge", dim)
        self.pe, self.level = config.pe, config.head
        self.position = LapPE(pe_dim) if pe_dim else LinearEncoder(config.pe_size, dim, "eslappe_vectors")
        self.layers = nn.ModuleList(
            GPSConv(
                dim,
                ResGatedGraphConv(dim, dim, edge_dim=dim),
                heads=config.heads,
                dropout=config.dropout,
                act=config.activation,
                attn_type="multihead",
                attn_kwargs={"dropout": config.attention_dropout},
            )
            for _ in range(config.layers)
        )
        self.head = MLP(
            dim,
            config.outputs,
            config.head_layers,
            activation=config.head_activation,
            dropout=config.head_dropout,
            l2norm=config.head_l2norm,
        )

    def forward(self, batch) -> Tensor:
        x = self.node(batch.x)  # [N, d]
        constant = isinstance(self.edge, ConstantEncoder)
        e = self.edge(batch.num_edges if constant else batch.edge_attr)  # [E, d]
        if self.pe == "lappe":
            graphs = Partition(batch.batch, batch.ptr, batch.num_graphs, 0)
            x = torch.cat([x, self.position(batch.lappe_vectors, batch.lappe_values, graphs)], dim=1)
        else:
            x = x + self.position(batch.eslappe_vectors)
        for layer in self.layers:
            x = layer(x, batch.edge_index, batch.batch, edge_attr=e)
        return self.head(x if self.level == "node" else global_mean_pool(x, batch.batch, batch.num_graphs))


def _encoder(config: ModelConfig, kind: str, dim: int) -> nn.Module:
    field, encoder = {"node": "x", "edge": "edge_attr"}[kind], getattr(config, f"{kind}_encoder")
    if encoder == "constant":
        return ConstantEncoder(dim)
    if encoder == "linear":
        return LinearEncoder(getattr(config, f"{kind}_features"), dim, field)
    return EmbeddingSum({"atom": ATOM_VOCABULARY, "bond": BOND_VOCABULARY}[encoder], dim, field)
