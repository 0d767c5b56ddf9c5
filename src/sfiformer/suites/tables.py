"""A suite's results as Markdown, CSV and LaTeX. Ours and published figures never share a cell."""

import csv
import io
from collections.abc import Sequence

from sfiformer.suites.results import Cell, Results, Row

PLACES = {1: "1st", 2: "2nd", 3: "3rd"}
# What LaTeX would take for a command; all at once, since what stands for one holds others.
LITERALLY = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
)
MACROS = {1: "first", 2: "second", 3: "third"}


def markdown(results: Results) -> str:
    """The table, its columns aligned so that it reads as plain text too."""
    headings = ["model"]
    for dataset, label in results.labels.items():
        metric = results.metrics[dataset]
        headings.append(f"{label}{f', {metric}' if metric else ''}: ours")
        if results.compared(dataset):
            headings.append(f"{label}: published")
    ranks = {dataset: results.ranks(dataset) for dataset in results.labels}
    lines = []
    for row in results.rows:
        line = [row.label]
        for dataset in results.labels:
            place = ranks[dataset].get(row.label) if row.model else None
            text = cell_text(row.ours.get(dataset))
            line.append(f"**{text}** (1st)" if place == 1 else f"{text} ({PLACES[place]})" if place else text)
            if results.compared(dataset):
                line.append(_published_text(row, dataset))
        lines.append(line)
    return aligned(headings, lines)


def details(results: Results) -> str:
    """What else the runs tell: generalisation, sparsity, cost."""
    headings = ["model", "dataset", "train-test gap", "zero attention", "parameters", "time of a run"]
    lines = []
    for row in results.rows:
        for dataset, cell in row.ours.items():
            gap, zeros = cell.figure("gap"), cell.figure("zero_share")
            seconds, parameters = cell.figure("seconds"), cell.figure("parameters")
            lines.append(
                [
                    row.label,
                    results.labels[dataset],
                    str(gap or "–"),
                    f"{zeros.mean:.1%}" if zeros else "–",
                    f"{parameters.mean:,.0f}" if parameters else "–",
                    f"{seconds.mean:,.0f} s" if seconds else "–",
                ]
            )
    return aligned(headings, lines)


