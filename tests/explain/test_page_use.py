"""The page in a real browser: pointer, keyboard, screens, hostile texts, large graphs."""

import math

import pytest
import torch

from explain.browser import settle, text
from explain.records import LAYERS, NODES, make_layer, make_record
from sfiformer.data.task import Task
from sfiformer.explain.page import write_page


def test_a_click_asks_another_node(opened, ring):
    page = opened(ring)
    for node in (3, 17):
        page.locator(f".node[data-node='{node}']").click()
        assert page.locator("#query").input_value() == str(node)
        assert text(page, "query-name") == f"node {node}"
        assert page.locator(".node.query").count() == 1


def test_the_page_begins_with_the_layer_and_head_that_were_asked_for(opened, ring):
    page = opened(ring, layer=2, head=1)
    assert page.evaluate("() => [sfi.state.layer, sfi.state.head]") == [1, 0]
    page = opened(ring)
    assert page.evaluate("() => [sfi.state.layer, sfi.state.head]") == [0, -1]


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
        name for name in ("graph", "zoom-in", "layer", "head", "lam", "flow", "query") if name not in reached
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


def test_a_large_page_loads_lazily(opened, record_property):
    generator = torch.Generator().manual_seed(0)
    nodes, places = 500, torch.rand(500, 2, generator=generator)
    layers = [make_layer(seed, *LAYERS[0], nodes=nodes, heads=4, width=68) for seed in range(8)]
    record = make_record(layers, nodes=nodes, positions=places)
    page = opened(record)
    page.locator(".node.query").wait_for()
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert page.evaluate("[...sfi.record.opened.keys()]") == [f"layer-0-head-{head}" for head in range(4)]
    page.locator("#layer").press("End")
    assert page.evaluate("[...sfi.record.opened.keys()][0]") == "layer-7-head-0"
    record_property(
        "measured", f"a page of 500 nodes, 8 layers and 4 heads of 68 loads in {loaded / 1000:.2f} s"
    )


def test_a_view_has_an_address(opened, ring):
    page = opened(ring)
    page.locator("#layer").press("ArrowRight")
    page.locator("#head").press("Home")
    page.locator("#lam").press("ArrowRight")
    page.get_by_text("flow + Ã").click()
    page.locator("#query").fill("7")
    page.locator("#query").press("Enter")
    page.wait_for_url("**#layer=2&head=1&query=7&lam=0.05&shown=adjacent")
    state, listed = page.evaluate("sfi.state"), page.locator("#largest").inner_text()
    page.reload()
    assert page.evaluate("sfi.state") == state
    assert page.locator("#largest").inner_text() == listed
    page.goto(page.url.split("#")[0] + "#layer=99&head=x&query=-1&lam=none")
    assert page.evaluate("[sfi.state.layer, sfi.state.head, sfi.state.query, sfi.state.factor]") == [
        1,
        -1,
        7,
        1,
    ]
