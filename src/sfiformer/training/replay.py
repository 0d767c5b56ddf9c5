"""Work on batches as CUDA graphs: captured once for each shape of a batch, replayed ever after.

On graphs of this size an ordinary step waits for Python and the driver most of the time: thousands of kernels of a few
microseconds each. A CUDA graph launches all of them at once. Gathering the graphs of a batch is another such graph, which runs
beside the work on the batch before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfiformer.data.batch import GraphBatch
from sfiformer.data.gather import gather
from sfiformer.data.shapes import BatchShape, Ladder
from sfiformer.data.store import GraphStore
from sfiformer.training.buffers import ALIGNED, BatchBuffer, room

Parts = Sequence[np.ndarray]  # numbers of graphs, a batch of them each
Work = Callable[[Sequence[GraphBatch]], tuple[Tensor, ...]]
# Plain runs of a shape before it is captured: libraries and kernels prepare themselves in the first.
WARM_UPS = 2


class Replay:
    """`work(batches)` on batches of a store that lies on the GPU, padded to a few shapes (`Ladder`).

    All that the host sends are the numbers of graphs. Runs before the capture are ordinary ones, with all their effects. Work
    must neither wait for the device nor depend on its values, and padding must not change what it does.

    Args:
        draw: what each batch is made into with the seed of its part, by hashes: random numbers would be taken from the work.
        structure: what a batch is given ahead of the work (`GraphBatch.structured`): that of a model which is to see it.
        never_waits: of a shape, whether the work is one of which a CUDA graph can be made; where it is not it is done plainly.
        memory: works that never run at once, such as the steps of a run and its evaluation, can have it in common.
    """

    def __init__(
        self,
        store: GraphStore,
        batch_size: int,
        work: Work,
        *,
        draw: Callable[[GraphBatch, Tensor], GraphBatch] | None = None,
        structure: Callable[[GraphBatch], tuple[Any, ...]] | None = None,
        never_waits: Callable[[BatchShape], bool] = lambda shape: True,
        memory: "Memory | None" = None,
    ) -> None:
        self.store, self.work, self.structure, self.memory = store, work, structure, memory or Memory()
        self.draw, self.never_waits = draw, never_waits
        self.ladder = Ladder(store, batch_size)
        self._runs: dict[tuple[BatchShape, ...], int] = {}
        self._buffers: dict[tuple[BatchShape, ...], tuple[Staging, BatchBuffer]] = {}
        self._captured: dict[tuple[BatchShape, ...], _Captured] = {}

    def __call__(
        self,
        parts: Parts,
        then: Parts | None = None,
        *,
        seeds: Sequence[int] = (),
        then_seeds: Sequence[int] = (),
    ) -> tuple[Tensor, ...]:
        """What the work gives for the graphs with these numbers, a batch for each part; to `draw`, a seed each.

        ``then`` are the parts of the next call, as far as is known: they are gathered while the device works on these.
        """
        shapes, ids = self._numbers(parts, seeds)
        # (Without a filler: of a shape that hardly comes twice.)
        if not all(shape.filler and self.never_waits(shape) for shape in shapes):
            return self.work(self._gathered(shapes, self._sent(ids)))
        self._runs[shapes] = self._runs.get(shapes, 0) + 1
        if self._runs[shapes] <= WARM_UPS:
            return self._plainly(shapes, self._sent(ids))
        if shapes not in self._captured:
            gathered = partial(self._gathered, shapes)
            self._captured[shapes] = _Captured(
                gathered, self.work, *self._buffers[shapes], self._sent(ids), self.memory
            )
        outputs = self._captured[shapes](ids)
        if then is not None:
            shapes, ids = self._numbers(then, then_seeds)
            if shapes in self._captured:
                self._captured[shapes].gather(ids)
        return outputs

    def batches(self, parts: Parts, seeds: Sequence[int] = ()) -> list[GraphBatch]:
        """The batches that the work is given for these graphs."""
        shapes, ids = self._numbers(parts, seeds)
        return self._gathered(shapes, self._sent(ids))

    def example(self, graphs: np.ndarray) -> GraphBatch:
        """A batch of these graphs in memory of its own, laid out as the work finds it."""
        gathered = self.batches([graphs], [] if self.draw is None else [0])
        memory = torch.zeros(room(gathered), dtype=torch.uint8, device=self.store.device)
        buffer = BatchBuffer(gathered, memory)
        buffer.fill(gathered)
        return buffer.batches[0]

    def _numbers(self, parts: Parts, seeds: Sequence[int]) -> tuple[tuple[BatchShape, ...], np.ndarray]:
        """The shapes that the parts are padded to, and the numbers of all their graphs, padding graphs included; and seeds."""
        shapes = self.ladder.shapes(parts)
        slots = [shape.slots(part) for shape, part in zip(shapes, parts, strict=True)]
        return shapes, np.concatenate([*slots, np.array(seeds, dtype=np.int64)])

    def _sent(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids).pin_memory().to(self.store.device, non_blocking=True)

    def _gathered(self, shapes: Sequence[BatchShape], ids: Tensor) -> list[GraphBatch]:
        graphs = [shape.graphs for shape in shapes]
        *slots, seeds = ids.split([*graphs, len(ids) - sum(graphs)])
        batches = [gather(self.store, mine, shape) for mine, shape in zip(slots, shapes, strict=True)]
        if self.draw is not None:
            batches = [self.draw(batch, seed) for batch, seed in zip(batches, seeds.unbind(), strict=True)]
        if self.structure is None:
            return batches
        return [batch.structured(self.structure(batch)) for batch in batches]

    def _plainly(self, shapes: tuple[BatchShape, ...], ids: Tensor) -> tuple[Tensor, ...]:
        """The work on tensors that lie where those of the capture will: kernels are compiled for how they lie."""
        gathered = self._gathered(shapes, ids)
        if shapes not in self._buffers:
            staging = self.memory.staging(room(gathered), ids.device)
            self._buffers[shapes] = staging, BatchBuffer(gathered, staging.here)
        _, buffer = self._buffers[shapes]
        buffer.fill(gathered)
        return _own(self.work(buffer.batches))


class _Captured:
    """The work on batches of one shape as a CUDA graph, and the gathering of these as another, on a stream of its own.

    That fills the memory for what comes next, which is copied to where the work looks when it is done with what lies there.
    """

    def __init__(
        self,
        gathered: Callable[[Tensor], list[GraphBatch]],
        work: Work,
        staging: "Staging",
        buffer: BatchBuffer,
        ids: Tensor,
        memory: "Memory",
    ) -> None:
        self.ids, self.side = ids.clone(), memory.side(ids.device)
        self.staging, self.buffer, self.mark = staging, buffer, object()
        self.next = BatchBuffer(buffer.batches, staging.next)
        self.gathering, self.working = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with memory.captures(self.gathering, aside=True):
            self.next.fill(gathered(self.ids))
        with memory.captures(self.working):
            self.outputs = work(buffer.batches)
        for used in (self.ids, self.next.memory):
            used.record_stream(self.side)
        self.side.wait_stream(torch.cuda.current_stream())

    def gather(self, ids: np.ndarray) -> None:
        """Fill the memory for what comes next, beside whatever the device does now.

        (No random numbers: those of the work that runs meanwhile would be theirs.)
        """
        staging = self.staging
        staging.held = None
        with torch.cuda.stream(self.side):
            self.side.wait_event(staging.emptied)
            self.ids.copy_(torch.from_numpy(ids).pin_memory(), non_blocking=True)
            self.gathering.replay()
            staging.filled.record()
        staging.held = self.mark, ids

    def __call__(self, ids: np.ndarray) -> tuple[Tensor, ...]:
        staging = self.staging
        if not staging.holds(self.mark, ids):
            self.gather(ids)
        staging.held = None
        torch.cuda.current_stream().wait_event(staging.filled)
        self.buffer.memory.copy_(self.next.memory)
        staging.emptied.record()
        self.working.replay()
        return _own(self.outputs)


def _own(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies: the next call overwrites what lies in a buffer or a capture."""
    return tuple(output.clone() for output in outputs)


