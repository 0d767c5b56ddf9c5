"""From a suite to its runs: settings resolved, the runs that others start from first."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from os.path import abspath
from pathlib import Path
from typing import Any

from sfiformer.config import ExperimentConfig
from sfiformer.errors import UserError
from sfiformer.presets import read_preset
from sfiformer.schema import Layer, as_text, build, expand, flat, plain
from sfiformer.suites.suite import Suite

RUNS = "runs"  # the folder of the run folders
# Settings that say where and how a run is computed, not what.
SURROUNDINGS = (
    "data.root",
    "data.mirror",
    "trainer.checkpoint_steps",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.nodes",
    "trainer.capture",
)


@dataclass(frozen=True)
class Run:
    """One run of a suite."""

    dataset: str
    model: str
    seed: int
    preset: str
    settings: dict[str, Any]
    """What differs from the preset, by dotted key."""
    config: ExperimentConfig
    needs: str | None = None
    """The name of the run that this one starts from."""

    @property
    def name(self) -> str:
        return run_name(self.dataset, self.model, self.seed)

    def arguments(self, out: Path) -> list[str]:
        """What follows `sfi` on the command line that trains this run under the folder `out`."""
        start = ["--init-from", str(out / RUNS / self.needs)] if self.needs else []
        return [
            "train",
            self.preset,
            *as_options(self.settings),
            *start,
            "--out",
            str(out / RUNS / self.name),
            "--resume",
        ]


def default_out(suite: Suite) -> Path:
    """The folder of a suite where the user does not say."""
    return Path("runs") / "suites" / suite.name


def run_name(dataset: str, model: str, seed: int) -> str:
    """DATASET/MODEL/seed-N, which is also its folder."""
    return f"{dataset}/{model}/seed-{seed}"


def plan(suite: Suite, overrides: Mapping[str, Any] | None = None) -> dict[str, Run]:
    """All runs of a suite, by name; `overrides` by dotted key are for every run.

    Raises:
        ValueError: a setting that is not one, with the place in the suite where it stands.
    """
    presets = {}
    for name, dataset in suite.datasets.items():
        try:
            presets[name] = read_preset(dataset.preset)
        except ValueError as error:
            raise ValueError(f"{suite.place}: datasets.{name}.preset: {error}") from None
    runs = {
        run.name: run for run in (_run(suite, *place, presets, overrides or {}) for place in places(suite))
    }
    for run in runs.values():
        if run.needs is not None and (kind := runs[run.needs].config.model.attention) != "dfi":
            raise ValueError(
                f"{suite.place}: models.{run.model}.init_from: {run.needs} has attention {kind}; what others start "
                "from has attention dfi"
            )
    return runs


def places(suite: Suite) -> list[tuple[str, str, int]]:
    """Dataset, model and seed of every run of a suite, once each; what others start from comes before them."""
    found: dict[tuple[str, str, int], None] = {}
    for group in suite.groups:
        for dataset, seed, model in product(group.datasets, group.seeds, group.models):
            source = suite.models[model].init_from
            for name in (source, model):
                if name is not None:
                    found[dataset, name, seed] = None
    return list(found)


def select(runs: Mapping[str, Run], patterns: Iterable[str]) -> dict[str, Run]:
    """The runs whose name fits one of the patterns (a part of it, or with * and ?), and those they start from."""
    patterns = list(patterns)
    if not patterns:
        return dict(runs)
    chosen = {name for name in runs if any(p in name or fnmatch(name, p) for p in patterns)}
    if not chosen:
        raise UserError(f"no run's name fits {' or '.join(patterns)}; the names are like {next(iter(runs))}")
    chosen |= {runs[name].needs or name for name in chosen}
    return {name: run for name, run in runs.items() if name in chosen}


def differences(before: ExperimentConfig, now: ExperimentConfig) -> list[str]:
    """The settings that make `now` another experiment than that of a run folder, a sentence each."""
    old, new = before.settings(), now.settings()
    return [f"{key} is now {as_text(new[key])}, was {as_text(old[key])}" for key in _changed(before, now)]


def restoring(before: ExperimentConfig, now: ExperimentConfig) -> list[str]:
    """What a suite would have to say for `now` to be the experiment of a run folder, a setting each."""
    old = flat(plain(before))
    return [f"{key}: {_yaml(old[key])}" for key in _changed(before, now)]


def _changed(before: ExperimentConfig, now: ExperimentConfig) -> list[str]:
    old, new = before.settings(), now.settings()
    return [
        key
        for key in new
        # What is None of data and model is settled by the data; a path is made absolute when it is trained on.
        if key not in SURROUNDINGS
        and not (new[key] is None and key.startswith(("data.", "model.")))
        and new[key] != old[key]
        and not (key == "data.path" and old[key] is not None and abspath(new[key]) == abspath(old[key]))
    ]


def _yaml(value: Any) -> str:
    return f"[{as_text(value)}]" if isinstance(value, list) else as_text(value)


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Settings by dotted key as options of the command line."""
    return [part for key, value in settings.items() for part in (f"--{key}", as_text(value))]


def _run(
    suite: Suite,
    dataset: str,
    model: str,
    seed: int,
    presets: Mapping[str, list[Layer]],
    overrides: Mapping[str, Any],
) -> Run:
    layers = {
        f"{suite.place}: settings": suite.settings,
        f"{suite.place}: datasets.{dataset}.settings": suite.datasets[dataset].settings,
        f"{suite.place}: models.{model}.settings": suite.models[model].settings,
        "overrides": overrides,
        "seed": {"seed": seed},
    }
    for place, values in list(layers.items())[:-1]:
        if "seed" in values:
            raise ValueError(f"{place}: seed is {values['seed']!r}, but seeds are set by the seeds of runs")
    source = suite.models[model].init_from
    nested = [Layer(place, expand(values)) for place, values in layers.items()]
    return Run(
        dataset=dataset,
        model=model,
        seed=seed,
        preset=suite.datasets[dataset].preset,
        settings={key: value for values in layers.values() for key, value in flat(expand(values)).items()},
        config=build(ExperimentConfig, [*presets[dataset], *nested]),
        needs=None if source is None else run_name(dataset, source, seed),
    )
