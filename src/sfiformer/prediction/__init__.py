"""Predictions of a trained model for new graphs.

table = sfiformer.predict("runs/mine", "new.jsonl")        # a dict of columns; pandas.DataFrame(table) takes it
write_predictions("runs/mine", "new.jsonl", "out.parquet")  # the same, streamed to a file
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sfiformer.data.source import Bad
from sfiformer.errors import UserError
from sfiformer.prediction.predictor import Predictor
from sfiformer.prediction.tables import table_file

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["Predictor", "Written", "predict", "write_predictions"]


class Written(NamedTuple):
    """What `write_predictions` did."""

    rows: int
    bad: Bad  # rows of the source that were left out: (place, reason)


def predict(
    run: str | Path,
    source: "str | Path | Sequence[Data]",
    *,
    checkpoint: str = "best",
    batch_size: int = 32,
    device: str = "auto",
    bad: Bad | None = None,
    smiles_column: str | None = None,
) -> dict[str, list[Any]]:
    """The predictions of a run's model for all graphs of a source, as columns: one row a graph, node or link.

    Args:
        run: a run folder of `sfiformer.train`.
        source: a list of PyG `Data`, or a file: PyG .pt, JSON lines, or a CSV of SMILES. Labels are not needed.
        checkpoint: "best" or "last".
        batch_size: graphs at a time. The predictions depend on it by rounding alone.
        device: "auto" is a GPU where there is one.
        bad: a list to which bad rows are added as (place, reason); without one, the first is an error, or they are
            left out with a warning where the run left out its own.
        smiles_column: of a CSV; None: as in training, or found.

    Returns:
        "graph" (its id, or its place in the source), "node" or "source" and "target" where rows are of nodes or
        links, and the columns of `sfiformer.data.decode.decode`: class names, probabilities, values in the
        units of the training data.
    """
    predictor = Predictor.from_run(run, checkpoint=checkpoint, device=device)
    table: dict[str, list[Any]] = {}
    for part in predictor.tables(source, batch_size=batch_size, bad=bad, smiles_column=smiles_column):
        for name, column in part.items():
            table.setdefault(name, []).extend(column)
    return table


def write_predictions(
    run: str | Path,
    source: "str | Path | Sequence[Data]",
    out: str | Path,
    *,
    checkpoint: str = "best",
    batch_size: int = 32,
    device: str = "auto",
    skip_bad: bool = False,
    smiles_column: str | None = None,
) -> Written:
    """`predict` into a file, .csv or .parquet, a batch in memory at a time; it appears whole or not at all.

    With `skip_bad`, or where the run left out its own, bad rows are left out and listed.
    """
    if isinstance(source, str | Path) and Path(source).resolve() == Path(out).resolve():
        raise UserError(f"{out} is the input itself: choose another file for the predictions")
    rows = 0
    with table_file(Path(out)) as write:
        predictor = Predictor.from_run(run, checkpoint=checkpoint, device=device)
        bad: Bad | None = [] if skip_bad or predictor.skip_bad else None
        for part in predictor.tables(source, batch_size=batch_size, bad=bad, smiles_column=smiles_column):
            write(part)
            rows += len(part["graph"])
    return Written(rows, bad or [])
