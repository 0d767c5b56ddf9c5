"""The suite in docs/suites.md, as it stands."""

import re
from pathlib import Path

from sfiformer.suites.plan import plan
from sfiformer.suites.suite import read_suite, suite_names

DOCS = Path(__file__).parents[2] / "docs" / "suites.md"


def test_the_documented_suite_can_be_planned(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert len(plan(read_suite(str(file)))) == 5 * 4


def test_the_documented_numbers_of_runs():
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \|", DOCS.read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(suite_names())
    for name, count in rows:
        assert len(plan(read_suite(name))) == int(count)


def test_the_documented_tables_of_quick_are_those_of_its_report():
    report = (DOCS.parents[1] / "results" / "quick" / "report.md").read_text()
    text = DOCS.read_text().split("    sfi suite run quick\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 4
    assert all(table in report for table in tables)
