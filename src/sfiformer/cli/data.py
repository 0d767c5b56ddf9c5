"""`sfi data list|fetch|info`: the datasets that are known by name, and files of one's own."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from sfiformer.cli.options import Debug, list_bad, parse

commands = typer.Typer(
    help="The benchmark datasets, and what a file of your own holds.", no_args_is_help=True
)

Root = Annotated[str, typer.Option("--root", metavar="DIR", help="Folder for downloads and caches.")]
GENERATED = ("cluster", "pattern")  # where the official files are not at hand


@commands.command("list")
def list_datasets(debug: Debug = False) -> None:
    """The benchmark datasets: size, task and licence."""
    from sfiformer.data.official import DATASETS

    print(f"{'name':16} {'graphs':>8} {'nodes':>7} {'edges':>8}  {'task':20} licence")
    for dataset in DATASETS.values():
        task = f"{dataset.task.level} {dataset.task.kind}"
        licence = "generated here" if dataset.name in GENERATED else dataset.licence.split(" (")[0]
        print(
            f"{dataset.name:16} {sum(dataset.graphs):8,} {dataset.mean_nodes:7,.1f} {dataset.mean_edges:8,.1f}  "
            f"{task:20} {licence}"
        )


@commands.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset that `sfi data list` shows.")],
    root: Root = "data-root",
    mirror: Annotated[
        str | None,
        typer.Option(
            "--mirror", metavar="DIR|URL", help="Where the archives lie, if not at the official links."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Download and unpack a dataset under DIR. An interrupted download is resumed."""
    from sfiformer.data.official import fetch as bring
    from sfiformer.data.official import find

    if find(name).name in GENERATED:
        print(f"{name} is generated when it is trained on; there is nothing to fetch")
        return
    print(bring(name, root, mirror))


@commands.command()
def info(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A dataset's name, or a file of graphs.")],
    root: Root = "data-root",
    smiles_column: Annotated[
        str | None,
        typer.Option("--smiles-column", metavar="NAME", help="Column of a CSV; found if not given."),
    ] = None,
    targets: Annotated[
        str | None, typer.Option("--targets", metavar="A,B,…", help="Columns of a CSV; found if not given.")
    ] = None,
    split_column: Annotated[
        str,
        typer.Option("--split-column", metavar="NAME", help="Column or key that says train, val or test."),
    ] = "split",
    level: Annotated[
        Literal["graph", "node", "link"] | None,
        typer.Option("--level", metavar="graph|node|link", help="What labels are of; found if not given."),
    ] = None,
    kind: Annotated[
        Literal["classification", "binary", "multilabel", "regression", "ranking"] | None,
        typer.Option("--kind", metavar="NAME", help="What labels are; found if not given."),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad", help="Leave out graphs that cannot be read, and list them, instead of stopping."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """What a dataset or a file of your own holds, as training would read it.

    The options but --root are for a file, and mean what `sfi train` has under --data."""
    from sfiformer.data.official import DATASETS, find

    if name.lower() not in DATASETS and (Path(name).suffix or Path(name).exists()):
        from sfiformer.data.custom import load_custom

        own = load_custom(
            name,
            smiles_column=smiles_column,
            targets=None if targets is None else parse("data.targets", targets),
            split_column=split_column,
            level=level,
            kind=kind,
            skip_bad=skip_bad,
        )
        list_bad(own.bad)
        print(own.describe())
        return
    dataset = find(name)
    nodes, edges = f"{dataset.mean_nodes:,.2f}", f"{dataset.mean_edges:,.2f}"
    raw = Path(root) / dataset.folder / "raw"
    if dataset.name in GENERATED:
        place = "generated when it is trained on"
    elif all((raw / file).is_file() for file in dataset.files):
        place = f"in {raw}"
    else:
        place = f"not in {root} yet; sfi data fetch {dataset.name} brings it"
    sizes = " / ".join(f"{count:,}" for count in dataset.graphs)
    print(f"{dataset.name}: {sizes} graphs (train / val / test), {nodes} nodes and {edges} edges on average")
    print(f"task: {dataset.task.describe()}")
    print(f"node features: {dataset.node_width}; edge features: {dataset.edge_width or 'none'}")
    print(f"licence: {dataset.licence}")
    print(f"files: {place}")


def register(app: typer.Typer) -> None:
    app.add_typer(commands, name="data")
