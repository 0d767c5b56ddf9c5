"""`sfi explain RUN`: pictures of what a trained model's attention does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfiformer.cli.options import Checkpoint, Debug, SkipBad, SmilesColumn, Split
from sfiformer.errors import UserError

if TYPE_CHECKING:
    from sfiformer.explain import Statistics


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of `sfi train`.")],
    graph: Annotated[
        str | None,
        typer.Option(
            "--graph", metavar="I|ID", help="Draw this graph of the split: its number, from 0, or its id."
        ),
    ] = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Sparsity and reach over the split.", show_default=False)
    ] = False,
    split: Split = "test",
    layer: Annotated[
        int | None, typer.Option("--layer", metavar="L", help="Only this layer, numbered from 1.")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="H", help="Only this head, numbered from 1.")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="With --graph, also write an interactive HTML page.")
    ] = True,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RUN", help="With --statistics, another run beside this one."),
    ] = None,
    graphs: Annotated[
        int, typer.Option("--graphs", metavar="K", help="With --statistics, the first K graphs of the split.")
    ] = 200,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="FILE", help="Graphs of your own, labelled or not, in place of the run's data."
        ),
    ] = None,
    skip_bad: SkipBad = False,
    smiles_column: SmilesColumn = None,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the files; RUN/explain if not given."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw the attention of a run's model: maps of one graph (--graph), or statistics of many (--statistics).

    Figures are written as PNG and SVG, statistics also as JSON and CSV."""
    if graph is None and not statistics:
        raise UserError("say what to explain: --graph I for one graph, --statistics for the split")
    if against is not None and not statistics:
        raise UserError("--against compares statistics: give --statistics as well")
    from sfiformer.explain import explain_graph, explain_statistics

    written = []
    if graph is not None:
        written += explain_graph(
            run,
            int(graph) if _is_number(graph) else graph,
            split=split,
            layer=layer,
            head=head,
            checkpoint=checkpoint,
            data=data,
            skip_bad=skip_bad,
            smiles_column=smiles_column,
            out=out,
            page=page,
            say=print,
        )
    if statistics:
        taken, files = explain_statistics(
            run,
            against=against,
            graphs=graphs,
            split=split,
            checkpoint=checkpoint,
            data=data,
            skip_bad=skip_bad,
            smiles_column=smiles_column,
            out=out,
        )
        written += files
        for each in taken:
            print(_line(each))
    for path in written:
        print(path)


def register(app: typer.Typer) -> None:
    app.command()(explain)


def _is_number(graph: str) -> bool:
    """Whether this is a number, which 007 is not: an id."""
    return graph.removeprefix("-").isdecimal() and str(int(graph)) == graph


def _line(statistics: "Statistics") -> str:
    keys, hops = statistics.support.mean(), statistics.mean_hops.mean()
    return (
        f"{statistics.name}: {statistics.zeros.mean():.1%} of attention exactly zero; a query draws from "
        f"{keys:.1f} of {statistics.nodes.mean():.1f} nodes, {hops:.1f} hops away on average"
    )
