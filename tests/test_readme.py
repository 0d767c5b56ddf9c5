"""The README's Python, run as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_block_runs(block):
    exec(compile(block, README.name, "exec"), {})


def test_the_energy_of_the_readme_draws_one_unit():
    names: dict = {}
    exec(compile(next(b for b in BLOCKS if "class Toll" in b), README.name, "exec"), names)
    assert names["z"].sum(-1).sub(1).abs().max() < 1e-5
