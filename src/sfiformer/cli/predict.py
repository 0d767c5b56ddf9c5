"""`sfi predict RUN INPUT`: predictions for new graphs, as a table."""

from pathlib import Path
from typing import Annotated

import typer

from sfiformer.cli.options import Checkpoint, Debug, Device, list_bad


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of `sfi train`.")],
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Graphs: PyG .pt, JSON lines, or a CSV of SMILES.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The table to write, .csv or .parquet.")
    ] = Path("predictions.csv"),
    checkpoint: Checkpoint = "best",
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", metavar="N", help="Graphs at a time; it changes predictions by rounding alone."
        ),
    ] = 32,
    device: Device = "auto",
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Leave out graphs that cannot be read, and list them, instead of stopping.",
        ),
    ] = False,
    smiles_column: Annotated[
        str | None,
        typer.Option(
            "--smiles-column", metavar="NAME", help="Column of a CSV; as in training, or found, if not given."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Predict for new graphs: one row a graph (or node, or link), with class names and in the data's units.

    Labels are not needed. The graphs are streamed, and the table appears whole or not at all."""
    from sfiformer.prediction import write_predictions

    written = write_predictions(
        run,
        source,
        out,
        checkpoint=checkpoint,
        batch_size=batch_size,
        device=device,
        skip_bad=skip_bad,
        smiles_column=smiles_column,
    )
    list_bad(written.bad)
    print(f"{out}: {written.rows:,} rows")


def register(app: typer.Typer) -> None:
    app.command()(predict)