def table_csv(results: Results) -> str:
    """A line for each model on each dataset; what is published stands in columns of its own."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    split = results.group.split
    ours = (
        f"{split}_mean",
        f"{split}_sd",
        "place",
        "gap_mean",
        "gap_sd",
        "zero_share",
        "parameters",
        "seconds",
    )
    theirs = ("mean", "sd", "source")
    writer.writerow(
        ["dataset", "metric", "model", "seeds_wanted", "seeds_finished"]
        + [f"ours_{name}" for name in (*ours, "problems")]
        + [f"published_{name}" for name in theirs]
    )
    for dataset in results.labels:
        ranks = results.ranks(dataset)
        for row in results.rows:
            cell = row.ours.get(dataset)
            shown = row.published.get(dataset)
            line: list[object] = [dataset, results.metrics[dataset], row.label]
            if cell is None:
                line += [""] * (2 + len(ours) + 1)
            else:
                metric, gap = cell.figure(), cell.figure("gap")
                means = [cell.figure(key) for key in ("zero_share", "parameters", "seconds")]
                line += [len(cell.seeds), len(cell.values(split))]
                line += [metric and metric.mean, metric and metric.sd, ranks.get(row.label)]
                line += [gap and gap.mean, gap and gap.sd, *(figure and figure.mean for figure in means)]
                line += ["; ".join(f"seed {seed}: {reason}" for seed, reason in cell.problems.items())]
            line += [shown and shown.mean, shown and shown.sd]
            line += [results.sources[row.sources[dataset]] if shown else ""]
            writer.writerow(["" if value is None else value for value in line])
    return buffer.getvalue()


def latex(results: Results) -> str:
    """A booktabs table; the places are marked by the macros \\first, \\second and \\third, as in the paper."""
    columns, top, below, rules = "l", ["Model"], [""], []
    for dataset, label in results.labels.items():
        width = 2 if results.compared(dataset) else 1
        start = len(columns) + 1
        columns += "c" * width
        heading = escape(f"{label} {results.metrics[dataset]}".strip())
        top.append(f"\\multicolumn{{{width}}}{{c}}{{{heading}}}")
        below += ["ours", "published"][:width]
        rules.append(f"\\cmidrule(lr){{{start}-{start + width - 1}}}")
    lines = [
        "% needs booktabs and xcolor",
        "\\providecommand{\\first}[1]{\\textbf{\\textcolor[rgb]{0.1,0.65,0.3}{#1}}}",
        "\\providecommand{\\second}[1]{\\textbf{\\textcolor[rgb]{0.9,0.4,0}{#1}}}",
        "\\providecommand{\\third}[1]{\\textbf{\\textcolor[rgb]{0.4,0.4,0.8}{#1}}}",
        f"\\begin{{tabular}}{{{columns}}}",
        "\\toprule",
        " & ".join(top) + r" \\",
        "".join(rules),
        " & ".join(below) + r" \\",
        "\\midrule",
    ]
    ranks = {dataset: results.ranks(dataset) for dataset in results.labels}
    for row in results.rows:
        line = [escape(row.label)]
        for dataset in results.labels:
            place = ranks[dataset].get(row.label) if row.model else None
            text = escape(cell_text(row.ours.get(dataset)))
            line.append(f"\\{MACROS[place]}{{{text}}}" if place else text)
            if results.compared(dataset):
                line.append(escape(_published_text(row, dataset)))
        lines.append(" & ".join(line) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in notes(results))]
    return "\n".join(lines) + "\n"


def notes(results: Results) -> list[str]:
    """What one must know to read the table."""
    seeds = len(results.group.seeds)
    count = f"mean ± s.d. (n − 1) over {seeds} seeds" if seeds > 1 else "one seed, so without an s.d."
    lines = [
        f"Ours: {count}, at the epoch that was best on the validation graphs; 1st, 2nd and 3rd among ours with "
        "all seeds."
    ]
    if results.sources:
        lines.append(
            "Published: figures of others, not computed here, from [1] where a figure names no other source; a row "
            "without ours is not part of the suite."
        )
        lines += [f"[{number}] {source}." for number, source in enumerate(results.sources, 1)]
    return [*lines, *results.group.notes]


def problems(results: Results) -> list[str]:
    """The runs that have no result, with their reasons."""
    return [
        f"{dataset}/{row.model}/seed-{seed}: {reason}"
        for row in results.rows
        for dataset, cell in row.ours.items()
        for seed, reason in cell.problems.items()
    ]


def cell_text(cell: Cell | None) -> str:
    """Ours in words: the mean, or why there is none."""
    if cell is None:
        return "–"
    figure = cell.figure()
    if figure is None:
        failed = sum(reason != "missing" for reason in cell.problems.values())
        return "failed" if failed else "missing"
    return (
        str(figure) if cell.whole else f"{figure} ({len(cell.values(cell.split))} of {len(cell.seeds)} seeds)"
    )


def aligned(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of equal width."""
    headings, *lines = [[text.replace("|", r"\|") for text in line] for line in (headings, *lines)]
    widths = [max(len(line[i]) for line in (headings, *lines)) for i in range(len(headings))]

    def padded(line: Sequence[str]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([padded(headings), rule, *map(padded, lines)])


def escape(text: str) -> str:
    """Text for LaTeX, with the paper's symbols."""
    text = text.translate(LITERALLY)
    for symbol, macro in (
        ("_", r"\_"),
        ("%", r"\%"),
        ("&", r"\&"),
        ("#", r"\#"),
        ("λ*", r"$\lambda^*$"),
        ("λ", r"$\lambda$"),
        ("α", r"$\alpha$"),
        ("Ã", r"$\tilde{A}$"),
        ("±", r"$\pm$"),
        ("↑", r"$\uparrow$"),
        ("↓", r"$\downarrow$"),
        ("–", "--"),
    ):
        text = text.replace(symbol, macro)
    return text


def _published_text(row: Row, dataset: str) -> str:
    """A published figure, with its source where that is not the first."""
    source = row.sources.get(dataset, 0)
    return str(row.published.get(dataset, "–")) + (f" [{source + 1}]" if source else "")
