"""`sfi presets`: the experiments that can be trained by name."""

import re
from importlib import resources
from itertools import takewhile
from typing import Annotated

import typer

from sfiformer.cli.options import Debug


def presets(
    name: Annotated[
        str | None, typer.Argument(metavar="PRESET", help="Print this one, resolved, as YAML.")
    ] = None,
    debug: Debug = False,
) -> None:
    """List the presets; or print one with all its settings, a start for a YAML file of your own."""
    from sfiformer.config import ExperimentConfig
    from sfiformer.presets import preset_names

    if name is not None:
        print(ExperimentConfig.from_preset(name).to_yaml(), end="")
        return
    names = preset_names()
    width = max(map(len, names))
    for preset in names:
        print(f"{preset:{width}}  {_summary(preset)}")


def register(app: typer.Typer) -> None:
    app.command()(presets)


def _summary(preset: str) -> str:
    """The first sentence of the comment that a preset begins with."""
    text = (resources.files("sfiformer.presets") / f"{preset}.yaml").read_text(encoding="utf-8")
    comment = " ".join(
        line.lstrip("# ") for line in takewhile(lambda line: line[:1] == "#", text.splitlines())
    )
    return re.split(r"(?<=[.?]) ", comment)[0].rstrip(".")
