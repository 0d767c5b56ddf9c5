"""The report of a suite: its tables and figures, in one folder."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from sfiformer import figures
from sfiformer.errors import UserError
from sfiformer.files import whole_file, whole_folder
from sfiformer.suites import pictures, tables
from sfiformer.suites.folder import SuiteFolder
from sfiformer.suites.plan import Run, as_options, default_out, plan
from sfiformer.suites.results import Results, collect
from sfiformer.suites.suite import Suite

METRIC = {"test": "Test", "val": "Validation"}


@dataclass(frozen=True)
class Report:
    """What was written."""

    text: str
    """The main table, to be printed."""
    files: list[Path]


def report_suite(suite: Suite, out: Path | None = None) -> Report:
    """Write report.md, and for each table of the suite a CSV file, a LaTeX file and its figures, to `out`/report, in place of
    what was there.

    Raises:
        UserError: where the suite has no folder yet.
    """
    folder = SuiteFolder(out or default_out(suite))
    if not folder.path.is_dir():
        own = (
            suite.place
            if suite.place.endswith((".yaml", ".yml")) and Path(suite.place).is_file()
            else suite.name
        )
        raise UserError(f"there is no folder {folder.path}: sfi suite run {own} makes it")
    record = folder.record(suite.name)
    runs = plan(suite, record.overrides)
    sections, written = [_introduction(suite, record.overrides)], ["report.md"]
    main = ""
    with whole_folder(folder.path / "report") as place:
        for group in suite.groups:
            results = collect(suite, group, runs, folder, record)
            table = f"## {group.title}\n\n{tables.markdown(results)}\n"
            table += "".join(f"\n- {note}" for note in [*tables.notes(results), *_missing(results)])
            main = main or table
            _write(place / f"{group.name}.csv", tables.table_csv(results))
            _write(place / f"{group.name}.tex", tables.latex(results))
            drawn, names = _draw(place, results, runs, folder)
            sections += [table, f"Besides the metric:\n\n{tables.details(results)}", *drawn]
            written += [f"{group.name}.csv", f"{group.name}.tex", *names]
        _write(place / "report.md", "\n\n".join(sections) + "\n")
    return Report(main + "\n", [folder.path / "report" / name for name in written])


def _introduction(suite: Suite, overrides: dict) -> str:
    text = f"# {suite.title}\n\nThe report of the suite `{suite.name}`, made by `sfi suite report`."
    if overrides:
        text += f" All runs with `{shlex.join(as_options(overrides))}`."
    return text


def _missing(results: Results) -> list[str]:
    problems = tables.problems(results)
    missing = sum(text.endswith(": missing") for text in problems)
    lines = [f"{missing} of the table's runs have not been finished."] if missing else []
    return lines + [f"Failed: {text}." for text in problems if not text.endswith(": missing")]


def _draw(
    place: Path, results: Results, runs: dict[str, Run], folder: SuiteFolder
) -> tuple[list[str], list[str]]:
    """Draw the group's figures; what the report says of them, and the names of their files."""
    group = results.group
    wanted = {}
    try:
        if group.gap:
            caption = "Train-test gap over the epochs (mean, and a band of one s.d. over the seeds)"
            wanted[f"{group.name}-gap"] = (pictures.gap_figure(results, folder), caption)
        for key in group.curves:
            symbol = pictures.SYMBOLS.get(key, key)
            caption = f"{METRIC[group.split]} metric and share of zero attention against {symbol} (error bars: one s.d.)"
            wanted[f"{group.name}-{key.rpartition('.')[2]}"] = (
                pictures.curve_figure(results, key, runs),
                caption,
            )
    except ImportError:
        return ["No figures: matplotlib is not installed (pip install 'sfiformer[plot]')."], []
    said, names = [], []
    for stem, (figure, caption) in wanted.items():
        if figure is not None:
            names += [path.name for path in figures.save(figure, place / stem)]
            said.append(f"![{caption}]({stem}.png)\n\n{caption}.")
    return said, names


def _write(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode())
