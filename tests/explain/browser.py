"""A real browser for the tests of the page; where there is none, they are skipped and say why."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PATIENCE = 300_000  # milliseconds, for a busy machine
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Where Chromium is: the variable SFIFORMER_CHROMIUM, else the first of the usual names on the path."""
    named = os.environ.get("SFIFORMER_CHROMIUM")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def launched() -> Iterator:
    """Playwright's browser, headless, with no network."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here, so the page is not tested (Debian: apt-get install chromium)")
    api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install '.[dev]'"
    )
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def text(page, name: str) -> str:
    return page.locator(f"#{name}").text_content()


def settle(page) -> float:
    """The share of zeros over all queries, once it is counted."""
    page.locator("#share", has_text="%").wait_for(timeout=PATIENCE)
    return float(text(page, "share").rstrip("%")) / 100
