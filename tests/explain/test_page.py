"""The page in a real browser: its flows against Python's, and what it shows of them."""

import itertools
import math

import pytest
import torch

import oracles
from explain.browser import settle, text
from explain.records import HEADS, LAYERS, NODES, beside_adjacency, make_layer, make_record, python_flows
from sfiformer.data.smiles import molecule_graph
from sfiformer.data.task import Task

STRENGTHS = [0.0, 0.3, 1.0, 8.0]  # times λ as trained


def page_flows(page, **problem) -> torch.Tensor:
    """The flows of all queries, [n, n]."""
    found = page.evaluate(
        """problem => Array.from({ length: sfi.record.n }, (_, query) =>
            Array.from(sfi.record.flows({ ...problem, query }).flows))""",
        problem,
    )
    return torch.tensor(found, dtype=torch.float64)


def test_flows_agree_with_python(opened, ring):
    page = opened(ring)
    for (number, layer), factor in itertools.product(enumerate(ring.layers), STRENGTHS):
        lam = layer.lam * factor
        expected = python_flows(layer, lam)
        for head in range(HEADS):
            found = page_flows(page, layer=number, head=head, lam=lam, adjacent=False)
            assert (found - expected[head]).abs().max() <= 1e-6, f"layer {number}, head {head}, {factor} λ"
        mean = page_flows(page, layer=number, head=-1, lam=lam, adjacent=False)
        assert (mean - expected.mean(0)).abs().max() <= 1e-6
        mixed = page_flows(page, layer=number, head=1, lam=lam, adjacent=True)
        assert (mixed - beside_adjacency(ring, number, expected[1])).abs().max() <= 1e-6


@pytest.mark.parametrize("spread", [1.0, 20.0, 60.0])
def test_wide_scores_agree_with_decimal_arithmetic(opened, ring, spread):
    generator = torch.Generator().manual_seed(3)
    rows = (
        (torch.randn(2, 30, 12, generator=generator, dtype=torch.float64) * spread).transpose(0, 1).tolist()
    )
    rows.append([[0.0, 40.0], [0.0, -40.0]])  # a key that weighs less than rounding, and much friction
    page = opened(ring)
    for alpha, lam in itertools.product([0.1, math.inf], [0.05, 0.5]):
        found = page.evaluate(
            """([rows, lam, alpha]) => rows.map(([s, u]) => Array.from(sfi.solveFlows(
                Float64Array.from(s), Float64Array.from(u), { lam, alpha: alpha ?? Infinity, scaling: "absolute" }
            ).flows))""",
            [rows, lam, None if math.isinf(alpha) else alpha],
        )
        for (s, u), flows in zip(rows, found, strict=True):
            expected = oracles.PreciseRow(s, u).flows(lam, alpha)
            assert flows == pytest.approx(expected, abs=1e-6), f"alpha={alpha}, lam={lam}"


def test_what_is_shown_is_what_python_finds(opened, ring):
    page = opened(ring)
    page.locator("#query").fill("5")
    page.locator("#query").press("Enter")
    flows = python_flows(ring.layers[0], ring.layers[0].lam).mean(0)
    row = flows[5]
    assert text(page, "zeros") == str(int((row == 0).sum()))
    assert text(page, "support") == f"{int((row > 0).sum())} of {NODES}"
    assert float(text(page, "sum")) == pytest.approx(row.sum().item(), abs=1e-4)
    assert settle(page) == pytest.approx((flows == 0).double().mean().item(), abs=6e-4)
    assert page.locator(".node.zero").count() == int((row == 0).sum())
    assert "truth: 1" in text(page, "query-said")

    links = page.locator(".links path:visible").evaluate_all(
        "paths => paths.map(path => [path.dataset.node, path.style.strokeWidth])"
    )
    sources = row.nonzero().flatten().tolist()
    assert sorted(int(node) for node, _ in links) == [node for node in sources if node != 5]
    widths = torch.tensor([float(width.removesuffix("px")) for _, width in links])
    drawn = row[[int(node) for node, _ in links]].float()
    wide = widths > 0.61  # thinner ones are drawn as hairlines
    assert (widths / drawn)[wide].std() <= 1e-3 * (widths / drawn)[wide].mean()

    listed = page.locator("#largest button").evaluate_all("all => all.map(each => Number(each.dataset.node))")
    assert listed == row.argsort(descending=True)[: len(listed)].tolist()
    for node, hop in zip(listed, page.locator("#largest .hop").all_text_contents(), strict=True):
        steps = min((node - 5) % NODES, (5 - node) % NODES)
        assert hop == ("itself" if steps == 0 else f"{steps} hop{'s' * (steps > 1)}")


