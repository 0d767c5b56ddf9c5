"""`sfi train PRESET`: train a model, or say with --dry-run what would be trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperOption

from sfiformer.cli.options import Debug, given, list_bad, preset_values, with_settings

if TYPE_CHECKING:
    from sfiformer.config import ExperimentConfig

HELP = """Train PRESET (a name that `sfi presets` lists, or a YAML file) into a run folder.

`sfi train custom --data.path FILE` trains on your own graphs: PyG .pt, JSON lines, or a CSV of SMILES.

The preset gives every setting below; an option changes one. `sfi train PRESET --help` shows the preset's values, \
`--dry-run` all settings as the data resolve them."""


class TrainCommand(TyperCommand):
    """A command whose help shows the values of the preset that it is asked for with."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        preset = next((argument for argument in args if not argument.startswith("-")), None)
        if preset is not None and {"-h", "--help"} & set(args):
            values = preset_values(preset)
            for parameter in self.params:
                key = (parameter.name or "").replace("__", ".")
                if key in values and isinstance(parameter, TyperOption):
                    parameter.help = f"{parameter.help} {escape(f'[{preset}: {values[key]}]')}"
        return super().parse_args(ctx, args)


def train(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="A preset's name, or a YAML file.")],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The run folder; runs/PRESET if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in DIR, or start where there is nothing yet.")
    ] = False,
    init_from: Annotated[
        Path | None,
        typer.Option(
            "--init-from",
            metavar="RUN",
            help="Start from a DFi-Former's run: SFi-Former+ (attention sfi), or dfi.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print settings, parameters and data facts (fetched if need be); train nothing."
        ),
    ] = False,
    debug: Debug = False,
    **settings: str | None,
) -> None:
    from sfiformer.config import ExperimentConfig

    config = ExperimentConfig.from_preset(preset, given(settings))
    if dry_run:
        _describe(config)
        return
    from sfiformer.memory import keep_freed_memory
    from sfiformer.training import train as run_training

    keep_freed_memory()
    run_training(config, out or Path("runs") / Path(preset).stem, resume=resume, init_from=init_from)


def register(app: typer.Typer) -> None:
    app.command(help=HELP, cls=TrainCommand)(with_settings(train))


def _describe(config: "ExperimentConfig") -> None:
    import torch

    from sfiformer.nn import SFiFormer
    from sfiformer.training import prepare

    prepared = prepare(config, encode=False)
    with torch.device("meta"):  # its parameters are counted, not made
        model = SFiFormer(prepared.config.model)
    print(prepared.config.to_yaml())
    print(prepared.facts)
    list_bad(prepared.bad)
    print(f"model: {model.extra_repr()}")
