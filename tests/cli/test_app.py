"""How errors are shown."""

import warnings

import pytest

from sfiformer.cli import app


def test_an_error_of_the_disk_names_the_file_first(monkeypatch, capsys):
    def fail(*_, **__):
        raise FileExistsError(17, "File exists", "mine.jsonl")

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as caught:
        app.main(["explain"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == "sfi: mine.jsonl: File exists\n"


def test_a_warning_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr(app, "app", lambda *_, **__: warnings.warn("skipped: 1 bad", stacklevel=1))
    with pytest.raises(SystemExit):
        app.main(["eval"])
    assert capsys.readouterr().err == "warning: skipped: 1 bad\n"
