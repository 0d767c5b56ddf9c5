"""The page in a real browser: its flows against Python's, what it shows, and how it is used."""

import itertools
import math
import time

import pytest
import torch

import oracles
from explain.browser import launched
from sfiformer.data.smiles import molecule_graph
from sfiformer.data.task import Task
from sfiformer.explain.page import write_page
from sfiformer.explain.record import GraphRecord, LayerRecord
from sfiformer.flow import flows_from_scores

PATIENCE = 60_000  # milliseconds, for a busy machine
NODES, HEADS = 24, 3
STRENGTHS = [0.0, 0.3, 1.0, 8.0]  # times λ as trained
LAYERS = [  # spread of the scores, λ n, α, scaling, γ
    (1.0, 1.0, 0.1, "absolute", 1.0),
    (1.0, 2.0, math.inf, "absolute", 0.3),
    (5.0, 1.0, 0.1, "absolute", 2.0),
    (1.0, 1.0 * NODES, math.inf, "potential", None),  # there λ is λ* itself
    (20.0, 0.5 * NODES, math.inf, "potential", 1.0),
]


def make_layer(
    seed, spread, strength, alpha, scaling, gamma, nodes=NODES, heads=HEADS, width=7
) -> LayerRecord:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(4, nodes, heads, width, generator=generator) * spread**0.5
    parts[1::2, nodes // 2] = parts[1::2, nodes // 3]  # two keys the same, as automorphic atoms have them
    return LayerRecord(*parts, width**-0.5, strength / nodes, strength, alpha, scaling, gamma)


def make_record(layers, nodes=NODES, **others) -> GraphRecord:
    ring = torch.arange(nodes)
    edges = torch.stack([torch.cat([ring, ring.roll(-1)]), torch.cat([ring.roll(-1), ring])])
    return GraphRecord(
        **{
            "name": "ring",
            "num_nodes": nodes,
            "edge_index": edges,
            "adjacency": oracles.dense_adjacency(edges, nodes).float(),
            "layers": layers,
            "outputs": torch.eye(nodes, 4),
            "target": torch.arange(nodes) % 4,
            "task": Task("node", "classification", 4),
            **others,
        }
    )


def python_flows(layer: LayerRecord, lam: float) -> torch.Tensor:
    """[heads, n, n] in float64 throughout."""
    q, k, q_friction, k_friction = (
        x.double().transpose(0, 1) for x in (layer.q, layer.k, layer.q_friction, layer.k_friction)
    )
    s, u = q @ k.mT * layer.scale, q_friction @ k_friction.mT * layer.scale
    return flows_from_scores(s, u, lam=lam, alpha=layer.alpha, scaling=layer.scaling)


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of a record; whatever the browser complains of fails the test."""
    complaints, contexts = [], []

    def open_page(record, *, width=1280, height=800, scheme="light", **options):
        path = write_page(record, tmp_path / "page.html", **options)
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def ring():
    return make_record([make_layer(seed, *settings) for seed, settings in enumerate(LAYERS)])


def page_flows(page, **problem) -> torch.Tensor:
    """The flows of all queries, [n, n]."""
    found = page.evaluate(
        """problem => Array.from({ length: sfi.record.n }, (_, query) =>
            Array.from(sfi.record.flows({ ...problem, query }).flows))""",
        problem,
    )
    return torch.tensor(found, dtype=torch.float64)


def text(page, name: str) -> str:
    return page.locator(f"#{name}").text_content()


def settle(page) -> float:
    """The share of zeros over all queries, once it is counted."""
    page.locator("#share", has_text="%").wait_for(timeout=PATIENCE)
    return float(text(page, "share").rstrip("%")) / 100


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
        assert (mixed - ring.combined(number, expected)[1]).abs().max() <= 1e-6


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
    mixed = ring.combined(1, flows[None])[0]
    assert zeros() == int((mixed[query] == 0).sum())
    page.locator("#layer").fill("4")  # a layer without Ã
    assert page.locator("#adjacent").is_disabled()


def test_a_click_asks_another_node(opened, ring):
    page = opened(ring)
    for node in (3, 17):
        page.locator(f".node[data-node='{node}']").click()
        assert page.locator("#query").input_value() == str(node)
        assert text(page, "query-name") == f"node {node}"
        assert page.locator(".node.query").count() == 1


def test_the_keyboard_is_enough(opened, ring):
    page = opened(ring)
    reached = []
    for _ in range(24):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "() => { const at = document.activeElement, style = getComputedStyle(at.name === 'shown' "
            "? at.nextElementSibling : at); return [at.id || at.name || at.className, style.outlineStyle]; }"
        )
        if focused[0]:
            assert focused[1] == "solid", f"{focused[0]} does not show that it has the focus"
        reached.append(focused[0])
    assert [
        name for name in ("graph", "zoom-in", "layer", "head", "lam", "shown", "query") if name not in reached
    ] == []

    graph, query = page.locator("#graph"), page.locator("#query")
    seen = {query.input_value()}
    graph.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"):
        graph.press(key)
        seen.add(query.input_value())
    assert len(seen) >= 3
    whole = graph.get_attribute("viewBox")
    graph.press("+")
    assert graph.get_attribute("viewBox") != whole
    graph.press("0")
    assert graph.get_attribute("viewBox") == whole
    page.locator("#status", has_text=f"Query node {query.input_value()}: ").wait_for(state="attached")

    page.locator("#largest button").nth(1).press("Enter")  # the list is a way through the graph too
    assert query.input_value() not in seen or len(seen) > 3
    names = page.locator("input, button, svg[tabindex]").evaluate_all(
        "all => all.filter(each => !(each.labels?.length || each.ariaLabel || each.textContent.trim())).map(each => each.id)"
    )
    assert names == []


def test_narrow_screens_have_the_panel_below(opened, ring):
    page = opened(ring, width=360, height=700)
    graph, panel = page.locator(".stage").bounding_box(), page.locator(".panel").bounding_box()
    assert panel["y"] >= graph["y"] + graph["height"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert graph["width"] == panel["width"] == 360


def test_dark_scheme(opened, ring):
    grounds = [
        opened(ring, scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    light, dark = (sum(map(int, ground[4:-1].split(","))) for ground in grounds)
    assert dark < 150 < 600 < light


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


def test_no_text_becomes_code_and_nothing_leaves(opened, ring):
    hostile = '</script><script>alert("!")</script><!--<img src=x onerror=alert(1)>${alert(2)}'
    record = make_record(
        ring.layers[:1],
        node_labels=[hostile] * NODES,
        task=Task("node", "classification", 4, class_names=(hostile,) * 4),
    )
    page = opened(record, title=hostile)
    assert page.title() == page.locator("h1").text_content() == hostile
    assert text(page, "query-name").startswith(hostile)
    assert hostile in text(page, "query-said")
    assert page.locator("img").count() == 0
    assert page.evaluate("() => [...document.querySelectorAll('[src], [href]')].length") == 0


def test_the_policy_forbids_all_network(browser, ring, tmp_path):
    page = browser.new_page()  # complains, as it should
    page.goto(write_page(ring, tmp_path / "page.html").as_uri())
    refused = page.evaluate(
        """() => new Promise((resolve) => {
            document.addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
            fetch("https://example.org/").catch(() => setTimeout(resolve, 5000, "nothing stood in the way"));
        })"""
    )
    page.close()
    assert refused == "connect-src"


@pytest.mark.parametrize("nodes", [1, 2])
def test_least_graphs(opened, nodes):
    dense = make_layer(0, 1.0, 0.0, math.inf, "absolute", None, nodes=nodes)
    record = make_record(
        [dense], nodes=nodes, edge_index=torch.zeros(2, 0, dtype=torch.int64), adjacency=torch.eye(nodes)
    )
    page = opened(record)
    assert text(page, "sum") == "1.0000"
    assert page.locator("#lam").is_disabled()
    assert settle(page) == 0


def test_a_large_page_loads_lazily(opened, capsys):
    generator = torch.Generator().manual_seed(0)
    nodes, places = 500, torch.rand(500, 2, generator=generator)
    layers = [make_layer(seed, *LAYERS[0], nodes=nodes, heads=4, width=68) for seed in range(8)]
    record = make_record(layers, nodes=nodes, positions=places)
    start = time.perf_counter()
    page = opened(record)
    page.locator(".node.query").wait_for()
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    seconds = time.perf_counter() - start
    assert page.evaluate("[...sfi.record.opened.keys()]") == [f"layer-0-head-{head}" for head in range(4)]
    page.locator("#layer").press("End")
    assert page.evaluate("[...sfi.record.opened.keys()][0]") == "layer-7-head-0"
    with capsys.disabled():
        print(
            f"\n500 nodes, 8 layers, 4 heads of 68: loaded in {loaded / 1000:.2f} s, written and loaded in {seconds:.2f} s"
        )
