"""The loop: epochs of steps, each epoch measured and kept."""

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torchmetrics import Metric

from sfiformer import ranks
from sfiformer.data.batch import GraphBatch
from sfiformer.data.store import GraphStore
from sfiformer.errors import TrainingError
from sfiformer.nn.model import SFiFormer
from sfiformer.training.average import Average
from sfiformer.training.compiling import rehearse
from sfiformer.training.evaluation import computed, measure
from sfiformer.training.examples import with_negatives
from sfiformer.training.interruption import Interrupted, Interruption
from sfiformer.training.losses import Loss
from sfiformer.training.metrics_log import Record
from sfiformer.training.preparation import Prepared
from sfiformer.training.progress import TrainingProgress
from sfiformer.training.replay import Replay
from sfiformer.training.replays import make_replays
from sfiformer.training.sampling import (
    Stream,
    derived_seed,
    epoch_order,
    in_batches,
    share,
    train_subset,
)
from sfiformer.training.schedule import learning_rate
from sfiformer.training.state import State, best_record, ended
from sfiformer.training.step import NonFinite, Step
from sfiformer.training.writers import Writers
from sfiformer.training.zeros import zero_share

SUBSET = 1000  # training graphs that are measured at least, where there are so many
LISTED = 64  # graphs named in an error
ZERO_GRAPHS = 4  # on which the share of zero flows is measured


