"""Records against the layers that they are of."""

import math

import pytest
import torch
from torch.nn import functional as F

from oracles import dense_adjacency
from sfiformer.data import GraphStore, cluster
from sfiformer.data.official import find
from sfiformer.data.smiles import molecule_graph
from sfiformer.errors import UserError
from sfiformer.explain.page.said import said
from sfiformer.explain.record import record, record_run
from sfiformer.nn import SFiFormer

MODELS = [
    {},
    {"lam": 3.0, "qk_norm": False},
    {"lam_scaling": "potential", "lam": 0.5},
    {"lam_scaling": "largest"},
    {"friction": "tied", "alpha": math.inf},
    {"adjacency": False},
    {"attention": "dfi"},
    {"attention": "softmax", "head_width": "narrow"},
    {"solver": "proximal"},
]


@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_the_recorded_flows_make_the_layers_output(settings, recorded, batch):
    """LayerNorm(Σ_h [(Ã + γ Z^h)/(1 + γ)] X W_V^h W_O^h + b_O), for the input that each layer got."""
    model, seen = recorded(**settings)
    torch.testing.assert_close(seen.adjacency, dense_adjacency(batch.edge_index, batch.num_nodes).float())
    io = []
    for layer in model.layers:
        layer.attention.register_forward_hook(lambda _, given, made: io.append((given[0], made)))
    with torch.no_grad():
        outputs = model.eval()(batch)
    torch.testing.assert_close(seen.outputs, outputs)
    for number, (layer, (x, made)) in enumerate(zip(model.layers, io, strict=True)):
        attention = layer.attention
        mixing = seen.combined(number)  # [heads, n, n]
        assert mixing.dtype == torch.float32
        values = attention.value(x).view(len(x), attention.heads, -1).transpose(0, 1)  # [heads, n, width]
        mixed = (mixing @ values).transpose(0, 1).flatten(1)
        out = F.linear(mixed, attention.out.weight, attention.out.bias)
        if attention.norm is not None:
            out = attention.norm(out)
        torch.testing.assert_close(out, made, atol=2e-5, rtol=2e-5)


def test_strengths(recorded, batch):
    n = batch.num_nodes
    model, seen = recorded(lam=3.0)
    for layer, module in zip(seen.layers, model.layers, strict=True):
        factor = math.log1p(math.exp(module.attention.raw_lam_factor.item()))
        assert factor != pytest.approx(1)
        assert layer.lam_star == pytest.approx(3 * factor)
        assert layer.lam == pytest.approx(3 * factor / n)
        assert layer.gamma == pytest.approx(math.log1p(math.exp(module.attention.raw_gamma.item())))
        assert (layer.alpha, layer.scaling, layer.dense) == (0.1, "absolute", False)
        assert layer.scale == pytest.approx(1 / math.sqrt(8))
    layer = recorded(lam_scaling="potential")[1].layers[0]
    assert (layer.lam, layer.alpha, layer.scaling) == (layer.lam_star, math.inf, "potential")
    layer = recorded(attention="softmax")[1].layers[0]
    assert (layer.lam, layer.lam_star, layer.alpha, layer.gamma, layer.dense) == (0, 0, math.inf, None, True)
    assert not layer.q_friction.any()
    assert not layer.k_friction.any()


def test_the_largest_graph_of_training_is_remembered(recorded, batch):
    model, _ = recorded(lam_scaling="largest", lam=2.0)
    for module in model.layers:
        module.attention.largest.fill_(500)
    layer = record(model, batch, task=find("cluster").task).layers[0]
    assert layer.lam == pytest.approx(layer.lam_star / 500)


def test_resistance_friction_and_other_strengths(recorded):
    layer = recorded()[1].layers[1]
    q, k = layer.q[:, 1], layer.k[:, 1]  # the second head by hand
    s = q @ k.t() / math.sqrt(q.shape[-1])
    torch.testing.assert_close(layer.resistance()[1], (-s).softmax(-1))
    u = layer.q_friction[:, 1] @ layer.k_friction[:, 1].t() / math.sqrt(q.shape[-1])
    torch.testing.assert_close(layer.friction()[1], u.softmax(-1))

    # Without friction: softmax(s), less what the soft constraint keeps back.
    dense = layer.flows(lam=0.0)[1]
    torch.testing.assert_close(dense / dense.sum(-1, keepdim=True), s.softmax(-1), atol=1e-6, rtol=1e-4)
    assert not (dense == 0).any()
    shares = [(layer.flows(lam=strength * layer.lam) == 0).float().mean().item() for strength in (1, 10, 100)]
    assert shares == sorted(shares)
    assert shares[-1] > 0.5


def test_the_iteration_ends_at_the_exact_flows(recorded):
    layer = recorded(lam=0.5)[1].layers[0]
    exact = layer.flows()
    distances = [float((layer.proximal(count) - exact).norm() / exact.norm()) for count in (0, 20, 3000)]
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 0.01
    assert layer.has_proximal
    for settings in ({"alpha": math.inf}, {"lam_scaling": "potential"}, {"attention": "dfi"}):
        hard = recorded(**settings)[1].layers[0]
        assert not hard.has_proximal
        with pytest.raises(ValueError, match="proximal"):
            hard.proximal(5)