class Staging:
    """Memory for the batches that work is done on, and as much for those that come next."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.here, self.next = torch.zeros(2, size, dtype=torch.uint8, device=device)
        self.held: tuple[object, np.ndarray] | None = None  # whose graphs, and which, `next` holds
        if device.type == "cuda":
            self.filled, self.emptied = torch.cuda.Event(), torch.cuda.Event()

    def holds(self, mark: object, ids: np.ndarray) -> bool:
        return self.held is not None and self.held[0] is mark and np.array_equal(self.held[1], ids)


class Memory:
    """Where captures lie, each on top of the others: they run one after the other, and so do those of gathering.

    So do the batches of different shapes.
    """

    def __init__(self) -> None:
        self._pools: dict[bool, Any] = {}  # handles, as `torch.cuda.graph` takes them; True: of gathering
        self._side: torch.cuda.Stream | None = None
        self._staging: list[Staging] = []

    def staging(self, size: int, device: torch.device) -> Staging:
        """With so many bytes for the batches of a call, or more: captures know where it lies, so that it cannot grow."""
        if not self._staging or len(self._staging[-1].here) < size:
            self._staging.append(Staging(-(-3 * size // (2 * ALIGNED)) * ALIGNED, device))
        return self._staging[-1]

    def side(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of gathering."""
        self._side = self._side or torch.cuda.Stream(device)
        return self._side

    @contextmanager
    def captures(self, graph: torch.cuda.CUDAGraph, *, aside: bool = False) -> Iterator[None]:
        """What is launched in here goes into the graph; ``aside``: of gathering, which runs beside the others.

        cuBLAS keeps a work space of 32 MiB for each stream and thread that it has been used on. Those of plain work are given
        back before a capture, which has streams of its own, and the capture's own after it, for the next to lie on.
        """
        if aside not in self._pools:
            self._pools[aside] = torch.cuda.graph_pool_handle()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, pool=self._pools[aside]):
                yield
        finally:
            torch._C._cuda_clearCublasWorkspaces()
