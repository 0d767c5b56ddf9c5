"""Bad input raises, and says which argument was bad, what it was and what would be right."""

import math

import numpy as np
import pytest
import torch

from packing import packed
from sfiformer import SFiAttention, dfi_attention, sfi_attention

NODES, HEADS, WIDTH = 9, 2, 4
WAYS = [{}, {"return_flows": True}, {"solver": "proximal"}]


def _arguments(**changes) -> dict:
    return packed((5, 4), HEADS, WIDTH)._asdict() | {"lam": 0.1} | changes


def _spoilt(value: float) -> torch.Tensor:
    x = torch.randn(NODES, HEADS, WIDTH, dtype=torch.float64)
    x[7, 1, 2] = value
    return x


def _like(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


SHAPES = [
    ("q", [1.0], r"tensor.*\[1.0\]"),
    ("q", _like(NODES, WIDTH), r"\[9, 4\]"),
    ("k", _like(NODES, HEADS, WIDTH + 1), r"\[9, 2, 5\]"),
    ("k", _like(NODES - 1, HEADS, WIDTH), r"\[8, 2, 4\]"),
    ("v", _like(NODES - 1, HEADS, WIDTH), r"\[8, 2, 4\]"),
    ("v", _like(NODES, HEADS + 1, WIDTH), r"\[9, 3, 4\]"),
    ("v", _like(NODES, WIDTH), r"\[9, 4\]"),
    ("v", _like(NODES, HEADS, 0), r"\[9, 2, 0\]"),
    ("q_friction", _like(NODES, HEADS, 3), r"\[9, 2, 3\]"),
    ("k_friction", _like(NODES, 1, WIDTH), r"\[9, 1, 4\]"),
    ("q", _like(NODES, HEADS, WIDTH, dtype=torch.int64), "int64"),
    ("v", _like(NODES, HEADS, WIDTH, dtype=torch.bool), "bool"),
    ("q", _like(NODES, 0, WIDTH), r"head.*\[9, 0, 4\]"),
    ("ptr", [0, 5, 9], r"tensor.*\[0, 5, 9\]"),
    ("ptr", torch.tensor([0.0, 5.0, 9.0]), "float32"),
    ("ptr", torch.tensor([False, True]), "bool"),
    ("ptr", torch.tensor([[0, 5, 9]]), r"\[1, 3\]"),
    ("ptr", torch.tensor([], dtype=torch.int64), r"\[0\]"),
]
VALUES = [
    ("ptr", torch.tensor([0, 6, 5, 9]), "6.*5"),
    ("ptr", torch.tensor([0, 5, 8]), "9.*8"),
    ("ptr", torch.tensor([0, 5, 12]), "9.*12"),
    ("ptr", torch.tensor([1, 5, 9]), "1"),
    ("ptr", torch.tensor([-1, 5, 9]), "-1"),
    ("ptr", torch.tensor([0]), "9.*0"),
    ("v", _spoilt(math.nan), "nan"),
    ("v", _spoilt(math.inf), "inf"),
    ("lam", "x", "number.*'x'"),
    ("lam", None, "number.*None"),
    ("lam", -0.5, "-0.5"),
    ("lam", math.nan, "nan"),
    ("lam", math.inf, "inf"),
    ("lam", torch.tensor([0.1, -0.2]), "-0.2"),
    ("lam", torch.tensor([0.1, math.nan]), "nan"),
    ("lam", torch.tensor([0.1, 0.2, 0.3]), r"\[3\]"),
    ("lam", torch.ones(2, 1), r"\[2, 1\]"),
    ("alpha", "x", "number.*'x'"),
    ("alpha", 0.0, "0.0"),
    ("alpha", -1.0, "-1"),
    ("alpha", math.nan, "nan"),
    ("max_nodes", 4, "5.*4"),
    ("dropout_p", -0.1, "-0.1"),
    ("dropout_p", 1.0, "1.0"),
    ("scaling", "relative", "relative"),
    ("solver", "newton", "newton"),
]


def _raises(call, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)\b{name}\b.*{message}"):
        call()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "value", "message"), SHAPES + VALUES)
def test_named(way, name, value, message):
    _raises(lambda: sfi_attention(**_arguments(**(way | {name: value}))), name, message)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "q_friction", "k_friction"])
