"""README and docs: their links lead somewhere, and their commands have the options that they are given."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from sfiformer.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _commands(page: Path) -> list[str]:
    """What stands in indented blocks: `sfi …`, without comments and with continued lines joined."""
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"^    (sfi .*)$", text, re.MULTILINE)
    return [part for line in lines for part in re.split(r"\s+&&\s+", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page):
    for line in _commands(page):
        command, (name, *rest) = typer.main.get_command(app), shlex.split(line, comments=True)
        context = None
        while hasattr(command, "commands"):  # a group
            context = command.make_context(name, list(rest), parent=context)
            name, *rest = rest
            command = command.commands[name]
        command.make_context(name, rest, parent=context)  # raises for an option that is none
