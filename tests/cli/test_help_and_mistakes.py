"""What is answered before anything heavy is imported: help, presets, and most mistakes."""

import subprocess
import sys

import pytest

import sfiformer
from sfiformer.config import ExperimentConfig
from sfiformer.schema import dotted_keys


def test_help_names_the_commands(sfi):
    text = sfi("--help").stdout
    for name in ("train", "eval", "predict", "presets", "data"):
        assert f" {name} " in text


HELP = """
import sys
from sfiformer.cli.app import main

try:
    main(sys.argv[1:])
except SystemExit:
    print(*{"torch", "numpy", "pandas", "lightning", "torchmetrics", "rdkit"} & set(sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["presets"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    run = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True, check=True)
    assert run.stdout
    assert run.stderr.split() == []


@pytest.mark.parametrize("package", ["", ".nn", ".training", ".explain", ".suites"])
def test_names_that_are_imported_when_used_are_listed_before(package):
    listing = f"import sfiformer{package} as package; print(set(package.__all__) <= set(dir(package)))"
    run = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"


def test_the_version_is_the_packages(sfi):
    assert sfi("--version").stdout == f"sfi {sfiformer.__version__}\n"


def test_help_of_train_explains_every_setting(sfi):
    text = " ".join(sfi("train", "--help").stdout.replace("│", " ").split())
    for key in dotted_keys(ExperimentConfig):
        if key not in ("model", "data", "optim", "trainer"):
            assert f"--{key}" in text
    assert "Learning rate after the warm-up." in text
    assert "One of: sfi, dfi, softmax, adjacency, none." in text
    for option in ("--out", "--resume", "--init-from", "--dry-run", "--devices", "--nodes", "--debug"):
        assert option in text


def test_help_with_a_preset_shows_its_values(sfi):
    text = " ".join(sfi("train", "cluster", "--help").stdout.replace("│", " ").split())
    for value in (
        "split. [cluster: 150]",
        "scaffold split. [cluster: 0.8,0.1,0.1]",
        "Machines. [cluster: 1]",
    ):
        assert value in text
    assert "[clustr" not in sfi("train", "clustr", "--help").stdout


def test_help_fills_its_lines(sfi):
    text = " ".join(sfi("train", "--help").stdout.split("Arguments")[0].split("\n"))
    assert "shows the preset's values, `--dry-run`" in " ".join(text.split())
    assert "Usage: sfi presets [OPTIONS] [PRESET]" in sfi("presets", "--help").stdout


def test_presets_are_listed_and_printed(sfi, tmp_path):
    listed = sfi("presets").stdout
    assert "cluster-paper " in listed
    assert max(map(len, listed.splitlines())) <= 80, "a line of a terminal for each"
    mine = tmp_path / "mine.yaml"
    mine.write_text(sfi("presets", "mnist").stdout)
    assert ExperimentConfig.from_preset(str(mine)) == ExperimentConfig.from_preset("mnist")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train clustr", "there is no preset 'clustr'; did you mean 'cluster'?"),
        ("train my/mols.csv", "not a preset: sfi train custom --data.path my/mols.csv"),
        ("train cluster --optm.lr 1", "there is no option --optm.lr; did you mean --optim.lr?"),
        (
            "train cluster --optim.learning_rate 1",
            "there is no option --optim.learning_rate; did you mean --optim.lr?",
        ),
        ("train cluster --optim.lr fast", "overrides: optim.lr must be a number, not 'fast'"),
        (
            "train custom --model.dim 16",
            "preset custom + overrides: model.pe_dim is 16; it is taken out of model.dim and must be less than 16",
        ),
        ("train cluster --optim.lr -1", "optim.lr is -1.0; it must be positive"),
        ("train cluster --model.attention sofmax", "did you mean 'softmax'?"),
        ("train cluster --data.size tiny", "data.size is 'tiny', not one of full, small"),
        ("train cluster --trainer.precision 16", "'16', not one of 32, tf32, bf16-mixed"),
        ("train cluster --data.skip_bad maybe", "data.skip_bad must be true or false, not 'maybe'"),
        ("train cluster --data.fractions 0.9,0.1", "data.fractions must be a list of 3"),
        ("train mine.yaml", "cannot read the preset file mine.yaml: No such file or directory"),
        ("train", "Missing argument 'PRESET'"),
        ("trian cluster", "No such command 'trian'"),
        ("--verison", "there is no option --verison (see sfi --help)"),
        ("data --task multiclass", "there is no option --task (see sfi data --help)"),
        ("presets clustr", "did you mean 'cluster'?"),
    ],
)
def test_a_mistake_is_one_line(refused, arguments, message):
    assert message in refused(*arguments.split(), code=2)


def test_debug_shows_the_traceback(sfi):
    assert "Traceback" in sfi("train", "clustr", "--debug", code=1).stderr
