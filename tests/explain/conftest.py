"""A browser with the page of a record open in it."""

import pytest

from explain.browser import PATIENCE, launched
from explain.records import LAYERS, make_layer, make_record
from sfiformer.explain.page import write_page


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of a record; whatever the browser complains of fails the test."""
    complaints, contexts = [], []

    def open_page(record, *, width=1280, height=800, scheme="light", **options):
        path = write_page(record, tmp_path / "page.html", **options)
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def ring():
    return make_record([make_layer(seed, *settings) for seed, settings in enumerate(LAYERS)])
