"""A suite through the real command line: run, killed, resumed, with a run that fails, and reported."""

import json
from pathlib import Path

import pytest

SUITE = """
settings:
  data.path: {graphs}
  data.root: {root}
  data.batch_size: 8
  model.layers: 1
  model.dim: 8
  model.heads: 1
  model.pe: none
  trainer.epochs: 25
datasets: {{rings: {{preset: custom, label: Rings and paths}}}}
models:
  dfi: {{label: DFi-Former, settings: {{model.attention: dfi}}}}
  broken: {{label: Broken, settings: {{model.node_encoder: atom, model.edge_encoder: bond}}}}
  plus: {{label: SFi-Former+, init_from: dfi}}
runs:
  - {{name: rings, title: Rings, datasets: [rings], models: [dfi, broken, plus], seeds: [0], gap: [dfi, plus]}}
"""


@pytest.fixture
def suite(own_graphs, tmp_path) -> Path:
    path = tmp_path / "rings.yaml"
    path.write_text(SUITE.format(graphs=own_graphs, root=tmp_path / "data"))
    return path


def test_run_kill_resume_report(sfi, killed_after_an_epoch, suite, tmp_path):
    out = tmp_path / "out"
    run = ["suite", "run", suite, "--out", out, "--jobs", 2]
    dense = out / "runs" / "rings" / "dfi" / "seed-0"

    killed_after_an_epoch(dense, *run, "--only", "dfi")
    assert not (dense / "result.json").exists()

    done = sfi(*run, code=1)  # one run fails, the others do not mind; the killed one goes on where it was
    assert "rings/broken/seed-0: failed: " in done.stdout
    assert "node_encoder: atom expects 9 columns, but the data have 2" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 of 3 runs failed: rings/broken/seed-0; logs: ")
    assert "resuming after epoch" in (out / "logs" / "rings" / "dfi" / "seed-0.log").read_text()
    plus = json.loads((out / "runs" / "rings" / "plus" / "seed-0" / "about.json").read_text())
    assert str(dense) in plus["init_from"]
    assert plus["command"][1:3] == ["train", "custom"]

    said = sfi("suite", "report", suite, "--out", out).stdout
    assert "| Broken      | failed" in said
    assert "Failed: rings/broken/seed-0: " in said
    for name in ("report.md", "rings.csv", "rings.tex", "rings-gap.png", "rings-gap.svg"):
        assert (out / "report" / name).is_file()
        assert str(out / "report" / name) in said


def test_suites_are_listed_and_their_commands_shown(sfi):
    listed = sfi("suite", "list").stdout
    for name in ("lrgb", "gnn-benchmark", "ablation", "generalization", "quick"):
        assert f"\n{name} " in "\n" + listed
    shown = sfi(
        "suite", "run", "quick", "--dry-run", "--only", "cluster/sfi-plus/seed-1", "--optim.lr", "1e-3"
    )
    dense, plus = shown.stdout.splitlines()
    assert dense.startswith("sfi train cluster ")
    assert "--optim.lr 1e-3" in plus
    assert "--init-from runs/suites/quick/runs/cluster/dfi/seed-1" in plus


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run quik", "there is no suite 'quik'; did you mean 'quick'?"),
        ("run quick --seed 3", "there is no option --seed"),
        ("run quick --only nothing --dry-run", "no run's name fits nothing"),
        ("run absent.yaml", "cannot read the suite file absent.yaml: No such file or directory"),
        ("run quick --engine slurm --slurm partition", "--slurm partition: write KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_line(refused, arguments, message):
    assert message in refused("suite", *arguments.split())
