"""Work on batches as CUDA graphs: captured once for each shape of a batch, replayed ever after.

On graphs of this size an ordinary step waits for Python and the driver most of the time: thousands of kernels of a few
microseconds each. A CUDA graph launches all of them at once.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sfiformer.data.batch import GraphBatch
from sfiformer.data.gather import gather
from sfiformer.data.shapes import BatchShape, Ladder
from sfiformer.data.store import GraphStore

Work = Callable[[Sequence[GraphBatch]], tuple[Tensor, ...]]
WARM_UPS = (
    2  # plain runs of a shape before it is captured: libraries and kernels prepare themselves in the first
)


class Replay:
    """`work(batches)` on batches of a store that lies on the GPU, padded to a few shapes (`Ladder`).

    The graphs of a batch are gathered inside the captured work, so that all the host sends are their numbers. Runs before the
    capture are ordinary ones, with all their effects. Work must neither wait for the device nor depend on its values, and
    padding must not change what it does.
    """

    def __init__(self, store: GraphStore, batch_size: int, work: Work) -> None:
        self.store, self.work = store, work
        self.ladder = Ladder(store, batch_size)
        self._runs: dict[tuple[BatchShape, ...], int] = {}
        self._captured: dict[tuple[BatchShape, ...], _Captured] = {}

    def __call__(self, parts: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
        """What the work gives for the graphs with these numbers, a batch for each part."""
        shapes = tuple(self.ladder.shape(part) for part in parts)
        ids = np.concatenate([shape.slots(part) for shape, part in zip(shapes, parts, strict=True)])
        sent = torch.from_numpy(ids).pin_memory().to(self.store.device, non_blocking=True)
        if not all(shape.filler for shape in shapes):  # of a shape that hardly comes twice
            return self._plainly(shapes, sent)
        if shapes not in self._captured:
            self._runs[shapes] = self._runs.get(shapes, 0) + 1
            if self._runs[shapes] <= WARM_UPS:
                return self._plainly(shapes, sent)
            self._captured[shapes] = _Captured(lambda static: self._plainly(shapes, static), sent)
        return self._captured[shapes](sent)

    def _plainly(self, shapes: Sequence[BatchShape], ids: Tensor) -> tuple[Tensor, ...]:
        slots = ids.split([shape.graphs for shape in shapes])
        return self.work([gather(self.store, mine, shape) for mine, shape in zip(slots, shapes, strict=True)])


class _Captured:
    """A function of one tensor as a CUDA graph. All share their memory: they run one after the other."""

    pool = None

    def __init__(self, function: Callable[[Tensor], tuple[Tensor, ...]], example: Tensor) -> None:
        if _Captured.pool is None:
            _Captured.pool = torch.cuda.graph_pool_handle()
        self.input = example.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=_Captured.pool):
            self.outputs = function(self.input)

    def __call__(self, value: Tensor) -> tuple[Tensor, ...]:
        self.input.copy_(value)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)  # the next graph overwrites them
