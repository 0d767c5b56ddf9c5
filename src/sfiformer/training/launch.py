"""Training from settings to result: processes, data, run folder, model, loop."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from sfiformer import ranks
from sfiformer.config import ExperimentConfig
from sfiformer.nn.model import SFiFormer
from sfiformer.training.adamw import ClippedAdamW, served
from sfiformer.training.average import Average
from sfiformer.training.checkpoint import Checkpoints, read_state
from sfiformer.training.compiling import announced
from sfiformer.training.distributed import leads, leave, make_fabric, one_voice, products
from sfiformer.training.inference import load_checkpoint
from sfiformer.training.inheritance import start_from
from sfiformer.training.interruption import Interrupted
from sfiformer.training.metrics_log import MetricsLog
from sfiformer.training.preparation import Prepared, objective, prepare
from sfiformer.training.progress import TrainingProgress
from sfiformer.training.run_folder import RESULT, SKIPPED, RunFolder
from sfiformer.training.sampling import Stream, derived_seed
from sfiformer.training.state import Result, State, ended
from sfiformer.training.trainer import Trainer
from sfiformer.training.writers import Writers


def train(
    config: ExperimentConfig,
    out: str | Path,
    *,
    resume: bool = False,
    init_from: str | Path | None = None,
    progress: bool | None = None,
) -> Result:
    """Train a model and leave all that came of it in the folder `out`.

    With several devices or machines (`config.trainer`, torchrun, SLURM), all processes call this alike.

    Args:
        config: the experiment.
        out: the run's folder; it must not hold anything, except with `resume`.
        resume: continue the run in `out` where it was stopped or killed, or start where there is none yet.
        init_from: the run (or a checkpoint, or a saved model) of a DFi-Former to start from: SFi-Former+, or with attention
            dfi its dense control. A run that has begun goes on from its own checkpoint.
        progress: None: a live display on a terminal, lines elsewhere; True: live; False: nothing.

    Raises:
        UserError: where something is wrong with the settings, the data or the folder.
        TrainingError: where a loss is not finite or the disk cannot be written to.
        Interrupted: on SIGTERM and SIGINT, a SystemExit with code 143 or 130, after a checkpoint.
    """
    run = RunFolder(out)
    fabric = make_fabric(config.trainer)
    lead = leads(fabric)
    with ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng(devices=[])
        )  # the caller's random numbers stay as they were
        stack.enter_context(products(config.trainer.precision))
        prepared, values, trained = None, None, None
        if lead:  # what can go wrong does so here, before other processes start
            stack.enter_context(run.claim(resume=resume))
            run.require_own_file("or train anew in another folder", config.data.path)
            trained = run.task_of(config)
            prepared = prepare(config, trained=trained)
            run.require_same(prepared.config)
            run.require_same_split(prepared.ids)
            checkpoints = Checkpoints(run.path)
            with run.writing():
                values = checkpoints.open()
            _require_metric(run, prepared, values)
        fabric.launch()
        stack.enter_context(one_voice())
        begun, trained = fabric.broadcast((values is not None, trained))
        # Rank 0 has left what takes long in the caches.
        prepared = prepared or prepare(config, trained=trained)
        if begun and values is None:
            values = read_state(run.path / "last")

        model, report = _model(prepared, run, values, init_from)
        model.to(fabric.device)
        if ranks.count() > 1:
            ranks.join(model)
        optimizer = make_optimizer(model, prepared.config, values)
        average = _average(prepared.config, run, model, values)
        state = _state(run, values)
        loss, metric = objective(prepared.config, prepared.task)

        writers = None
        over = ended(prepared.config.trainer, state.history, bool(metric.higher_is_better))
        judged_by = run.judged_by(str(metric.name)) if over else str(metric.name)
        shown = _progress(progress if lead else False, prepared, state, judged_by)
        stack.callback(shown.close)
        if lead:
            shown.say(_introduction(prepared, model, fabric, state, report, run, over))
            run.require_space(4 * model.num_parameters, averaged=average is not None)
            with run.writing():
                if over:  # where nothing is left to train, the run stays what it was
                    run.note_place(prepared.config.data.path)
                else:
                    surroundings = {"processes": ranks.count(), "device": _device(fabric.device)}
                    about = {"metric": judged_by, **surroundings, **report}
                    run.describe(prepared, state, about)
                writers = Writers(run.path, checkpoints, MetricsLog(run.path, state.history))
            stack.callback(writers.log.close)
        trainer = Trainer(fabric, prepared, model, optimizer, loss, metric, state, shown, writers, average)
        try:
            with announced(shown.say, fabric.device):
                trainer.fit()
        except Interrupted as stop:
            leave()
            if not lead:
                raise SystemExit(0) from None  # rank 0 tells how the run ended
            stack.close()
            print(_farewell(stop, state, run.path), file=sys.stderr, flush=True)
            raise
        patience = prepared.config.trainer.patience
        if patience is not None and len(state.history) < prepared.config.trainer.epochs:
            shown.say(f"ended: not better for {patience} epochs (trainer.patience)")
        result = Result.of(
            state.history,
            run=run.path,
            metric=judged_by,
            higher_is_better=bool(metric.higher_is_better),
            parameters=model.num_parameters,
        )
        if lead:
            with run.writing():
                run.write_json(RESULT, result.to_dict())
            shown.say(str(result))
        leave()
        return result


def _state(run: RunFolder, values: dict[str, Any] | None) -> State:
    return State() if values is None else State.from_dict(values, run.path / "last")


def _require_metric(run: RunFolder, prepared: Prepared, values: dict[str, Any] | None) -> None:
    """Raises UserError where epochs that are left would be judged otherwise than those before."""
    _, metric = objective(prepared.config, prepared.task)
    if not ended(prepared.config.trainer, _state(run, values).history, bool(metric.higher_is_better)):
        run.require_metric(str(metric.name))


def _model(
    prepared: Prepared, run: RunFolder, values: dict[str, Any] | None, init_from: str | Path | None
) -> tuple[SFiFormer, dict[str, str]]:
    """The model with its fresh, resumed or inherited weights, and what was inherited."""
    torch.manual_seed(derived_seed(prepared.config.seed, Stream.WEIGHTS))
    model = SFiFormer(prepared.config.model)
    if values is not None:
        averaged = "average" in values  # and what the checkpoint has for its model is the average
        trained = values["average"]["weights"] if averaged else load_checkpoint(run, "last").state_dict()
        model.load_state_dict(trained)
    elif init_from is not None:
        return model, {"init_from": f"{init_from}: {start_from(init_from, model, prepared)}"}
    return model, {}


def _average(
    config: ExperimentConfig, run: RunFolder, model: SFiFormer, values: dict[str, Any] | None
) -> Average | None:
    """Of the model's weights, where the settings ask for it; that of a checkpoint goes on."""
    if not config.optim.average:
        return None
    average = Average(model, config.optim.average)
    if values is not None and "average" in values:
        average.resume(load_checkpoint(run, "last").state_dict(), values["average"]["steps"])
    return average