def test_the_model_is_left_as_it_was(recorded, batch):
    model, _ = recorded()
    record(model.train(), batch, task=find("cluster").task)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_cannot_be_recorded(recorded, batch):
    two = cluster((2, 1, 1), seed=9)["train"].batch([0, 1])
    with pytest.raises(ValueError, match="one graph"):
        record(recorded()[0], two, task=find("cluster").task)
    for attention in ("none", "adjacency"):
        with pytest.raises(UserError, match=f"attention: {attention}, so there are no flows"):
            recorded(attention=attention)


def test_molecules_keep_their_atoms():
    fields = {key: torch.from_numpy(value) for key, value in molecule_graph("CC(=O)N").items()}
    store = GraphStore(
        torch.tensor([0, 4]),
        torch.tensor([0, 6]),
        fields["edge_index"],
        node={"x": fields["x"]},
        edge={"edge_attr": fields["edge_attr"]},
    )
    model = SFiFormer.from_preset("peptides-func", dim=16, heads=2, pe="none")
    seen = record(model, store.batch([0]), task=find("peptides-func").task)
    assert seen.node_labels == ["C", "C", "O", "N"]
    assert seen.atoms.tolist() == fields["x"].tolist()
    assert seen.bonds.shape == (6, 3)
    assert seen.target is None
    assert seen.outputs.shape == (1, 10)


def test_records_of_a_run(run, graphs):
    seen = record_run(run("sfi"), 7, split="val")
    assert (seen.name, seen.id, seen.title) == ("val[7]", "37", "val[7], id 37")  # its place in the file
    assert seen.num_nodes == 6  # 4 + 7 % 5
    assert seen.target.tolist() == [1]
    assert seen.task.class_names == ("path", "ring")
    assert len(seen.layers) == 2

    last = record_run(run("sfi"), 89, data=graphs)  # all splits of the file
    assert last.title == last.name == "graphs.jsonl[89]"
    torch.testing.assert_close(last.outputs, record_run(run("sfi"), 29).outputs)

    with pytest.raises(UserError, match="there is no graph 30 in test: its 30 graphs are numbered from 0"):
        record_run(run("sfi"), 30)
    with pytest.raises(UserError, match="attention: none"):
        record_run(run("none"), 0)


def test_graphs_need_no_labels(run, tmp_path):
    unlabelled = tmp_path / "new.jsonl"
    unlabelled.write_text('{"x": [[0.0, 1.0], [0.5, 1.0]], "edges": [[0, 1], [1, 0]]}\n')
    seen = record_run(run("sfi"), 0, data=unlabelled)
    assert (seen.title, seen.num_nodes) == ("new.jsonl[0]", 2)
    assert said(seen)["graph"][0][2] == "?"


def test_labels_that_will_not_do_are_left_out_of_a_file(run, tmp_path):
    other = tmp_path / "other.jsonl"
    graph = '{"x": [[0.0, 1.0], [0.5, 1.0]], "edges": [[0, 1], [1, 0]], "y": "star"}\n'
    other.write_text(graph)
    with pytest.warns(UserWarning, match="labels are left out: .*'star' is not among the 2 classes"):
        assert record_run(run("sfi"), 0, data=other).num_nodes == 2
    other.write_text(graph.replace("[0.5, 1.0]", "[0.5]"))
    with pytest.raises(ValueError, match=r"other\.jsonl, line 1: x"):
        record_run(run("sfi"), 0, data=other)


def test_graphs_by_their_ids(run, graphs):
    sparse = run("sfi")
    assert record_run(sparse, "62").name == "test[2]"
    with pytest.raises(UserError, match="there is no graph '37' in test; it is in val"):
        record_run(sparse, "37")
    with pytest.raises(
        UserError, match=r"there is no graph 'x' in test; .*splits\.csv lists those there are"
    ):
        record_run(sparse, "x")
    assert (
        record_run(sparse, "37", data=graphs).name
        == record_run(sparse, 37, data=graphs).name
        == "graphs.jsonl[37]"
    )
    with pytest.raises(UserError, match=r"no graph 'x' in graphs\.jsonl: its graphs are called 0, 1, 2, …"):
        record_run(sparse, "x", data=graphs)
    splits = sparse / "splits.csv"
    written = splits.read_text()
    assert written.splitlines()[0] == "id,split,graph,row,digest"
    assert written.splitlines()[1].startswith("0,train,0,0,")
    try:
        splits.write_text(written.replace("61,test", "60,test"))
        with pytest.raises(UserError, match=r"test has 2 graphs '60'; give a number: \[0, 1\]"):
            record_run(sparse, "60")
        splits.write_text("a,b\n1,2\n")
        with pytest.raises(UserError, match=r"splits\.csv is damaged"):
            record_run(sparse, 0)
        splits.unlink()  # of an earlier version
        assert record_run(sparse, 0).title == "test[0]"
    finally:
        splits.write_text(written)