def test_sliders_solve_again(opened, ring):
    page = opened(ring)
    friction, zeros = page.locator("#lam"), lambda: int(text(page, "zeros"))
    trained = zeros()
    assert page.locator("#trained").is_disabled()
    friction.press("End")
    assert zeros() > trained
    friction.press("Home")
    assert (zeros(), text(page, "lam-value")) == (0, "λ = 0")
    page.locator("#trained").click()
    assert zeros() == trained

    page.locator("#layer").press("ArrowRight")
    page.locator("#head").press("Home")
    query = int(page.locator("#query").input_value())
    assert page.evaluate("[sfi.state.layer, sfi.state.head]") == [1, 0]
    flows = python_flows(ring.layers[1], ring.layers[1].lam)[0]
    assert zeros() == int((flows[query] == 0).sum())
    assert settle(page) == pytest.approx((flows == 0).double().mean().item(), abs=6e-4)

    page.get_by_text("flow + Ã").click()
    mixed = beside_adjacency(ring, 1, flows)
    assert zeros() == int((mixed[query] == 0).sum())
    page.locator("#layer").fill("4")  # a layer without Ã
    assert page.locator("#adjacent").is_disabled()


def test_molecules_are_drawn_as_molecules(opened):
    pytest.importorskip("rdkit")
    fields = {name: torch.from_numpy(x) for name, x in molecule_graph("C[C@H]([NH3+])C(=O)OCC#N").items()}
    atoms = len(fields["x"])
    record = make_record(
        [make_layer(0, *LAYERS[0], nodes=atoms)],
        nodes=atoms,
        edge_index=fields["edge_index"],
        adjacency=oracles.dense_adjacency(fields["edge_index"], atoms).float(),
        node_labels=["C", "C", "N", "C", "O", "O", "C", "C", "N"],
        atoms=fields["x"],
        bonds=fields["edge_attr"],
        outputs=torch.zeros(1, 2),
        target=torch.tensor([[1.0, math.nan]]),
        task=Task("graph", "multilabel", 2, target_names=("soluble", "<b>toxic</b>")),
    )
    page = opened(record, title="An ester")
    shown = {
        atom: page.locator(f".node[data-node='{atom}'] text").all_text_contents() for atom in range(atoms)
    }
    assert shown == {0: [], 1: [], 2: ["NH₃⁺"], 3: [], 4: ["O"], 5: ["O"], 6: [], 7: [], 8: ["N"]}
    lines = page.locator(".bonds").first.get_attribute("d").count("M")
    assert lines == 6 + 2 + 3  # six single bonds, a double and a triple one
    assert page.locator("#said td").all_text_contents() == ["soluble", "0.5", "1", "<b>toxic</b>", "0.5", "?"]
    assert page.title() == "An ester"

    page.locator("#lam").press("End")  # most atoms carry no flow now
    for atom in range(atoms):
        page.locator(f".node[data-node='{atom}']").click()
        ring = page.locator(".node.query circle").evaluate("circle => getComputedStyle(circle).stroke")
        assert ring == "rgb(209, 69, 11)", f"atom {atom} is the query and has no ring"