def make_optimizer(
    model: SFiFormer, config: ExperimentConfig, values: dict[str, Any] | None = None
) -> torch.optim.AdamW:
    """AdamW for the model where it lies; `values` of a checkpoint take it up where that was written."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = trained[0].device
    # On a GPU kernels that a CUDA graph can hold, with the learning rate on the device.
    captured, lr = device.type == "cuda", config.optim.lr
    settings: dict[str, Any] = {
        "lr": torch.tensor(lr, dtype=torch.float32, device=device) if captured else lr,
        "weight_decay": config.optim.weight_decay,
        "fused": True,
        "capturable": captured,
    }
    kind = ClippedAdamW if served(trained) else torch.optim.AdamW
    optimizer = kind(trained, **settings)
    if values is not None:
        optimizer.load_state_dict(values["optimizer"])
        for group in optimizer.param_groups:  # a resumed run may have others, or be on another device
            group.update(settings)
        for state in optimizer.state.values():
            state["step"] = state["step"].to(device)
    return optimizer


def _progress(shown: bool | None, prepared: Prepared, state: State, metric: str) -> TrainingProgress:
    settings = prepared.config.trainer
    span = prepared.config.data.batch_size * settings.accumulate
    steps = -(-len(prepared.stores["train"]) // span)
    done = state.epoch * steps + state.step
    return TrainingProgress(shown, epochs=settings.epochs, steps=steps, done=done, metric=metric)


def _introduction(
    prepared: Prepared,
    model: SFiFormer,
    fabric: Fabric,
    state: State,
    report: dict[str, str],
    run: RunFolder,
    over: bool,
) -> str:
    processes = f" × {ranks.count()}" if ranks.count() > 1 else ""
    lines = [
        prepared.facts,
        *([f"all that were skipped: {run.path / SKIPPED}"] if len(prepared.bad) > 1 else []),
        f"model: {model.extra_repr()}",
        f"run: {run.path}, on {fabric.device.type}{processes}, precision {prepared.config.trainer.precision}",
        *(f"starting from {text}" for text in report.values()),
    ]
    changes = run.changes(prepared.config)
    told = [f"{key} is now {now}, was {before}" for key, (before, now) in changes.items()]
    if over:
        left = [
            key for key in changes if key != "data.path"
        ]  # where the file is by now is noted all the same
        kept = f"; left as in {run.path / 'config.yaml'}: {', '.join(left)}" if left else ""
        lines.append(f"nothing is left to train after epoch {state.epoch}{kept}")
        lines += [line for line in told if line.startswith("data.path ")]
    elif state.epoch or state.step:
        lines += [f"resuming after epoch {state.epoch}, step {state.step}", *told]
    return "\n".join(lines)


def _device(device: torch.device) -> str:
    """cpu, or the GPU by number and name."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _farewell(stop: Interrupted, state: State, out: Path) -> str:
    return (
        f"stopped by {stop.signal} after epoch {state.epoch}, step {state.step}; the checkpoint is in "
        f"{out / 'last'}: continue with --resume"
    )
