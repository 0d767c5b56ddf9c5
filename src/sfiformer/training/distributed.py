"""Devices and processes of a run, by Lightning Fabric."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy

from sfiformer import ranks
from sfiformer.config import TrainerConfig
from sfiformer.errors import TrainingError, UserError


def make_fabric(settings: TrainerConfig) -> Fabric:
    """Devices, processes and precision as the settings say, or as torchrun or SLURM have laid them out already.

    Fabric starts the processes (`launch`) and knows devices and precision. Gradients, batch norm statistics
    and class weights are summed by `sfiformer.ranks`: a rank's share of a batch may be of any size, and the sums
    are then those of the global batch, which an average of averages is not.
    """
    for library in ("lightning.fabric", "lightning.pytorch"):  # a run says itself what it runs on
        logging.getLogger(library).setLevel(logging.WARNING)
    devices, nodes = _launched() or (settings.devices, settings.nodes)
    accelerator = settings.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    if accelerator == "gpu" and torch.cuda.device_count() < devices:
        raise UserError(
            f"trainer.devices is {devices}, but this machine has {torch.cuda.device_count()} GPUs that PyTorch "
            "can use; ask for fewer, or set trainer.accelerator to cpu"
        )
    if devices * nodes > 1:
        # Of the processes still to be started: where rank 0 fails, its store goes with it, and PyTorch would tell of that too.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return Fabric(
        accelerator="cuda" if accelerator == "gpu" else "cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=DDPStrategy() if devices * nodes > 1 else "auto",
        precision="bf16-mixed" if settings.precision == "bf16-mixed" else "32-true",
    )


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Products of float32 matrices in TF32 within the block, where `precision` is tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def leads(fabric: Fabric) -> bool:
    """Whether this process will be rank 0; known before `launch`."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    return environment is None or environment.local_rank() == environment.node_rank() == 0


def leave() -> None:
    """End the process group of a run, all ranks together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@contextmanager
def one_voice() -> Iterator[None]:
    """Of the errors that follow from one another, as when a rank is gone in the middle of a sum, only the first is raised.

    The other ranks exit with code 1. A `TrainingError` comes to all ranks alike: rank 0 raises it.
    """
    try:
        yield
    except Exception as error:
        if ranks.count() > 1:
            first = _is_first()
            if not (ranks.rank() == 0 if isinstance(error, TrainingError) else first):
                raise SystemExit(1) from error
        raise


def _is_first() -> bool:
    """Whether this rank is the first to fail; from now on no other is."""
    own = str(ranks.rank())
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        return store.compare_set("sfiformer/failed", "", own).decode() == own
    except RuntimeError:  # rank 0, which keeps the store, is gone
        return False


def _launched() -> tuple[int, int] | None:
    """(processes a machine, machines) where torchrun or srun started this process, None where nobody did."""
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        local, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
        return local, world // local
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1 and not interactive:
        nodes = int(environment.get("SLURM_NNODES", "1"))
        return int(environment["SLURM_NTASKS"]) // nodes, nodes
    return None
