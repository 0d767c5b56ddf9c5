"""Dataclasses from plain mappings (YAML, a command line), strictly.

A setting comes in layers, each a mapping with the name of its source: a base preset, a preset on top of it,
the user's overrides. Every layer is checked by itself, so that an error names the file the mistake stands in,
and the nearest real key.
"""

import types
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from os import PathLike, fspath
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Layer(NamedTuple):
    """Some settings and where they come from."""

    source: str
    values: Mapping[str, Any]


def build(cls: type[T], layers: Iterable[Layer]) -> T:
    """Make a `cls`, later layers over earlier ones, nested dataclasses key by key."""
    layers = [layer for layer in layers if layer.values]
    merged: dict[str, Any] = {}
    for layer in layers:
        merge(merged, _checked(cls, layer.values, layer.source, "", dotted_keys(cls)))
    try:
        return _construct(cls, merged)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{' + '.join(layer.source for layer in layers)}: {error}") from None


def expand(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """{"optim.lr": 1} → {"optim": {"lr": 1}}."""
    nested: dict[str, Any] = {}
    for key, value in dotted.items():
        *sections, leaf = key.split(".")
        tail: Any = {leaf: value}
        for section in reversed(sections):
            tail = {section: tail}
        if not sections or isinstance(
            nested.get(sections[0], {}), Mapping
        ):  # else left for `build` to refuse
            merge(nested, tail)
    return nested


def merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Lay `values` over `into` in place, section by section."""
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def plain(config: Any) -> dict[str, Any]:
    """The inverse of `build`: nested dictionaries and lists, ready for YAML or JSON."""
    return asdict(
        config, dict_factory=lambda items: {k: list(v) if isinstance(v, tuple) else v for k, v in items}
    )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} → {"optim.lr": 1}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def as_text(value: Any) -> str:
    """A setting as the text of its option."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return str(value)


def dotted_keys(cls: type, prefix: str = "") -> list[str]:
    """Every key of a dataclass and of those nested in it: ["seed", "model.dim", …]."""
    keys = []
    for name, hint in _hints(cls).items():
        keys.append(prefix + name)
        if isinstance(hint, type) and is_dataclass(hint):
            keys += dotted_keys(hint, f"{prefix}{name}.")
    return keys


def hint_of(cls: type, dotted: str) -> Any:
    """The type of a key: hint_of(ExperimentConfig, "model.dim") is int."""
    section, _, rest = dotted.partition(".")
    hint = _hints(cls)[section]
    return hint_of(hint, rest) if rest else hint


def require_choices(config: Any, section: str = "") -> None:
    """Raises ValueError where a setting that has a few values (a Literal) is none of them; for what is made in Python."""
    for key, hint in _hints(type(config)).items():
        value = getattr(config, key)
        for literal in (hint, *get_args(hint)):  # the latter of Literal[…] | None
            if get_origin(literal) is Literal and not (value is None and literal is not hint):
                _converted(literal, value, f"{section}{key}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`; the last part of a dotted key counts most, and may be abbreviated."""

    def likeness(other: str) -> float:
        leaf, other_leaf = name.rpartition(".")[2], other.rpartition(".")[2]
        alike = SequenceMatcher(None, leaf, other_leaf).ratio()
        if _abbreviates(leaf.lstrip("-"), other_leaf.lstrip("-")):
            alike = max(alike, 0.9)
        return alike + 0.5 * SequenceMatcher(None, name, other).ratio()

    return max(known, key=likeness)


def _abbreviates(name: str, other: str) -> bool:
    """Whether one has the other's initials (lr, learning_rate) or some of its words (dim, hidden_dim)."""
    short, long = sorted((name.split("_"), other.split("_")), key=len)
    return short == ["".join(word[:1] for word in long)] or set(short) < set(long)


def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _checked(cls: type, values: Any, source: str, prefix: str, known: list[str]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{source}: {prefix.rstrip('.') or 'the whole'} must be a mapping, not {values!r}")
    hints = _hints(cls)
    checked = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in hints:
            raise ValueError(f"{source}: there is no key {path!r}; did you mean {nearest(path, known)!r}?")
        hint = hints[key]
        if is_dataclass(hint):
            checked[key] = _checked(hint, value, source, f"{path}.", known)  # type: ignore[arg-type]
        else:
            checked[key] = _converted(hint, value, f"{source}: {path}")
    return checked


def _converted(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint`, or a ValueError that starts with `where`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):  # in this project always `X | None`
        if value is None:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _converted(hint, value, where)
    if origin is Literal:  # in this project always of strings; YAML reads the string 32 as a number
        if not isinstance(value, bool) and str(value) in arguments:
            return str(value)
        close = get_close_matches(str(value), arguments, n=1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{where} is {value!r}, not one of {', '.join(arguments)}{guess}")
    if origin is tuple:
        item = arguments[0]
        length = None if arguments[1:] == (...,) else len(arguments)
        if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
            raise ValueError(f"{where} must be a list{f' of {length}' if length else ''}, not {value!r}")
        return tuple(_converted(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if hint is str and isinstance(value, PathLike):
        return fspath(value)
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-3 as a string.
        try:
            return float(value)
        except ValueError:
            pass
    if type(value) is not hint:
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
        raise ValueError(f"{where} must be {kind}, not {value!r}")
    return value


def _construct(cls: type[T], values: Mapping[str, Any]) -> T:
    arguments = {}
    for name, hint in _hints(cls).items():
        if is_dataclass(hint):
            arguments[name] = _construct(hint, values.get(name, {}))  # type: ignore[arg-type]
        elif name in values:
            arguments[name] = values[name]
    return cls(**arguments)
