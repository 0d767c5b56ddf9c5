"""Work on batches as CUDA graphs: captured once for each shape of a batch, replayed ever after.

On graphs of this size an ordinary step waits for Python and the driver most of the time: thousands of kernels of a few
microseconds each. A CUDA graph launches all of them at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfiformer import ranks
from sfiformer.attention import kernels
from sfiformer.config import ExperimentConfig
from sfiformer.data.batch import GraphBatch
from sfiformer.data.gather import gather
from sfiformer.data.shapes import BatchShape, Ladder
from sfiformer.data.store import GraphStore
from sfiformer.data.task import Task

Work = Callable[[Sequence[GraphBatch]], tuple[Tensor, ...]]
WARM_UPS = (
    2  # plain runs of a shape before it is captured: libraries and kernels prepare themselves in the first
)


def replayable(config: ExperimentConfig, task: Task, stores: Mapping[str, GraphStore]) -> bool:
    """Whether all the work of a run can be captured: on one GPU that holds the data, by operators that never wait.

    Plain attention waits, so does dense attention on large graphs, and so do the layers of PyG. Links are left out: their
    negatives are drawn on the host.
    """
    model, largest = config.model, max(int(store.node_ptr.diff().max()) for store in stores.values())
    on_gpu = all(store.device.type == "cuda" for store in stores.values())
    fused = on_gpu and all(kernels.has_room(store.device) for store in stores.values())
    fused = fused and kernels.HAS_TRITON and model.solver == "exact"
    fused = fused and (largest <= kernels.MAX_NODES or model.attention == "sfi")
    fused = fused and model.dim <= kernels.MAX_WIDTH
    return (
        config.trainer.capture
        and ranks.count() == 1
        and on_gpu
        and task.kind != "ranking"
        and model.local in ("gatedgcn", "none")
        and (fused or model.attention in ("adjacency", "none"))
    )


class Replay:
    """`work(batches)` on batches of a store that lies on the GPU, padded to a few shapes (`Ladder`).

    The graphs of a batch are gathered inside the captured work, so that all the host sends are their numbers. Runs before the
    capture are ordinary ones, with all their effects. Work must neither wait for the device nor depend on its values, and
    padding must not change what it does.

    Works that never run at once, such as the steps of a run and its evaluation, can have the memory of captures in common.
    """

    def __init__(
        self, store: GraphStore, batch_size: int, work: Work, memory: "Memory | None" = None
    ) -> None:
        self.store, self.work, self.memory = store, work, memory or Memory()
        self.ladder = Ladder(store, batch_size)
        self._runs: dict[tuple[BatchShape, ...], int] = {}
        self._captured: dict[tuple[BatchShape, ...], _Captured] = {}

    def __call__(self, parts: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
        """What the work gives for the graphs with these numbers, a batch for each part."""
        shapes, sent = self._sent(parts)
        if not all(shape.filler for shape in shapes):  # of a shape that hardly comes twice
            return self._plainly(shapes, sent)
        if shapes not in self._captured:
            self._runs[shapes] = self._runs.get(shapes, 0) + 1
            if self._runs[shapes] <= WARM_UPS:
                return self._plainly(shapes, sent)
            self._captured[shapes] = _Captured(
                lambda static: self._plainly(shapes, static), sent, self.memory
            )
        return self._captured[shapes](sent)

    def batches(self, parts: Sequence[np.ndarray]) -> list[GraphBatch]:
        """The batches that the work is given for these graphs."""
        return self._gathered(*self._sent(parts))

    def _sent(self, parts: Sequence[np.ndarray]) -> tuple[tuple[BatchShape, ...], Tensor]:
        """The shapes that the parts are padded to, and the numbers of all their graphs on the device."""
        shapes = self.ladder.shapes(parts)
        ids = np.concatenate([shape.slots(part) for shape, part in zip(shapes, parts, strict=True)])
        return shapes, torch.from_numpy(ids).pin_memory().to(self.store.device, non_blocking=True)

    def _gathered(self, shapes: Sequence[BatchShape], ids: Tensor) -> list[GraphBatch]:
        slots = ids.split([shape.graphs for shape in shapes])
        return [gather(self.store, mine, shape) for mine, shape in zip(slots, shapes, strict=True)]

    def _plainly(self, shapes: Sequence[BatchShape], ids: Tensor) -> tuple[Tensor, ...]:
        return self.work(self._gathered(shapes, ids))


class _Captured:
    """A function of one tensor as a CUDA graph."""

    def __init__(
        self, function: Callable[[Tensor], tuple[Tensor, ...]], example: Tensor, memory: "Memory"
    ) -> None:
        self.input = example.clone()
        self.graph = torch.cuda.CUDAGraph()
        with memory.captures(self.graph):
            self.outputs = function(self.input)

    def __call__(self, value: Tensor) -> tuple[Tensor, ...]:
        self.input.copy_(value)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)  # the next graph overwrites them


class Memory:
    """Where captures lie, each on top of the others: they run one after the other."""

    def __init__(self) -> None:
        self._pool: Any = None  # a handle, as `torch.cuda.graph` takes it

    @contextmanager
    def captures(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What is launched in here goes into the graph.

        cuBLAS keeps a work space of 32 MiB for each stream and thread that it has been used on. Those of plain work are given
        back before a capture, which has streams of its own, and the capture's own after it, for the next to lie on.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()
