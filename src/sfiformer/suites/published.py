"""Figures that others published, to stand beside ours in columns of their own."""

from dataclasses import dataclass
from typing import Any

from sfiformer.presets import parse_yaml
from sfiformer.schema import nearest
from sfiformer.suites.suite import PUBLISHED, package_text


@dataclass(frozen=True)
class Figure:
    """A published mean, with its standard deviation where that was published too."""

    mean: float
    sd: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.sd is None else f"{self.mean:.4f} ± {self.sd:.4f}"


@dataclass(frozen=True)
class Published:
    """A published table."""

    source: str
    metrics: dict[str, str]
    """For each dataset the metric, with ↑ or ↓ for what is better."""
    figures: dict[str, dict[str, Figure]]
    """By the label of the model, then by dataset."""


def read_published(name: str) -> Published:
    """A published table by its name in published.yaml.

    Raises:
        ValueError: names the nearest there is.
    """
    tables = parse_yaml(package_text(PUBLISHED), f"suites/{PUBLISHED}.yaml")
    if name not in tables:
        raise ValueError(f"there are no published figures {name!r}; did you mean {nearest(name, tables)!r}?")
    table = tables[name]
    rows = {
        label: {
            dataset: _figure(text)
            for dataset, text in zip(table["datasets"], row, strict=True)
            if text != "–"
        }
        for label, row in table["figures"].items()
    }
    return Published(table["source"], table["datasets"], rows)


def _figure(text: Any) -> Figure:
    mean, _, sd = str(text).partition(" ± ")
    return Figure(float(mean), float(sd) if sd else None)