def test_scores_that_are_not_finite(way, name, value):
    """The message names the scores, or what they are made of."""
    named = "q_friction|k_friction|u" if "friction" in name else "q|k|s"
    _raises(lambda: sfi_attention(**_arguments(**(way | {name: _spoilt(value)}))), f"({named})", "(nan|inf)")


@pytest.mark.parametrize("way", WAYS)
def test_scores_that_overflow(way):
    large = torch.full((NODES, HEADS, WIDTH), 1e30)
    given = dict.fromkeys(("q", "k", "v", "q_friction", "k_friction"), large)
    with pytest.raises(ValueError, match=r"\b(q|k|s)\b"):
        sfi_attention(**_arguments(**given, **way))


@pytest.mark.parametrize("way", WAYS)
def test_scale_that_is_not_a_number(way):
    with pytest.raises(ValueError, match=r"\b(scale|s)\b"):
        sfi_attention(**_arguments(scale=math.nan, **way))


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_scale_of_dense_attention_that_is_not_a_number(scale):
    inputs = packed()
    with pytest.raises(ValueError, match=f"scale must be finite, got {scale}"):
        dfi_attention(inputs.q, inputs.k, inputs.v, inputs.ptr, scale=scale)


@pytest.mark.parametrize("name", ["alpha", "scale"])
def test_a_gradient_that_would_be_lost_in_silence(name):
    inputs, value = packed(), torch.tensor(0.3, requires_grad=True)
    *tensors, ptr = inputs
    with pytest.raises(ValueError, match=f"{name} has no gradient here"):
        sfi_attention(*tensors, ptr, lam=0.3, **{name: value})
    out, _ = sfi_attention(*tensors, ptr, lam=0.3, return_flows=True, **{name: value})
    assert torch.autograd.grad(out.sum(), value)[0] != 0
    with torch.no_grad():
        sfi_attention(*tensors, ptr, lam=0.3, **{name: value})
    if name == "scale":
        with pytest.raises(ValueError, match="scale has no gradient here"):
            dfi_attention(inputs.q, inputs.k, inputs.v, ptr, scale=value)


def test_nan_is_found_in_any_graph_and_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        inputs = packed((3, 0, 1, 5, 3), dtype=dtype)
        for node in range(len(inputs.q)):
            q = inputs.q.clone()
            q[node, 0, 0] = math.nan
            with pytest.raises(ValueError, match=r"(?i)nan"):
                sfi_attention(*inputs._replace(q=q), lam=0.1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["k", "k_friction"])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinities_that_resistances_and_frictions_would_hide(way, name, value):
    """All scores of a key at −∞ or ∞: a key without resistance or friction, or with nothing else."""
    inputs = packed((4, 3), dtype=torch.float32)
    inputs = inputs._replace(q=inputs.q.abs(), q_friction=inputs.q_friction.abs())
    getattr(inputs, name)[1, 0, 0] = value
    with pytest.raises(ValueError, match=rf"\b{name}\b.*inf"):
        sfi_attention(*inputs, **({"lam": 0.1} | way))


def test_values_are_not_looked_at_on_request():
    sfi_attention(**_arguments(v=_spoilt(math.nan), check=False))


def _dense(**changes) -> torch.Tensor:
    inputs = _arguments(**changes)
    return dfi_attention(inputs["q"], inputs["k"], inputs["v"], inputs["ptr"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [case for case in SHAPES if case[0] in ("q", "k", "v", "ptr")]
    + [case for case in VALUES if case[0] == "ptr"],
)
def test_dense_attention(name, value, message):
    _raises(lambda: _dense(**{name: value}), name, message)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_dense_attention_of_nan(name):
    with pytest.raises(ValueError, match=r"(?i)nan"):
        _dense(**{name: _spoilt(math.nan)})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mode": "softmax"}, "mode"),
        ({"friction": "free"}, "friction"),
        ({"lam_scaling": "batch"}, "lam_scaling"),
        ({"lam": -1.0}, "lam"),
        ({"lam": math.nan}, "lam"),
        ({"alpha": 0.0}, "alpha"),
        ({"dropout": 1.5}, "dropout"),
        ({"dropout": -0.5, "mode": "dfi"}, "dropout"),
        ({"solver": "newton"}, "solver"),
        ({"solver": "proximal"}, "lam_scaling"),
        ({"adjacency": False, "attention": False}, "adjacency"),
    ],
)
def test_layer_settings(arguments, name):
    def build_and_call():
        layer = SFiAttention(8, 2, **arguments)
        layer(torch.randn(4, 8), torch.tensor([[0], [1]]), torch.tensor([0, 4]))

    with pytest.raises(ValueError, match=name):
        build_and_call()


