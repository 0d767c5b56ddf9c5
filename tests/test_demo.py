"""The demonstration runs, reports and draws."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"


def run_demo(folder: Path, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "sfiformer.demo", "--out", str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, **(environment or {})},
    )
    return done.stdout


def test_reports_and_draws(tmp_path: Path) -> None:
    text = run_demo(tmp_path / "out")
    picture = tmp_path / "out" / "flows.png"
    assert str(picture) in text
    assert picture.read_bytes().startswith(PNG)
    assert "untrained" in text
    assert "finite: True" in text
    zeros = {lam: float(share) for lam, share in re.findall(r"^ +([015]) +([\d.]+)%", text, re.M)}
    assert zeros["0"] == 0 < zeros["1"] < zeros["5"] < 100
    distance = re.search(r"distance to the flows of least energy +([\d.]+)", text)
    assert distance is not None
    assert float(distance[1]) > 0.1


def test_says_what_to_install_where_matplotlib_is_missing(tmp_path: Path) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text(
        "raise ModuleNotFoundError('No module named matplotlib')"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    text = run_demo(tmp_path / "out", {"PYTHONPATH": path})
    assert "pip install 'sfiformer[plot]'" in text.splitlines()[-1]
    assert not (tmp_path / "out").exists()
