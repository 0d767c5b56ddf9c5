"""`sfi train PRESET`: train a model, or say with --dry-run what would be trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfiformer.cli.options import Debug, given, with_settings

if TYPE_CHECKING:
    from sfiformer.config import ExperimentConfig

HELP = """Train PRESET (a name that `sfi presets` lists, or a YAML file) into a run folder.

`sfi train custom --data.path FILE` trains on your own graphs: PyG .pt, JSON lines, or a CSV of SMILES.

The preset gives every setting below; an option changes one. `--dry-run` shows them all, resolved."""


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
            "--init-from", metavar="RUN", help="Start from a DFi-Former's run: SFi-Former+ (attention sfi)."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print settings, parameters and data facts; train nothing.")
    ] = False,
    debug: Debug = False,
    **settings: str | None,
) -> None:
    from sfiformer.config import ExperimentConfig

    config = ExperimentConfig.from_preset(preset, given(settings))
    if dry_run:
        _describe(config)
        return
    from sfiformer.training import train as run_training

    run_training(config, out or Path("runs") / Path(preset).stem, resume=resume, init_from=init_from)


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(with_settings(train))


def _describe(config: "ExperimentConfig") -> None:
    import torch

    from sfiformer.nn import SFiFormer
    from sfiformer.training import prepare

    prepared = prepare(config, encode=False)
    with torch.device("meta"):  # its parameters are counted, not made
        model = SFiFormer(prepared.config.model)
    print(prepared.config.to_yaml())
    print(prepared.facts)
    print(f"model: {model.extra_repr()}")
