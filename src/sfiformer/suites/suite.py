"""A suite: the runs that together make some tables and figures, as a YAML file.

title: …             what it is, one line
settings: {…}        dotted keys, for all runs
datasets: {NAME: {preset: …, label: …, settings: {…}}}
models: {NAME: {label: …, settings: {…}, init_from: OTHER MODEL}}
runs:                a list; each entry is datasets × models × seeds, and one table of the report
  - {name: …, title: …, datasets: […], models: […], seeds: […], split: …, published: […], gap: […], curves: {KEY: […]}}

Later settings win: preset, suite, dataset, model, command line. A dataset's preset is its name if not given.
What a user's own file names by a relative path (a preset file, data.path, data.root, data.mirror) stands beside it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from os.path import expanduser
from pathlib import Path
from typing import Any, Literal, TypeVar

from sfiformer.config import ExperimentConfig
from sfiformer.presets import parse_yaml, read_text
from sfiformer.schema import Layer, build, dotted_keys, expand, hint_of, nearest

T = TypeVar("T")
Settings = dict[str, Any]
PUBLISHED = "published"  # not a suite, but the figures to compare with
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")  # it becomes a folder's


@dataclass(frozen=True)
class SuiteDataset:
    """A dataset of a suite: a preset, perhaps changed."""

    preset: str = ""
    label: str = ""
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteModel:
    """A model of a suite: settings on top of any dataset's."""

    label: str = ""
    init_from: str | None = None
    """The model whose run, on the same dataset with the same seed, the training starts from."""
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Datasets × models × seeds: one table of the report, with its figures."""

    name: str = ""
    title: str = ""
    datasets: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    split: Literal["test", "val"] = "test"
    """The graphs whose metric is shown; val where settings are chosen, which must not see the test graphs."""
    published: tuple[str, ...] = ()
    """Tables of published figures, to be shown in columns of their own."""
    notes: tuple[str, ...] = ()
    """Sentences below the table."""
    gap: tuple[str, ...] = ()
    """Models whose train-test gap is drawn over the epochs."""
    curves: dict[str, list[str]] = field(default_factory=dict)
    """For a dotted key, the models that differ in it: their metric is drawn against it."""


@dataclass(frozen=True)
class Suite:
    """What a suite's file holds, checked."""

    name: str
    place: str
    title: str
    settings: Settings
    datasets: dict[str, SuiteDataset]
    models: dict[str, SuiteModel]
    groups: tuple[Group, ...]


def suite_names() -> list[str]:
    """The names of the suites that come with the package, sorted."""
    files = [file.name for file in resources.files("sfiformer.suites").iterdir()]
    return sorted(
        name.removesuffix(".yaml") for name in files if name.endswith(".yaml") and name != f"{PUBLISHED}.yaml"
    )


def package_text(name: str) -> str:
    """A YAML file of this package."""
    return (resources.files("sfiformer.suites") / f"{name}.yaml").read_text(encoding="utf-8")


def read_suite(name: str) -> Suite:
    """A suite by name, or from a YAML file.

    Raises:
        ValueError: names the file, the key in it, and what would be right.
    """
    if not name.endswith((".yaml", ".yml")):
        if name not in suite_names():
            file = next((f"{name}{end}" for end in (".yaml", ".yml") if Path(f"{name}{end}").is_file()), None)
            raise ValueError(
                f"there is no suite {name!r}; did you mean {file or nearest(name, suite_names())!r}?"
            )
        return _suite(parse_yaml(package_text(name), f"suites/{name}.yaml"), name, f"suites/{name}.yaml")
    path = Path(name)
    return _beside(path.parent, _suite(parse_yaml(read_text(path, "suite"), name), path.stem, name))


def _beside(folder: Path, suite: Suite) -> Suite:
    """Relative paths in a suite's file are from its folder."""

    def settled(settings: Settings) -> Settings:
        nested = expand(settings)
        data = nested.get("data")
        for key in ("path", "root", "mirror"):
            if isinstance(data, dict) and isinstance(data.get(key), str) and "://" not in data[key]:
                data[key] = str(folder / expanduser(data[key]))
        return nested

    def preset(name: str) -> str:
        return str(folder / name) if name.endswith((".yaml", ".yml")) else name

    return replace(
        suite,
        settings=settled(suite.settings),
        datasets={
            key: replace(entry, preset=preset(entry.preset), settings=settled(entry.settings))
            for key, entry in suite.datasets.items()
        },
        models={key: replace(entry, settings=settled(entry.settings)) for key, entry in suite.models.items()},
    )


