"""Pictures of a run's attention, written to files: what `sfi explain` does."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sfiformer import figures
from sfiformer.errors import UserError
from sfiformer.explain.charts import draw_statistics
from sfiformer.explain.maps import draw_iterations, draw_maps
from sfiformer.explain.record import Checkpoint, GraphRecord, Split, record_run
from sfiformer.explain.runs import ExplainedRun
from sfiformer.explain.statistics import Statistics, collect, write_statistics

LONGEST = 64  # characters of a name, which may have three bytes each


def explain_graph(
    run: str | Path,
    graph: int | str,
    *,
    split: Split = "test",
    layer: int | None = None,
    head: int | None = None,
    checkpoint: Checkpoint = "best",
    data: str | Path | None = None,
    skip_bad: bool = False,
    smiles_column: str | None = None,
    out: str | Path | None = None,
    page: bool = True,
    say: Callable[[str], object] | None = None,
) -> list[Path]:
    """Draw what a run's attention does with one graph, and return the files written.

    Args:
        run: a run folder of `sfiformer.train`.
        graph: its number in the split, from 0, or its id.
        split: of the run's own data.
        layer: numbered from 1; None draws the maps of all layers, and the iterations of the last.
        head: numbered from 1; None for all.
        checkpoint: which weights.
        data: another place of the run's data (a folder), or a file of graphs, labelled or not.
        skip_bad, smiles_column: of that file, as for `sfiformer.evaluate`.
        out: folder for the files; None for RUN/explain.
        page: also write the flows as an interactive page.
        say: is told which graph it is, by number and id.
    """
    _require_matplotlib()
    folder = _folder(run, out)
    seen = record_run(run, graph, split, checkpoint, data, skip_bad=skip_bad, smiles_column=smiles_column)
    layers = [_chosen("layer", layer, len(seen.layers))] if layer is not None else range(len(seen.layers))
    heads = [_chosen("head", head, seen.layers[0].heads)] if head is not None else None
    if say is not None:
        say(f"{seen.title}: {seen.num_nodes} nodes")
    stem = folder / file_name(seen.name)
    written = []
    for number in layers:
        figure = draw_maps(seen, number, heads)
        written += figures.save(figure, stem.with_name(f"{stem.name}-maps-layer{number + 1}"))
    if seen.layers[layers[-1]].has_proximal:
        figure = draw_iterations(seen, layers[-1], heads)
        written += figures.save(figure, stem.with_name(f"{stem.name}-iterations-layer{layers[-1] + 1}"))
    if page:
        written.append(_write_page(seen, stem.with_name(f"{stem.name}.html"), layer, head))
    return written


def explain_statistics(
    run: str | Path,
    *,
    against: str | Path | None = None,
    graphs: int | None = 200,
    split: Split = "test",
    checkpoint: Checkpoint = "best",
    data: str | Path | None = None,
    skip_bad: bool = False,
    smiles_column: str | None = None,
    out: str | Path | None = None,
) -> tuple[list[Statistics], list[Path]]:
    """Take and draw the statistics of a run's attention over a split; returns them, and the files written.

    Args:
        run: a run folder of `sfiformer.train`.
        against: another run on the same graphs, beside it.
        graphs: take the first so many; None for all.
        split, checkpoint, data, skip_bad, smiles_column, out: as in `explain_graph`.
    """
    _require_matplotlib()
    folder = _folder(run, out)
    if graphs is not None and graphs < 1:
        raise UserError(f"the number of graphs is {graphs}; it must be at least 1")
    paths = [Path(run)] if against is None else [Path(run), Path(against)]
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    statistics = []
    for name, path in zip(names, paths, strict=True):
        opened = ExplainedRun(
            path,
            split=split,
            checkpoint=checkpoint,
            data=data,
            skip_bad=skip_bad,
            smiles_column=smiles_column,
        )
        count = len(opened) if graphs is None else min(graphs, len(opened))
        statistics.append(collect(name, opened.records(range(count))))
    _require_same_graphs(paths, statistics)
    stem = folder / f"{opened.place}-statistics"
    written = figures.save(draw_statistics(statistics), stem)
    return statistics, [*written, *write_statistics(statistics, stem)]


def file_name(name: str) -> str:
    """How the pictures of a graph begin: test[3] is test-3; what cannot be kept of another name, a digest tells apart."""
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-")[:LONGEST]
    if plain == name.replace("[", "-", 1).removesuffix("]"):
        return plain
    return f"{plain}-{hashlib.sha256(name.encode(errors='backslashreplace')).hexdigest()[:8]}"


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'sfiformer[plot]'") from None


def _require_same_graphs(paths: Sequence[Path], statistics: Sequence[Statistics]) -> None:
    first = statistics[0]
    for path, other in zip(paths, statistics, strict=True):
        same = np.array_equal(first.nodes, other.nodes) and np.array_equal(first.pairs, other.pairs)
        if not same:
            raise UserError(f"{path} was not trained on the graphs of {paths[0]}: the two cannot be compared")


def _chosen(what: str, number: int, count: int) -> int:
    if not 1 <= number <= count:
        raise UserError(f"there is no {what} {number}: the model has {count}, numbered from 1")
    return number - 1


def _folder(run: str | Path, out: str | Path | None) -> Path:
    folder = Path(run) / "explain" if out is None else Path(out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose a folder for the pictures")
    return folder


def _write_page(record: GraphRecord, path: Path, layer: int | None, head: int | None) -> Path:
    from sfiformer.explain.page import write_page

    return write_page(record, path, layer=layer, head=head)