@pytest.mark.parametrize(
    "arguments",
    [
        {"heads": 0},
        {"heads": -1},
        {"heads": 2.0},
        {"dim": 0},
        {"head_width": 0},
        {"lam": math.nan},
        {"lam": math.inf},
        {"lam": "x"},
        {"alpha": None},
        {"solver": "newton"},
    ],
)
def test_layer_settings_are_looked_at_when_it_is_made(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"^{name} must"):
        SFiAttention(**({"dim": 8, "heads": 2} | arguments))
    assert SFiAttention(np.int64(8), np.int64(2)).head_width == 8


@pytest.mark.parametrize("lam_scaling", ["potential", "graph", "largest"])
def test_layer_offsets_that_are_no_tensor(lam_scaling):
    layer = SFiAttention(8, 2, lam_scaling=lam_scaling)
    with pytest.raises(ValueError, match=r"ptr.*tensor.*\[0, 4\]"):
        layer(torch.randn(4, 8), torch.tensor([[0], [1]]), [0, 4])


@pytest.mark.parametrize("mode", ["sfi", "dfi"])
@pytest.mark.parametrize("ptr", [[0, 3], [0, 6], [0, 5, 4, 4], [1, 4]])
def test_layer_offsets(mode, ptr):
    layer = SFiAttention(8, 2, mode=mode)
    with pytest.raises(ValueError, match="ptr"):
        layer(torch.randn(4, 8), torch.tensor([[0], [1]]), torch.tensor(ptr))


@pytest.mark.parametrize("arguments", [{}, {"mode": "dfi"}, {"attention": False}])
@pytest.mark.parametrize(
    "x", [torch.randn(4, 7), torch.randn(4, 9), torch.randn(2, 4, 8), torch.ones(4, 8, dtype=torch.int64)]
)
def test_layer_of_other_features(arguments, x):
    """Narrower ones would else be filled with zeros, and wider ones cut off."""
    layer, ptr = SFiAttention(8, 2, **arguments), torch.tensor([0, 4])
    calls = [lambda: layer(x, torch.tensor([[0], [1]]), ptr)]
    if layer.attention:
        calls += [lambda: layer.flows(x, ptr), lambda: layer.scores(x)]
    for call in calls:
        with pytest.raises(ValueError, match=r"^x must"):
            call()


@pytest.mark.parametrize("mode", ["sfi", "dfi"])
def test_layer_of_nan(mode):
    layer = SFiAttention(8, 2, mode=mode)
    x = torch.randn(4, 8)
    x[2, 3] = math.nan
    with pytest.raises(ValueError, match=r"(?i)nan"):
        layer(x, torch.tensor([[0], [1]]), torch.tensor([0, 4]))


def test_friction_of_ones_own_with_another_shape():
    layer = SFiAttention(8, 2, friction=lambda x: (x, x))
    with pytest.raises(
        ValueError, match=r"friction must make two tensors .* here \[4, 2, 8\]; got a .*\[4, 8\]"
    ):
        layer(torch.randn(4, 8), torch.tensor([[0], [1]]), torch.tensor([0, 4]))


@pytest.mark.parametrize("made", [None, torch.zeros(3, 2, 8), (torch.zeros(3, 2, 8),), 7])
def test_friction_of_ones_own_that_is_no_pair(made):
    layer = SFiAttention(8, 2, friction=lambda x: made)
    with pytest.raises(ValueError, match=r"friction must make two tensors \[nodes, heads, head_width\]"):
        layer(torch.randn(3, 8), torch.zeros(2, 0, dtype=torch.long), torch.tensor([0, 3]))


@pytest.mark.parametrize("way", WAYS)
def test_alpha_is_one_number(way):
    with pytest.raises(ValueError, match="alpha must be one number for all graphs"):
        sfi_attention(**_arguments(alpha=torch.tensor([0.1, 0.2]), **way))
