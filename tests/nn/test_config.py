import math

import pytest

from sfiformer import ModelConfig

SIZES = {"level": "node", "outputs": 3, "node_features": 5, "edge_features": 0}


def test_fitted_fills_in_what_is_open():
    config = ModelConfig().fitted(**SIZES)
    assert (config.head, config.outputs) == ("node", 3)
    assert (config.node_encoder, config.node_features) == ("linear", 5)
    assert (config.edge_encoder, config.edge_features) == ("constant", None)


def test_fitted_takes_categories():
    config = ModelConfig().fitted(**{**SIZES, "node_features": 2}, node_categories=(4, 7))
    assert (config.node_encoder, config.node_categories, config.node_features) == ("categories", (4, 7), None)


def test_fitted_keeps_a_choice_that_fits():
    chosen = ModelConfig(node_encoder="atom", edge_encoder="bond", head="graph", outputs=10)
    sizes = {"level": "graph", "outputs": 10, "node_features": 9, "edge_features": 3}
    assert chosen.fitted(**sizes) == chosen
    assert ModelConfig(node_encoder="constant").fitted(**SIZES).node_encoder == "constant"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "graph"}, "head is graph, but the data ask for node"),
        ({"outputs": 2}, "outputs is 2, but the data ask for 3"),
        ({"node_encoder": "atom"}, "atom expects 9 columns, but the data have 5"),
        ({"node_encoder": "linear", "node_features": 4}, "linear expects 4 columns, but the data have 5"),
        ({"edge_encoder": "linear"}, "linear expects 1 columns, but the data have 0"),
        ({"node_encoder": "categories"}, "the data have numbers; choose linear"),
    ],
)
def test_fitted_refuses_data_of_another_shape(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings).fitted(**SIZES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"outputs": 0}, "outputs is 0"),
        ({"dropout": 1.0}, r"dropout is 1.0; it must be in \[0, 1\)"),
        ({"lam": float("nan")}, "lam is nan"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"solver": "proximal"}, "soft constraint; with it set lam_scaling to graph or largest"),
        (
            {"solver": "proximal", "lam_scaling": "graph", "alpha": math.inf},
            "soft constraint; with it set alpha to a finite",
        ),
        ({"pe": "lappe", "dim": 16}, "must be less than 16"),
        ({"pe": "eslappe", "local": "gcn"}, "with local: gcn choose another pe"),
        ({"head": "link", "outputs": 2}, "one score a link"),
    ],
)
def test_settings_that_make_no_model(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "softmx"}, "attention is 'softmx', not one of sfi, dfi, .*did you mean 'softmax'"),
        ({"attention": "SFi"}, "attention is 'SFi'"),
        ({"head_width": "narow"}, "did you mean 'narrow'"),
        ({"pooling": "sum"}, "pooling is 'sum', not one of mean, add"),
        ({"pe": "LapPE"}, "not one of lappe"),
        ({"norm": None}, "norm is None"),
        ({"head": "nodes"}, "did you mean 'node'"),
        ({"node_encoder": "atoms"}, "did you mean 'atom'"),
    ],
)
def test_a_value_that_is_none_of_the_choices_is_refused_in_python_too(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**settings)
