"""The demonstration trains, compares and draws."""

import sys

import pytest

from sfiformer import demo

PNG = b"\x89PNG\r\n\x1a\n"
TINY = {
    "data.size": "small", "data.batch_size": 100, "model.layers": 1, "model.dim": 8, "model.heads": 1,
    "model.pe": "none", "model.local": "gcn", "optim.warmup_epochs": 1,
}  # fmt: skip


@pytest.fixture
def run_demo(monkeypatch, capsys, tmp_path):
    """The demo with a model that is trained in seconds; it returns what was printed."""
    monkeypatch.setattr(demo, "SETTINGS", TINY)

    def run() -> str:
        arguments = ["demo", "--out", str(tmp_path / "out"), "--epochs", "1"]
        monkeypatch.setattr(sys, "argv", arguments)
        demo.main()
        return capsys.readouterr().out

    return run


def test_the_demo(run_demo, tmp_path, monkeypatch):
    text = run_demo()
    out = tmp_path / "out"
    sfi, dfi = (
        line.split() for line in text.splitlines() if line.startswith(("SFi-Former  ", "DFi-Former  "))
    )
    assert (len(sfi), dfi[3]) == (7, "dense")
    assert 0 <= float(sfi[3].rstrip("%")) < 100  # share of zero attention
    assert "guessing scores 1/6 = 16.7%" in text
    assert str(out / "demo.png") in text
    assert (out / "demo.png").read_bytes().startswith(PNG)
    assert (out / "sfi-former" / "result.json").is_file()

    # Asked again it finds the runs finished, and where it cannot draw it says why.
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    again = run_demo()
    assert "epoch 1/1" not in again
    assert "pip install 'sfiformer[plot]'" in again


def test_runs_of_another_demo_are_not_continued(run_demo, monkeypatch):
    run_demo()
    monkeypatch.setattr(demo, "SETTINGS", TINY | {"model.dim": 16})
    with pytest.raises(
        SystemExit, match=r"model.dim: 8, and this one .*choose another folder \(--out\), or remove"
    ):
        run_demo()