class Trainer:
    """Trains a model on prepared data, from a state onwards."""

    def __init__(
        self,
        fabric: Fabric,
        prepared: Prepared,
        model: SFiFormer,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        metric: Metric,
        state: State,
        progress: TrainingProgress,
        writers: Writers | None,
        average: Average | None = None,
    ) -> None:
        self.fabric, self.prepared, self.model, self.optimizer = fabric, prepared, model, optimizer
        self.state, self.progress, self.writers = state, progress, writers
        self.config, self.task, self.device = prepared.config, prepared.task, fabric.device
        self.metric = metric.to(self.device)
        self.stores = on_device(prepared.stores, self.device)
        self.step = Step(fabric, model, optimizer, loss, self.task, self.config.optim.clip_norm, average)
        self.measured = model if average is None else average.model  # and kept
        # Without gradients there is room for larger batches.
        self.measured_batch = self.config.data.batch_size * (4 if self.device.type == "cuda" else 1)
        self.replays = make_replays(self.config, self.stores, self.step, self.measured, self.measured_batch)
        self.read_every = read_every(self.device)
        self.unread: list[tuple[np.ndarray, Tensor]] = []  # of steps done: their graphs, and what each gave
        self.read_at = time.perf_counter()
        train, val = self.stores["train"], self.stores.get("val")
        self.subset = train_subset(len(train), max(len(val) if val else 0, SUBSET), self.config.seed)
        self.interruption = Interruption(self.device)

    def fit(self) -> None:
        """Train until the last epoch, or until the validation metric has not improved for `patience` epochs.

        Raises:
            Interrupted: on SIGTERM or SIGINT, after a checkpoint.
            TrainingError: where the loss is not finite or the disk cannot be written to.
        """
        with self.interruption:
            try:
                self._checkpoint(wait=True)  # whether one can be written is found out before the first epoch
                if self.replays and not self._over():
                    began = time.perf_counter()
                    rehearse(self.model, self._firsts(), self.fabric.autocast)
                    self.state.seconds += time.perf_counter() - began  # of the epoch that follows
                while not self._over():
                    self._epoch()
            finally:
                if self.replays and self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # a batch may still be being gathered
                self.replays.clear()  # they and this trainer know each other: their memory would long outlive the run
                if self.writers is not None:
                    self.writers.finish()

    def _over(self) -> bool:
        return ended(self.config.trainer, self.state.history, bool(self.metric.higher_is_better))

    def _epoch(self) -> None:
        state, settings = self.state, self.config.trainer
        began = time.perf_counter() - state.seconds
        train = self.stores["train"]
        span = self.config.data.batch_size * settings.accumulate
        steps = list(in_batches(epoch_order(len(train), self.config.seed, state.epoch), span))
        lr = learning_rate(self.config.optim, settings.epochs, state.epoch)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self.model.train()
        self.read_at = time.perf_counter()
        while state.step < len(steps):
            self._stop_if_asked()
            self._step(*steps[state.step : state.step + 2])
            every = settings.checkpoint_steps
            due = bool(every) and state.step % (every or 1) == 0 and state.step < len(steps)
            if due or state.step == len(steps) or time.perf_counter() - self.read_at >= self.read_every:
                self._read_losses()
                state.seconds = time.perf_counter() - began
                self.progress.step(state.epoch, state.step, state.loss_sum / state.graphs, state.speed)
            if due:
                self._checkpoint()

        scores = {split: self._measure(split) for split in ("train", "val", "test")}
        record: Record = {
            "epoch": state.epoch + 1,
            "lr": lr,
            "loss": state.loss_sum / state.graphs,
            **scores,
            "zero_share": self._zero_share(),
            "seconds": time.perf_counter() - began,
            "graphs_per_second": state.speed,
        }
        state.finish_epoch(record)
        best = best_record(state.history, bool(self.metric.higher_is_better)) is record
        self._checkpoint(best=best, record=record)
        self.progress.epoch(record, best)

    def _step(self, graphs: np.ndarray, then: np.ndarray | None = None) -> None:
        """One step on the training graphs with these numbers, `accumulate` global batches; ``then`` are the next step's."""
        step = self.state.step
        parts, replay = self._parts(graphs, step), self.replays.get("step")
        following = None if then is None else list(in_batches(then, self.config.data.batch_size))
        try:
            if replay:
                seeds, then_seeds = self._seeds(parts, step), self._seeds(following or [], step + 1)
                values = replay(parts, following, seeds=seeds, then_seeds=then_seeds)[0]
            else:
                values = self.step(self._batches(parts, step))
        except NonFinite as error:
            raise self._non_finite(error, graphs, self.state.step) from error
        self.unread.append((graphs, values))
        self.state.step += 1

    def _read_losses(self) -> None:
        """Add up what the steps since the last time gave: the one wait for the device."""
        if not self.unread:
            return
        state, size = self.state, self.config.data.batch_size
        read = iter(torch.cat([values for _, values in self.unread]).tolist())
        for back, (graphs, values) in enumerate(self.unread):
            *losses, norm = (next(read) for _ in range(len(values)))
            if not all(map(math.isfinite, (*losses, norm))):
                raise self._explained(graphs, state.step - len(self.unread) + back)
            parts = in_batches(graphs, size)
            state.loss_sum += sum(loss * len(part) for loss, part in zip(losses, parts, strict=True))
            state.graphs += len(graphs)
        self.unread.clear()
        now = time.perf_counter()
        state.train_seconds += now - self.read_at
        self.read_at = now

    def _explained(self, graphs: np.ndarray, step: int) -> TrainingError:
        """Do a step again that was found not to be finite on a GPU, now looking."""
        parts, replay = self._parts(graphs, step), self.replays.get("step")
        batches = replay.batches(parts, self._seeds(parts, step)) if replay else self._batches(parts, step)
        return self._non_finite(self.step.explain(batches), graphs, step)

    def _firsts(self) -> dict[str, tuple[Replay, np.ndarray]]:
        """What is replayed, each with the first batch of an epoch."""
        order = epoch_order(len(self.stores["train"]), self.config.seed, self.state.epoch)
        graphs = {split: np.arange(len(store)) for split, store in self.stores.items()}
        graphs |= {"train": self.subset, "step": order}
        return {
            name: (replay, graphs[name][: replay.ladder.batch_size]) for name, replay in self.replays.items()
        }

    def _parts(self, graphs: np.ndarray, step: int) -> list[np.ndarray]:
        """The batches of a step of this epoch; what is drawn at random from now on is that step's own."""
        place = (self.state.epoch, step, ranks.rank())
        torch.manual_seed(derived_seed(self.config.seed, Stream.STEP, *place))
        return list(in_batches(graphs, self.config.data.batch_size))

    def _seeds(self, parts: Sequence[np.ndarray], step: int) -> list[int]:
        """Of what is drawn for each of these batches of a step of this epoch: negatives; none where nothing is."""
        if self.task.kind != "ranking":
            return []
        place = (self.config.seed, Stream.NEGATIVES, self.state.epoch, step)
        return [derived_seed(*place, number) for number in range(len(parts))]

    def _batches(self, parts: list[np.ndarray], step: int) -> list[GraphBatch]:
        """This rank's share of each global batch."""
        train, found = self.stores["train"], []
        for graphs in parts:
            mine = graphs[share(graphs, ranks.rank(), ranks.count())]
            found.append(train.batch(mine).to(self.device, non_blocking=True))
        seeds = self._seeds(parts, step)
        return list(map(with_negatives, found, seeds)) if seeds else found

    def _measure(self, split: str) -> float | None:
        if split not in self.stores:
            return None
        try:
            measure(
                self.metric,
                self.measured,
                self.stores[split],
                self.task,
                batch_size=self.measured_batch,
                device=self.device,
                graphs=self.subset if split == "train" else None,
                autocast=self.fabric.autocast,
                between=self._stop_if_asked,
                replay=self.replays.get(split),
            )
        except ValueError as error:  # attention looks at its inputs, on a CPU
            if "finite" not in str(error):
                raise
            raise TrainingError(
                f"epoch {self.state.epoch + 1}, after its steps: not finite on graphs of {split}: inside the "
                f"model: {error}; {self._remedy()}"
            ) from error
        return computed(self.metric)

    def _zero_share(self) -> float | None:
        if not self.config.trainer.measure_zeros:
            return None
        store = self.stores.get("val", self.stores["train"])
        batch = store.batch(range(min(ZERO_GRAPHS, len(store)))).to(self.device)
        return zero_share(self.measured, batch, autocast=self.fabric.autocast)

    def _checkpoint(self, *, best: bool = False, record: Record | None = None, wait: bool = False) -> None:
        if self.writers is not None:
            what = (self.measured, self.optimizer, self.state, self.step.average)
            self.writers.checkpoint(*what, best=best, record=record, wait=wait)

    def _stop_if_asked(self) -> None:
        number = self.interruption.agreed()
        if number:
            self._read_losses()
            self._checkpoint(wait=True)
            raise Interrupted(number)

    def _non_finite(self, error: NonFinite, graphs: np.ndarray, step: int) -> TrainingError:
        names = self.prepared.names("train", graphs[:LISTED].tolist())
        if len(graphs) > LISTED:
            names.append(f"… ({len(graphs)} in all)")
        return TrainingError(
            f"epoch {self.state.epoch + 1}, step {step + 1}: not finite: {error}; the step's training "
            f"graphs are {', '.join(names)}; {self._remedy()}"
        )

    def _remedy(self) -> str:
        kept = self.writers.last() if self.writers else "last"
        return (
            f"the checkpoint {kept} is kept: continue from it with --resume and, for instance, a lower "
            "optim.lr or optim.clip_norm"
        )


def read_every(device: torch.device) -> float:
    """Seconds between looks at the losses. On a GPU a look waits for it.

    Several ranks look after every step, and so at the same one: it takes all of them to explain what is not finite.
    """
    return 0.5 if device.type == "cuda" and ranks.count() == 1 else 0.0


def on_device(stores: dict[str, GraphStore], device: torch.device) -> dict[str, GraphStore]:
    """The stores whole on the GPU where they take less than half of its free memory, else as they are."""
    if device.type != "cuda":
        return stores
    free, _ = torch.cuda.mem_get_info(device)
    if sum(store.nbytes for store in stores.values()) > free / 2:
        return stores
    return {split: store.to(device) for split, store in stores.items()}
