"""`sfi eval RUN`: the scores of a trained model."""

import json
import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from sfiformer.cli.options import Checkpoint, Debug, Device, LabelledGraphs, SkipBad, SmilesColumn


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of `sfi train`.")],
    split: Annotated[
        Literal["train", "val", "test"] | None,
        typer.Option(
            "--split", metavar="train|val|test", help="A split of the run's data; test if not given."
        ),
    ] = None,
    data: LabelledGraphs = None,
    checkpoint: Checkpoint = "best",
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", metavar="N", help="Graphs at a time; as in training if not given."),
    ] = None,
    device: Device = "auto",
    skip_bad: SkipBad = False,
    smiles_column: SmilesColumn = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Measure a run's model on a split of its data, or on a file of labelled graphs."""
    from sfiformer.training import evaluate as measure

    scores = measure(
        run,
        split=split,
        checkpoint=checkpoint,
        data=data,
        batch_size=batch_size,
        device=device,
        skip_bad=skip_bad,
        smiles_column=smiles_column,
    )
    if json_output:
        # JSON knows no NaN: a metric that is not defined is null.
        print(json.dumps({name: None if math.isnan(value) else value for name, value in scores.items()}))
    else:
        for name, value in scores.items():
            print(f"{name} {value:.6g}")


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
