"""Which works of a run are replayed as CUDA graphs."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from sfiformer import ranks
from sfiformer.attention import kernels
from sfiformer.attention.side_by_side import blocks_of, have_room, kept_steps
from sfiformer.config import ExperimentConfig
from sfiformer.data.batch import GraphBatch
from sfiformer.data.shapes import BatchShape
from sfiformer.data.store import GraphStore
from sfiformer.nn.config import ModelConfig
from sfiformer.nn.model import SFiFormer
from sfiformer.training.examples import answers, with_negatives
from sfiformer.training.replay import Memory, Replay
from sfiformer.training.step import Step


def make_replays(
    config: ExperimentConfig,
    stores: Mapping[str, GraphStore],
    step: Step,
    measured: SFiFormer,
    measured_batch: int,
) -> dict[str, Replay]:
    """Steps ("step"), and answers to each split, where the run allows it. Negatives are drawn where batches are gathered."""
    if not replayable(config, stores):
        return {}

    def answered(batches: Sequence[GraphBatch]) -> tuple[Tensor, ...]:
        with step.fabric.autocast():
            return answers(measured, batches[0], step.task)

    make = partial(Replay, structure=step.model.structure, memory=Memory())
    room = partial(iterates_at_once, config.model)
    found = {
        split: make(store, measured_batch, answered, never_waits=partial(room, False))
        for split, store in stores.items()
    }
    found["step"] = make(
        stores["train"],
        config.data.batch_size,
        lambda batches: (step(batches),),
        draw=with_negatives if step.task.kind == "ranking" else None,
        never_waits=partial(room, True),
    )
    return found


def replayable(config: ExperimentConfig, stores: Mapping[str, GraphStore]) -> bool:
    """Whether all the work of a run can be captured: on one GPU that holds the data, by operators that never wait.

    Plain attention waits, so does dense attention on large graphs, and so do the layers of PyG.
    """
    model, largest = config.model, max(int(store.node_ptr.diff().max()) for store in stores.values())
    on_gpu = all(store.device.type == "cuda" for store in stores.values())
    fused = on_gpu and all(kernels.has_room(store.device) for store in stores.values())
    fused = fused and kernels.HAS_TRITON and (model.solver == "exact" or largest <= kernels.MAX_KEYS)
    fused = fused and (largest <= kernels.MAX_NODES or model.attention == "sfi")
    fused = fused and model.head_dim <= kernels.MAX_WIDTH
    return (
        config.trainer.capture
        and ranks.count() == 1
        and on_gpu
        and model.local in ("gatedgcn", "edge-gcn", "none")
        and (fused or model.attention in ("adjacency", "none"))
    )


def iterates_at_once(model: ModelConfig, learning: bool, shape: BatchShape) -> bool:
    """Whether the paper's iteration, if the model has it, goes over batches of this shape at once: else it waits."""
    if model.solver == "exact" or model.attention != "sfi":
        return True
    blocks = blocks_of(shape.nodes, shape.graphs, shape.max_nodes, model.heads)
    return have_room(blocks, model.heads, kept_steps(model.proximal_iterations, learning))
