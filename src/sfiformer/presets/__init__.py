"""Presets: one YAML file for each experiment, by name.

A preset may say `base: OTHER` and then give only what differs. A path that ends in .yaml is a user's own
preset, which may rest on ours in the same way.
"""

import shlex
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from sfiformer.schema import Layer, nearest

GRAPHS = (".csv", ".jsonl", ".ndjson", ".pt")  # how the name of a user's data ends, zipped or not
MERGE = "tag:yaml.org,2002:merge"  # of <<, whose mapping gives what the others do not


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_preset(name: str) -> list[Layer]:
    """The settings of a preset (a name, or the path of a YAML file): its bases first, itself last."""
    layers: list[Layer] = []
    seen: list[str] = []
    while name:
        if name in seen:
            raise ValueError(f"presets rest on each other in a circle: {' -> '.join([*seen, name])}")
        seen.append(name)
        try:
            values = _read(name)
        except ValueError as error:
            if len(seen) == 1:
                raise
            raise ValueError(f"{_label(seen[-2])}: base: {error}") from None
        base = values.pop("base", "")
        if not isinstance(base, str):
            raise ValueError(f"{_label(name)}: base must be the name of a preset, not {base!r}")
        layers.insert(0, Layer(_label(name), values))
        # A file's base is another file beside it, or one of ours.
        name = str(Path(name).parent / base) if _is_path(base) else base
    return layers


def _label(name: str) -> str:
    return name if _is_path(name) else f"preset {name}"


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _read(name: str) -> dict[str, Any]:
    if _is_path(name):
        text = read_text(Path(name), "preset")
    elif name in preset_names():
        text = (resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")
    elif name.removesuffix(".gz").endswith(GRAPHS):
        raise ValueError(
            f"{name!r} is a file of graphs, not a preset: sfi train custom --data.path {shlex.quote(name)}"
        )
    elif name.endswith((".json", ".json.gz")):
        lines = name.replace(".json", ".jsonl")
        raise ValueError(
            f"{name!r} is no preset, and graphs are read from JSON lines: write one graph a line, name it .jsonl, and then "
            f"sfi train custom --data.path {shlex.quote(lines)}"
        )
    elif (Path(name) / "config.yaml").is_file():
        config = shlex.quote(str(Path(name) / "config.yaml"))
        raise ValueError(f"{name!r} is the folder of a run, not a preset: its settings are {config}")
    else:
        raise ValueError(
            f"there is no preset {name!r}; did you mean {nearest(name, preset_names())!r}? "
            "(sfi presets lists all; a file's name ends in .yaml)"
        )
    return parse_yaml(text, _label(name))


def read_text(path: Path, what: str) -> str:
    """The text of a user's file, or a ValueError that names the file as a `what`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the {what} file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"cannot read the {what} file {path}: it is not UTF-8 at byte {error.start}"
        ) from None


def parse_yaml(text: str, label: str) -> dict[str, Any]:
    """The mapping that a YAML text holds, or a ValueError that starts with `label`."""
    try:
        values = yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{label}{place} is not readable YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{label} is not readable YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{label} must hold a mapping of settings")
    return values


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe subset; a key given twice is an error instead of the first being dropped in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = []
        for key_node, _ in node.value:
            if key_node.tag == MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.append(key)
        return super().construct_mapping(node, deep)
