"""Texts of the command line as values of settings."""

import pytest

from sfiformer.cli.options import parse


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optim.lr", "3e-4", "3e-4"),  # YAML's text, which the strict reader takes for a number
        ("trainer.epochs", "4", 4),
        ("trainer.patience", "null", None),
        ("trainer.precision", "32", "32"),
        ("model.alpha", ".inf", float("inf")),
        ("model.qk_norm", "false", False),
        ("data.path", "123", "123"),
        ("data.path", "null", None),
        ("data.targets", "logP, weight", ["logP", "weight"]),
        ("data.fractions", "[0.5,0.25,0.25]", [0.5, 0.25, 0.25]),
        ("model.node_categories", "3,2", [3, 2]),
        ("seed", "5", 5),
    ],
)
def test_values(key, text, value):
    assert parse(key, text) == value
