"""The figures: what is drawn is what was solved."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from sfiformer import figures
from sfiformer.errors import UserError
from sfiformer.explain import explain_graph
from sfiformer.explain.maps import SHOWN, distance, draw_iterations, draw_maps, zeros
from sfiformer.explain.record import GraphRecord, LayerRecord

pytest.importorskip("matplotlib")


def images(figure) -> list:
    return [image for axes in figure.get_axes() for image in axes.get_images()]


def test_maps_show_all_quantities_and_leave_zeros_white(recorded):
    _, seen = recorded(lam=8.0)
    layer = seen.layers[1]
    figure = draw_maps(seen, 1)
    drawn = images(figure)
    assert len(drawn) == 4 * 2  # quantities, heads
    order = seen.target.sort(stable=True).indices  # nodes by class
    for column, values in enumerate((layer.resistance(), layer.friction(), layer.flows(), seen.combined(1))):
        for head in range(2):
            expected = values[head][order][:, order]
            array = np.ma.filled(_at(figure, head, column).get_array().astype(float), np.nan)
            np.testing.assert_array_equal(np.isnan(array), (expected == 0).numpy())
            np.testing.assert_array_equal(array[~np.isnan(array)], expected[expected > 0].double().numpy())
    assert (layer.flows() == 0).any()
    white = drawn[0].cmap(np.ma.masked_invalid([np.nan]))
    assert white.tolist() == [[1, 1, 1, 1]]
    flow, combined = _at(figure, 0, 2), _at(figure, 0, 3)
    assert flow.norm is combined.norm
    title = figure.get_suptitle()
    assert title.startswith(f"val[17], {seen.num_nodes} nodes; layer 2 of 2, λ = ")
    assert title.endswith("nodes by class")


def test_an_id_is_shown_as_it_is_written(recorded, tmp_path):
    seen = replace(recorded()[1], id=r"$\frac C_2")
    figure = draw_maps(seen, 0)
    assert figure.get_suptitle().startswith(r"val[17], id $\frac C_2, ")
    figures.save(figure, tmp_path / "maps")


def _at(figure, head: int, column: int):
    """The image in this row and column."""
    for axes in figure.get_axes():
        spec = axes.get_subplotspec()
        if axes.get_images() and (spec.rowspan.start, spec.colspan.start) == (head, column):
            return axes.get_images()[0]
    raise AssertionError("no such map")


def test_what_a_layer_has_not_is_left_out(recorded):
    assert len(images(draw_maps(recorded(attention="dfi")[1], 0, [1]))) == 3
    figure = draw_maps(recorded(attention="softmax")[1], 0)
    assert len(images(figure)) == 2 * 2
    assert "dense" in figure.get_suptitle()


def test_iterations_beside_the_exact_flows(recorded):
    _, seen = recorded(lam=8.0)
    layer = seen.layers[0]
    figure = draw_iterations(seen, 0, [1])
    assert len(images(figure)) == len(SHOWN) + 1
    titles = [axes.get_title() for axes in figure.get_axes()]
    for count in SHOWN:
        away = float((layer.proximal(count)[1] - layer.flows()[1]).norm() / layer.flows()[1].norm())
        assert any(f"{count} iteration" in title and f"distance {away:.2f}" in title for title in titles)
    assert any(title.startswith("exact") for title in titles)


@pytest.mark.parametrize("n", [1, 3])
def test_graphs_without_any_flow_are_drawn(n, recorded):
    """α ≤ λ min f: no flow pays."""
    q = torch.zeros(n, 1, 4)
    layer = LayerRecord(q, q, q, q, 0.5, lam=5.0, lam_star=5.0, alpha=0.1, scaling="absolute", gamma=None)
    assert not layer.flows().any()
    task = recorded()[1].task
    seen = GraphRecord(
        "empty", n, torch.zeros(2, 0).long(), torch.eye(n), [layer], torch.zeros(n, 6), None, task
    )
    figures_made = [draw_maps(seen, 0), draw_iterations(seen, 0)]
    assert "100% zero" in [
        axes.get_title().splitlines()[-1] for axes in figures_made[0].get_axes() if axes.get_title()
    ]


def test_words():
    assert zeros(torch.ones(4)) == "no zeros"
    assert zeros(torch.tensor([0.0, 1, 1, 1])) == "25% zero"
    assert zeros(torch.cat([torch.zeros(1), torch.ones(999)])) == "<1% zero"
    assert distance(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 4.0]])) == pytest.approx(3 / 4)


def test_files_of_a_graph(run, tmp_path):
    written = explain_graph(run("sfi"), 3, layer=1, head=2, out=tmp_path)
    kinds = [f"{kind}-layer1.{suffix}" for kind in ("maps", "iterations") for suffix in ("png", "svg")]
    assert [path.name for path in written] == [*(f"test-3-{kind}" for kind in kinds), "test-3.html"]
    assert sorted(tmp_path.iterdir()) == sorted(written)
    for path in written:
        if path.suffix == ".png":
            from matplotlib.image import imread

            assert math.prod(imread(path).shape[:2]) > 10_000
        elif path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_layers_and_heads_that_are_not_there(run, tmp_path):
    for choice, message in (
        ({"layer": 3}, "there is no layer 3: the model has 2, numbered from 1"),
        ({"layer": 0}, "there is no layer 0"),
        ({"head": 5}, "there is no head 5"),
    ):
        with pytest.raises(UserError, match=message):
            explain_graph(run("sfi"), 3, out=tmp_path / "out", page=False, **choice)
    assert not (tmp_path / "out").exists()


def test_a_figure_that_cannot_be_finished_leaves_nothing(recorded, tmp_path, monkeypatch):
    figure = draw_maps(recorded()[1], 0, [0])

    def torn(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr("os.replace", torn)
    with pytest.raises(OSError, match="no space"):
        figures.save(figure, tmp_path / "maps")
    assert not list(tmp_path.iterdir())