def _suite(values: dict[str, Any], name: str, place: str) -> Suite:
    known = ("title", "settings", "datasets", "models", "runs")
    for key in values:
        if key not in known:
            raise ValueError(f"{place}: there is no key {key!r}; did you mean {nearest(str(key), known)!r}?")
    runs = values.get("runs")
    if not isinstance(runs, list) or not runs:
        raise ValueError(f"{place}: runs must be a list of at least one entry, not {runs!r}")
    datasets = {
        key: replace(entry, preset=entry.preset or key, label=_line(entry.label or key))
        for key, entry in _named(SuiteDataset, values.get("datasets"), f"{place}: datasets").items()
    }
    models = {
        key: replace(entry, label=_line(entry.label or key))
        for key, entry in _named(SuiteModel, values.get("models"), f"{place}: models").items()
    }
    groups = tuple(_entry(Group, group, f"{place}: runs[{i}]") for i, group in enumerate(runs))
    suite = Suite(
        name=name,
        place=place,
        title=_line(str(values.get("title", name))),
        settings=_mapping(values.get("settings", {}), f"{place}: settings"),
        datasets=datasets,
        models=models,
        groups=tuple(
            replace(
                group,
                name=group.name or f"table-{i + 1}",
                title=_line(group.title or group.name or f"Table {i + 1}"),
                notes=tuple(map(_line, group.notes)),
            )
            for i, group in enumerate(groups)
        ),
    )
    _check(suite)
    return suite


def _named(cls: type[T], values: Any, where: str) -> dict[str, T]:
    entries = {}
    for name, entry in _mapping(values, where).items():
        _check_name(name, where)
        entries[name] = _entry(cls, entry or {}, f"{where}.{name}")
    return entries


def _entry(cls: type[T], values: Any, where: str) -> T:
    """Mappings from names that are not fixed (settings, curves) are read here, all else by the schema."""
    values = _mapping(values, where)
    free = {key: _mapping(values[key], f"{where}.{key}") for key in ("settings", "curves") if key in values}
    names = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
    rest = {key: value for key, value in values.items() if not (key in free and key in names)}
    made = build(cls, [Layer(where, rest)])
    return replace(made, **{key: free[key] for key in free if key in names})  # type: ignore[type-var]


def _mapping(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{where} must be a mapping from names, not {values!r}")
    return dict(values)


def _check(suite: Suite) -> None:
    place, published = suite.place, parse_yaml(package_text(PUBLISHED), f"suites/{PUBLISHED}.yaml")
    for name, model in suite.models.items():
        if model.init_from is not None:
            _known(model.init_from, suite.models, f"{place}: models.{name}.init_from")
            if suite.models[model.init_from].init_from is not None:
                raise ValueError(
                    f"{place}: models.{name}.init_from is {model.init_from!r}, which itself starts from another"
                )
    names = [group.name for group in suite.groups]
    for i, group in enumerate(suite.groups):
        where = f"{place}: runs[{i}]"
        _check_name(group.name, f"{where}.name")
        if names.count(group.name) > 1:
            raise ValueError(f"{where}.name is {group.name!r}, as that of another entry")
        for key in ("datasets", "models", "seeds"):
            if not getattr(group, key):
                raise ValueError(f"{where}.{key} must be a list of at least one")
            _once(getattr(group, key), f"{where}.{key}")
        for dataset in group.datasets:
            _known(dataset, suite.datasets, f"{where}.datasets")
        for model_name in group.models:
            _known(model_name, suite.models, f"{where}.models")
        _once([suite.models[name].label for name in group.models], f"{where}.models: their labels")
        for key, chosen in group.curves.items():
            _known(key, dotted_keys(ExperimentConfig), f"{where}.curves")
            if hint_of(ExperimentConfig, key) not in (int, float):
                raise ValueError(
                    f"{where}.curves.{key}: a curve is drawn against a number, which {key} is not"
                )
            if not isinstance(chosen, list):
                raise ValueError(f"{where}.curves.{key} must be a list of models, not {chosen!r}")
            for model_name in chosen:
                _known(model_name, group.models, f"{where}.curves.{key}")
        for model_name in group.gap:
            _known(model_name, group.models, f"{where}.gap")
        for table in group.published:
            _known(table, published, f"{where}.published")


def _once(values: Iterable[Any], where: str) -> None:
    counts = Counter(values)
    for value, count in counts.items():
        if count > 1:
            raise ValueError(
                f"{where}: {value!r} stands there {count} times; rows of a table are told apart by them"
            )


def _line(text: str) -> str:
    """On one line, as tables have it."""
    return " ".join(text.split())


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}: {name!r} is to name a folder; use letters, digits and . _ + -")


def _known(name: Any, known: Iterable[str], where: str) -> None:
    if name not in known:
        raise ValueError(f"{where}: there is no {name!r}; did you mean {nearest(str(name), known)!r}?")
