"""The figures of training steps in README and docs/speed.md are those of the committed outputs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUTPUTS = ROOT / "benchmarks" / "results"
SHAPES = ("voc", "peptides", "mnist", "cluster")
ON_CPU = (*SHAPES, "molecules")
README, PAGE = (ROOT / "README.md").read_text(), (ROOT / "docs" / "speed.md").read_text()


def _steps(place: str) -> dict[str, dict[str, tuple[float, float]]]:
    return _of_file(OUTPUTS / f"training-{place}.txt")


def _of_file(path: Path) -> dict[str, dict[str, tuple[float, float]]]:
    """Milliseconds a step and the peak of memory (0 where it is not given), by shape and model."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for line in path.read_text().splitlines():
        if shape := re.match(r"(\w+): \d+ graphs of", line):
            found[shape[1]] = {}
        elif row := re.match(r"  ([a-z-]+) +[\d,]+ +(\d+\.\d+) +\d+\.\d+ +\d+ +\d+\.\d+ +(\d+)?", line):
            memory = float(row[3]) if row[3] else 0.0
            list(found.values())[-1][row[1]] = float(row[2]), memory
    assert tuple(sorted(found)) in (tuple(sorted(SHAPES)), tuple(sorted(ON_CPU)))
    return found


def _row(text: str, name: str) -> list[str]:
    """The cells of the one table row that begins like this."""
    (line,) = re.findall(rf"^\| {re.escape(name)}[^|]*\|(.*)\|$", text, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def test_the_readme_has_the_steps_of_the_outputs():
    gpu, cpu = (_steps(place) for place in ("h200", "cpu"))
    ratios = [gpu[shape]["pyg"][0] / gpu[shape]["sfi"][0] for shape in SHAPES]
    rows = {
        "SFi-Former, ms a step": [f"{gpu[shape]['sfi'][0]:.1f}" for shape in SHAPES],
        "PyG, ms a step": [f"{gpu[shape]['pyg'][0]:.1f}" for shape in SHAPES],
        "PyG / SFi-Former": [f"{ratio:.1f}" for ratio in ratios],
        "memory, SFi": [f"{gpu[shape]['sfi'][1] / gpu[shape]['pyg'][1]:.2f}" for shape in SHAPES],
        "time of a step": [f"{cpu[shape]['sfi'][0] / cpu[shape]['pyg'][0]:.2f}" for shape in SHAPES],
    }
    assert {name: _row(README, name) for name in rows} == rows
    molecules = cpu["molecules"]["sfi"][0] / cpu["molecules"]["pyg"][0]
    assert f"a step of SFi-Former takes {molecules:.2f} times as long there" in README


def test_the_readme_also_has_the_ratios_to_the_quickest_steps_of_pyg():
    ours = _steps("h200")
    theirs = [ours, *(_of_file(path) for path in sorted((OUTPUTS / "earlier").glob("training-h200-*.txt")))]
    assert len(theirs) == 3
    ratios = [min(steps[shape]["pyg"][0] for steps in theirs) / ours[shape]["sfi"][0] for shape in SHAPES]
    *first, last = (f"{ratio:.1f}" for ratio in ratios)
    assert f"the ratios are {', '.join(first)} and {last}." in README
    assert (
        f"training steps {min(ratios):.1f} to {max(ratios):.1f} times as fast as the quickest of PyG's"
        in README
    )


def test_the_page_has_what_varies_and_how_much_shorter_steps_became():
    earlier = [_of_file(OUTPUTS / "earlier" / f"training-h200-{number}.txt") for number in (1, 2)]
    varied, shorter = [], {True: [], False: []}
    for shape, models in _steps("h200").items():
        for name in set(models) - {"pyg"}:
            first, second = (steps[shape][name][0] for steps in earlier)
            varied.append(100 * abs(first / second - 1))
            shorter[name == "sfi"].append(100 * (1 - models[name][0] / second))
    ours, others = (f"{min(shorter[key]):.0f} to {max(shorter[key]):.0f} %" for key in (True, False))
    words = " ".join(PAGE.split())
    assert f"Ours hardly vary: by {min(varied):.0f} to {max(varied):.0f} % between the machines" in words
    assert f"steps of SFi became {ours} shorter, and those of the others {others}:" in words


def test_the_page_has_how_fast_batches_are_gathered():
    section = " ".join(PAGE.split("## Gathering a batch\n")[1].split())
    times = {
        place: dict(
            re.findall(r"^(\S.*?) {2,}[\d.]+ +([\d.]+)$", (OUTPUTS / f"data-{place}.txt").read_text(), re.M)
        )
        for place in ("cpu", "h200")
    }
    gpu, cpu, disk = (times["h200"], times["cpu"]["GraphStore on cpu"], times["cpu"]["GraphStore on disk"])
    assert f"GPU {float(gpu['GraphStore, replayed']):.0f} times as fast as PyG's loader" in section
    assert f"and {float(gpu['GraphStore on cuda']):.0f} times as fast by plain calls" in section
    assert f"it is {cpu} times as fast, and {disk} times from a store on the disk" in section


@pytest.mark.parametrize(("place", "heading"), [("h200", "on a GPU"), ("cpu", "on a CPU")])
def test_the_page_of_speed_has_them(place, heading):
    section = PAGE.split(f"## A training step {heading}\n")[1].split("\n## ")[0]
    digits = 1 if place == "h200" else 0
    for shape, models in _steps(place).items():
        step = {name: time for name, (time, _) in models.items()}
        times = [f"{step[name]:.{digits}f}" for name in ("sfi", "sfi-default", "dfi", "softmax", "pyg")]
        if place == "h200":
            memory = models["sfi"][1] / models["pyg"][1]
            times += [f"{step['pyg'] / step['sfi']:.1f}", f"{memory:.2f}"]
        else:
            times += [f"{step[name] / step['pyg']:.2f}" for name in ("sfi", "sfi-default")]
        assert _row(section, shape) == times


def _attention_on_a_cpu() -> dict[str, dict[str, list[str]]]:
    """By shape, the figures of each method's two lines: time and memory, then errors and zeros."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in (OUTPUTS / "attention-cpu.txt").read_text().splitlines():
        if shape := re.match(r"(\w+): (\d+ of \d+ graphs)", line):
            found[shape[1]] = {"graphs": [shape[2]]}
        elif found and (row := re.match(r"  (exact|proximal, 10|SDPA) {2,}(\S.*)", line)):
            list(found.values())[-1].setdefault(row[1], []).extend(row[2].split())
    assert tuple(found) == ON_CPU
    return found


def test_the_tables_of_attention_on_a_cpu_are_those_of_the_output():
    section = PAGE.split("## Attention on a CPU\n")[1].split("\n## ")[0]
    rows: dict[str, list[str]] = {"relative error": [], "time of 10 steps": [], "time of exact / PyTorch": []}
    for shape, methods in _attention_on_a_cpu().items():
        exact, steps = methods["exact"], methods["proximal, 10"]
        slower, more = float(steps[0]) / float(exact[0]), float(steps[5])
        to_sdpa, error, zeros = float(exact[3]), float(steps[8]), exact[10]
        figures = [
            f"{float(exact[0]):.0f} ms", f"{slower:.1f}×", f"{more:.1f}×", f"{to_sdpa:.1f}×", f"{error:.2f}", zeros,
        ]  # fmt: skip
        assert _row(section, f"{shape}: {methods['graphs'][0]}") == figures
        for row, figure in zip(
            rows.values(), (f"{error:.2f}", f"{slower:.1f}", f"{to_sdpa:.1f}"), strict=True
        ):
            if shape in SHAPES:
                row.append(figure)
    assert {name: _row(README, name) for name in rows} == rows


def test_the_table_of_one_layer_is_that_of_the_output():
    section = PAGE.split("## One layer on a CPU\n")[1].split("\n## ")[0]
    ratios: dict[int, list[str]] = {1: [], 2: [], 3: []}
    for line in (OUTPUTS / "layer-cpu.txt").read_text().splitlines():
        if row := re.match(r"  (\d+ × \d+) (.*)", line):
            cells = re.findall(r"(\d+\.\d+) \( *(\d+\.\d)×\)", row[2])
            shown = [cells[0][0], *(f"{time} ({ratio}×)" for time, ratio in cells[1:])]
            assert _row(section, row[1]) == shown
            for column, (_, ratio) in enumerate(cells):
                ratios.get(column, []).append(ratio)
    full, narrow = (f"{min(ratios[column])} to {max(ratios[column])} times" for column in (1, 2))
    words = " ".join(README.split())
    assert f"{full} that of `GPSConv` with full heads, and {narrow} with narrow ones" in words
