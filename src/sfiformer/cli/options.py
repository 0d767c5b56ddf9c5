"""Options that several commands share, and the dotted keys of an experiment as options."""

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
import yaml
from rich.markup import escape

from sfiformer.config import ExperimentConfig
from sfiformer.schema import dotted_keys

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, or auto.")]
Split = Annotated[
    Literal["train", "val", "test"],
    typer.Option("--split", metavar="train|val|test", help="A split of the run's data."),
]
LabelledGraphs = Annotated[
    Path | None,
    typer.Option("--data", metavar="FILE", help="Labelled graphs of your own, in place of the run's data."),
]
SkipBad = Annotated[
    bool,
    typer.Option(
        "--skip-bad",
        help="With --data, leave out rows that cannot be read; a warning counts them, and names the first.",
    ),
]
SmilesColumn = Annotated[
    str | None,
    typer.Option(
        "--smiles-column",
        metavar="NAME",
        help="With --data, the column of a CSV; as in training, or found, if not given.",
    ),
]
Checkpoint = Annotated[
    Literal["best", "last"],
    typer.Option("--checkpoint", metavar="best|last", help="Which weights of the run."),
]

# The order of the groups in the help, the longest last.
SECTIONS = ("data", "trainer", "optim", "model")
# Short names of keys that are often set.
ALIASES = {"trainer.devices": "--devices", "trainer.nodes": "--nodes"}


def list_bad(bad: Iterable[tuple[str, str]]) -> None:
    """A line on standard error for each row that was left out."""
    for place, reason in bad:
        print(f"skipped {place}: {reason}", file=sys.stderr)


def with_settings(command: Callable[..., None], *, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """Let typer see, in place of a command's **settings, one option for each dotted key but those in `without`."""
    signature = inspect.signature(command)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "settings"]
    parameters = [*own, *(option for option in dotted_parameters() if option.name not in without)]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def given(settings: Mapping[str, str | None]) -> dict[str, Any]:
    """The settings that were given as options, by dotted key."""
    texts = {name.replace("__", "."): text for name, text in settings.items() if text is not None}
    return {key: parse(key, text) for key, text in texts.items()}


def dotted_parameters() -> list[inspect.Parameter]:
    """For every dotted key of an experiment a function parameter that typer makes an option --KEY of."""
    classes = {section: _hint(section) for section in SECTIONS}
    keys = [key for key in dotted_keys(ExperimentConfig) if key not in classes]
    keys.sort(key=lambda key: SECTIONS.index(key.partition(".")[0]) if "." in key else -1)
    documents = {"": attribute_docs(ExperimentConfig)}
    documents |= {section: attribute_docs(cls) for section, cls in classes.items()}
    parameters = []
    for key in keys:
        section, _, name = key.rpartition(".")
        parameters.append(_parameter(key, documents[section][name]))
    return parameters


def preset_values(preset: str) -> dict[str, str]:
    """The values of a preset by dotted key, as an option would be given them; none where there is no such preset."""
    try:
        config: Any = ExperimentConfig.from_preset(preset)
    except (ValueError, OSError):
        return {}
    values = {}
    for key in dotted_keys(ExperimentConfig):
        value = config
        for name in key.split("."):
            value = getattr(value, name)
        values[key] = _text(value)
    return values


def attribute_docs(cls: type) -> dict[str, str]:
    """The string that stands below each attribute of a class."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    documents = {}
    for attribute, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(attribute, ast.AnnAssign)
            and isinstance(attribute.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            documents[attribute.target.id] = inspect.cleandoc(str(below.value.value))
    return documents


def parse(key: str, text: str) -> Any:
    """The value that an option's text means for the key; the strict reader checks it later.

    Text is taken as it stands, lists are separated by commas, all else is read as YAML; null is no value.
    """
    hint = _hint(key)
    if type(None) in get_args(hint) and text == "null":
        return None
    kind = _without_none(hint)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        entries = [entry.strip() for entry in text.strip("[]()").split(",") if entry.strip()]
        return [entry if item is str else _yaml(entry) for entry in entries]
    return text if kind is str or get_origin(kind) is Literal else _yaml(text)


def _parameter(key: str, document: str) -> inspect.Parameter:
    names = [f"--{key}", *([ALIASES[key]] if key in ALIASES else [])]
    kind = _without_none(_hint(key))
    metavar = {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT"}.get(kind, "NAME")
    if get_origin(kind) is tuple:
        metavar = "A,B,…"
    if get_origin(kind) is Literal:
        document = f"{document} One of: {', '.join(get_args(kind))}."
    option = typer.Option(
        *names,
        metavar=metavar,
        help=escape(" ".join(document.split())),
        rich_help_panel=f"Settings: {key.partition('.')[0]}" if "." in key else None,
        show_default=False,
    )
    return inspect.Parameter(
        key.replace(".", "__"),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def _hint(key: str) -> Any:
    hint: Any = ExperimentConfig
    for name in key.split("."):
        hint = get_type_hints(hint)[name]
    return hint


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (argument for argument in get_args(hint) if argument is not type(None))
    return hint


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
