from dataclasses import dataclass, field
from typing import Literal

import pytest

from sfiformer.config import ExperimentConfig
from sfiformer.schema import Layer, build, dotted_keys, expand, nearest, plain


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    kind: Literal["plain", "fancy"] = "plain"
    sizes: tuple[int, ...] = (1,)
    limit: int | None = None

    def __post_init__(self):
        if self.rate < 0:
            raise ValueError(f"rate is {self.rate}; it must not be negative")


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    pair: tuple[float, float] = (0.0, 1.0)
    flag: bool = False
    name: str = "none"


def test_later_layers_win_key_by_key():
    base = Layer("base", {"inner": {"rate": 1, "kind": "fancy"}, "name": "b"})
    top = Layer("top", {"inner": {"rate": 2}, "flag": True})
    assert build(Outer, [base, top]) == Outer(Inner(rate=2.0, kind="fancy"), flag=True, name="b")


def test_plain_is_the_inverse():
    outer = Outer(Inner(sizes=(1, 2), limit=3), pair=(0.5, 2.0))
    assert plain(outer)["inner"]["sizes"] == [1, 2]
    assert build(Outer, [Layer("x", plain(outer))]) == outer


def test_floats_as_yaml_writes_them():
    assert build(Inner, [Layer("x", {"rate": "1e-3"})]).rate == 1e-3
    assert build(Inner, [Layer("x", {"rate": "inf"})]).rate == float("inf")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"iner": {}}, "f.yaml: there is no key 'iner'; did you mean 'inner'?"),
        ({"inner": {"rte": 1}}, "f.yaml: there is no key 'inner.rte'; did you mean 'inner.rate'?"),
        ({"rate": 1}, "f.yaml: there is no key 'rate'; did you mean 'inner.rate'?"),
        ({"inner": 3}, "f.yaml: inner must be a mapping, not 3"),
        ({"inner": {"rate": "fast"}}, "f.yaml: inner.rate must be a number, not 'fast'"),
        ({"inner": {"rate": True}}, "f.yaml: inner.rate must be a number, not True"),
        ({"inner": {"limit": 1.5}}, "f.yaml: inner.limit must be a whole number, not 1.5"),
        ({"inner": {"kind": "fancie"}}, "not one of plain, fancy; did you mean 'fancy'?"),
        ({"inner": {"sizes": [1, "b"]}}, r"f.yaml: inner.sizes[1] must be a whole number, not 'b'"),
        ({"pair": [1]}, r"f.yaml: pair must be a list of 2, not [1]"),
        ({"flag": 1}, "f.yaml: flag must be true or false, not 1"),
        ({"name": 1}, "f.yaml: name must be text, not 1"),
        ({"inner": {"rate": -1}}, "f.yaml: rate is -1.0; it must not be negative"),
    ],
)
def test_errors_name_the_source_the_key_and_the_remedy(values, message):
    with pytest.raises(ValueError, match=r".") as error:
        build(Outer, [Layer("f.yaml", values)])
    assert message in str(error.value)


def test_an_error_names_the_layer_it_stands_in():
    with pytest.raises(ValueError, match=r"^top: there is no key 'flog'"):
        build(Outer, [Layer("base", {"flag": True}), Layer("top", {"flog": True})])


def test_expand():
    assert expand({"a.b": 1, "a.c.d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    for dotted in ({"inner": 3, "inner.rate": 1}, {"inner.rate": 1, "inner": 3}):
        with pytest.raises(ValueError, match="mine: inner must be a mapping, not 3"):
            build(Outer, [Layer("mine", expand(dotted))])


def test_keys_and_nearest():
    assert dotted_keys(Outer) == [
        "inner", "inner.rate", "inner.kind", "inner.sizes", "inner.limit", "pair", "flag", "name",
    ]  # fmt: skip
    assert nearest("optm.lr", ["optim.lr", "model.layers"]) == "optim.lr"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--optim.learning_rate", "--optim.lr"),
        ("--learning_rate", "--optim.lr"),
        ("--optim.wd", "--optim.weight_decay"),
        ("--model.hidden_dim", "--model.dim"),
        ("--model.num_layers", "--model.layers"),
        ("--output", "--out"),
        ("--batchsize", "--data.batch_size"),
    ],
)
def test_nearest_of_abbreviations(name, meant):
    known = [f"--{key}" for key in dotted_keys(ExperimentConfig)]
    assert nearest(name, [*known, "--out", "--resume"]) == meant
