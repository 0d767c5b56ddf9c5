import pytest
import torch
from torch_geometric.data import Batch, Data

from sfiformer import ModelConfig, SFiFormer
from sfiformer.nn import load_dense
from sfiformer.presets import preset_names

# The paper's tables, which print 2,929,009 for Peptides-func: the model of peptides-func-paper-tied. The full
# one is Peptides-struct's less one output.
PARAMETERS = {
    "pascalvoc-sp": 1_250_805,
    "coco-sp": 1_249_869,
    "peptides-func": 3_819_189,
    "peptides-struct": 3_819_425,
    "pcqm-contact": 978_526,
    "mnist": 275_465,
    "cifar10": 275_545,
    "pattern": 222_213,
    "cluster": 1_211_330,
}
PRESETS = [name + suffix for name in PARAMETERS for suffix in ("", "-paper")]
TIED = "peptides-func-paper-tied"
NODE_FIELDS = ("x", "lappe_vectors", "eslappe_vectors", "rwse")
SMALL = {
    "dim": 24,
    "layers": 2,
    "heads": 2,
    "node_encoder": "linear",
    "node_features": 5,
    "edge_encoder": "linear",
    "edge_features": 2,
    "pe_size": 4,
    "head": "graph",
    "outputs": 3,
}


def test_every_preset_is_tested():
    assert sorted([*PRESETS, TIED, "custom"]) == preset_names()


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_are_the_papers(name):
    with torch.device("meta"):
        assert SFiFormer.from_preset(name).num_parameters == PARAMETERS[name.removesuffix("-paper")]


def test_parameter_count_printed_for_peptides_func():
    assert SFiFormer.from_preset(TIED).num_parameters == 2_929_009


@pytest.mark.parametrize("name", [*PARAMETERS, TIED])
def test_every_preset_learns_from_a_batch_of_its_shape(name, make_batch):
    torch.manual_seed(0)
    model = SFiFormer.from_preset(name)
    config = model.config
    batch = make_batch(config)
    rows = {"graph": batch.num_graphs, "node": batch.num_nodes, "link": batch.edge_label_index.size(1)}
    logits = model(batch)
    assert logits.shape == (rows[config.head], config.outputs)
    logits.square().mean().backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_papers_setting_runs_too(name, make_batch):
    model = SFiFormer.from_preset(f"{name}-paper", layers=1)
    model(make_batch(model.config)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def _permuted(graph: Data, order: torch.Tensor) -> Data:
    """The same graph with node order[i] in place i and its edges shuffled."""
    place = order.argsort()
    edges = torch.randperm(graph.edge_index.size(1))
    permuted = graph.clone()
    for field in NODE_FIELDS:
        permuted[field] = graph[field][order]
    permuted.edge_index = place[graph.edge_index][:, edges]
    permuted.edge_attr = graph.edge_attr[edges]
    permuted.edge_label_index = place[graph.edge_label_index]
    return permuted


@pytest.mark.parametrize("head", ["graph", "node", "link"])
@pytest.mark.parametrize(
    "settings",
    [
        {"pe": "lappe", "norm": "graph"},
        {"pe": "eslappe"},
        {"pe": "rwse", "attention": "softmax", "head_width": "narrow", "norm": "layer"},
        {"local": "gine", "attention": "dfi"},
    ],
)
def test_permutation_equivariance(settings, head, make_graphs):
    config = ModelConfig(**{**SMALL, **settings, "head": head, "outputs": 1})
    graphs = make_graphs(config, sizes=(9, 14))
    orders = [torch.randperm(graph.num_nodes) for graph in graphs]
    permuted = [_permuted(graph, order) for graph, order in zip(graphs, orders, strict=True)]
    model = SFiFormer(config).double().eval()
    out, out_permuted = model(Batch.from_data_list(graphs)), model(Batch.from_data_list(permuted))
    if head == "node":
        out = out[torch.cat([orders[0], orders[1] + 9])]
    torch.testing.assert_close(out_permuted, out)


@pytest.mark.parametrize("name", ["peptides-func", "coco-sp", "mnist", "pcqm-contact", "cluster"])
def test_a_graph_does_not_see_its_batch_mates(name, make_graphs):
    model = SFiFormer.from_preset(name, layers=2)
    graphs = make_graphs(model.config)
    model(Batch.from_data_list(graphs))  # statistics of the batch norms
    model.double().eval()
    together = model(Batch.from_data_list(graphs))
    alone = torch.cat([model(Batch.from_data_list([graph])) for graph in graphs])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("name", ["peptides-func-paper", "cluster-paper"])
def test_nor_where_friction_goes_by_the_largest_graph_once_it_was_trained(name, make_graphs):
    model = SFiFormer.from_preset(name, layers=2, lam=30.0)
    assert model.config.lam_scaling == "largest"
    graphs = make_graphs(model.config)
    model(Batch.from_data_list(graphs))
    model.double().eval()
    larger = make_graphs(model.config, sizes=(60,))  # than any in training
    alone = model(Batch.from_data_list(graphs[:1]))
    for mates in (graphs[1:], larger, larger + graphs):
        torch.testing.assert_close(model(Batch.from_data_list(graphs[:1] + mates))[: len(alone)], alone)


def test_a_single_data_is_a_batch_of_one(make_graphs):
    model = SFiFormer(ModelConfig(**SMALL)).eval()
    (graph,) = make_graphs(model.config, sizes=(6,))
    torch.testing.assert_close(model(graph), model(Batch.from_data_list([graph])))


@pytest.mark.parametrize("name", ["peptides-func", "mnist", "pcqm-contact", "cluster"])
def test_the_packed_batch_and_pygs_are_alike(name, make_graphs):
    store = pytest.importorskip("sfiformer.data.store")
    model = SFiFormer.from_preset(name, layers=2).eval()
    graphs = make_graphs(model.config)
    order = [2, 0, 3, 1]
    packed = store.GraphStore.from_pyg(graphs).batch(order)
    torch.testing.assert_close(model(packed), model(Batch.from_data_list([graphs[i] for i in order])))


@pytest.mark.parametrize("sizes", [(1,), (-3,), (1, 1)])
def test_tiny_batches_train(sizes, make_batch):
    model = SFiFormer(ModelConfig(**SMALL, pe="lappe"))
    model(make_batch(model.config, sizes=sizes)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert all(buffer.isfinite().all() for buffer in model.buffers() if buffer.is_floating_point())


def test_embeddings_rank_links(make_batch):
    model = SFiFormer.from_preset("pcqm-contact", layers=1).eval()
    batch = make_batch(model.config)
    scores = model.embed(batch) @ model.embed(batch).t()
    head, tail = batch.edge_label_index
    torch.testing.assert_close(model(batch)[:, 0], scores[head, tail])


def test_half_precision(make_batch):
    model = SFiFormer.from_preset("mnist", layers=2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(make_batch(model.config)).float().square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", ["pascalvoc-sp", "coco-sp", "peptides-func", "mnist"])
@pytest.mark.parametrize("training", [True, False])
def test_parameters_in_half_precision(make_batch, preset, dtype, training):
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0, "sign_flip": False}
    model = SFiFormer.from_preset(preset, layers=2, dim=24, **quiet).train(training)
    batch = make_batch(model.config)
    expected = model(batch)
    out = model.to(dtype)(batch)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    out.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_open_settings_are_named():
    with pytest.raises(ValueError, match="head is not set"):
        SFiFormer.from_preset("custom")
    config = ModelConfig().fitted(level="node", outputs=2, node_features=0, edge_features=0)
    assert SFiFormer(config).config.node_encoder == "constant"


def test_overrides_are_checked():
    with pytest.raises(
        ValueError, match=r"overrides: there is no key 'atention'; did you mean 'attention'\?"
    ):
        SFiFormer.from_preset("mnist", atention="dfi")


def test_repr_says_what_it_is():
    text = repr(SFiFormer.from_preset("mnist"))
    assert "5 layers, dim=40, heads=4, local=gatedgcn, attention=sfi, 275,465 parameters" in text


def test_reset_parameters_draws_anew():
    model = SFiFormer(ModelConfig(**{**SMALL, "edge_encoder": "bond", "pe": "lappe"}))
    before = {key: value.clone() for key, value in model.named_parameters()}
    torch.manual_seed(1)
    model.reset_parameters()
    for key, value in model.named_parameters():
        constant = value.dim() == 0 or "norm" in key
        assert torch.equal(value, before[key]) == constant, key
        assert value.abs().max() < 4


def test_load_dense_starts_the_sparse_model_from_the_dense_one():
    dense = SFiFormer(ModelConfig(**SMALL, attention="dfi"))
    sparse = SFiFormer(ModelConfig(**SMALL))
    before = {key: value.clone() for key, value in sparse.state_dict().items()}
    report = load_dense(sparse, dense.state_dict())
    assert set(report.loaded) == set(dense.state_dict())
    assert set(report.loaded) | set(report.fresh) == set(sparse.state_dict())
    assert {key.split(".")[3] for key in report.fresh} >= {"friction_query", "friction_key"}
    for key, value in sparse.state_dict().items():
        source = dense.state_dict() if key in report.loaded else before
        assert torch.equal(value, source[key]), key
    assert "friction_query" in str(report)


@pytest.mark.parametrize("scalings", [("largest", "potential"), ("graph", "largest"), ("largest", "largest")])
def test_load_dense_does_not_ask_how_friction_would_have_scaled(scalings):
    dense, sparse = (
        SFiFormer(ModelConfig(**SMALL, attention=attention, lam_scaling=scaling))
        for attention, scaling in zip(("dfi", "sfi"), scalings, strict=True)
    )
    report = load_dense(sparse, dense.state_dict())
    assert not any("largest" in key for key in report.loaded)
    for key in report.loaded:
        assert torch.equal(sparse.state_dict()[key], dense.state_dict()[key]), key
    assert set(report.loaded) | set(report.fresh) == set(sparse.state_dict())


def test_load_dense_takes_all_of_a_dense_model_into_another():
    torch.manual_seed(0)
    first, second = (SFiFormer(ModelConfig(**SMALL, attention="dfi", lam_scaling="graph")) for _ in range(2))
    report = load_dense(second, first.state_dict())
    for key, value in second.named_parameters():
        assert torch.equal(value, first.state_dict()[key]), key
    assert str(report).endswith("started fresh: none")


@pytest.mark.parametrize(
    "other", [{"residual": False}, {"activation": "gelu"}, {"heads": 1, "head_width": "narrow"}]
)
def test_load_dense_refuses_what_no_tensor_shows(other):
    own = {"head_width": other["head_width"]} if "head_width" in other else {}
    sparse = SFiFormer(ModelConfig(**SMALL, **own))
    dense = SFiFormer(ModelConfig(**{**SMALL, **other}, attention="dfi"))
    before = {key: value.clone() for key, value in sparse.state_dict().items()}
    with pytest.raises(ValueError, match=f"not of this model's dense twin: its {next(iter(other))} is"):
        load_dense(sparse, dense.state_dict(), dense.config)
    assert all(torch.equal(value, before[key]) for key, value in sparse.state_dict().items())


def test_load_dense_refuses_another_model():
    sparse = SFiFormer(ModelConfig(**SMALL))
    before = {key: value.clone() for key, value in sparse.state_dict().items()}
    other = SFiFormer(ModelConfig(**{**SMALL, "outputs": 4}, attention="dfi"))
    with pytest.raises(
        ValueError, match=r"head.mlp.out.weight has shape \[4, 24\], not \[3, 24\] \(and 1 more\)"
    ):
        load_dense(sparse, other.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in sparse.state_dict().items())
    with pytest.raises(ValueError, match="attention is softmax"):
        load_dense(SFiFormer(ModelConfig(**SMALL, attention="softmax")), other.state_dict())


@pytest.mark.parametrize("settings", [{"norm": "batch", "pe": "eslappe"}, {"norm": "graph", "local": "gine"}])
def test_padding_graphs_change_nothing(settings, make_graphs):
    """Logits, gradients and running statistics of a training step, with and without graphs of padding."""
    config = ModelConfig(**SMALL, dropout=0.0, **settings)
    graphs, filling = make_graphs(config), make_graphs(config, sizes=(5, 1), seed=1)
    for graph in filling:
        graph.x *= 1e3
    results = []
    for padding in ([], filling):
        torch.manual_seed(0)
        model = SFiFormer(config).double()
        batch = Batch.from_data_list([*graphs, *padding]).apply(
            lambda value: value.double() if value.is_floating_point() else value
        )
        if padding:
            batch.real_nodes = torch.tensor(sum(graph.num_nodes for graph in graphs))
            batch.real_edges = torch.tensor(sum(graph.num_edges for graph in graphs))
        logits = model(batch)[: len(graphs)]
        logits.pow(3).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        results.append([logits.detach(), gradients, model.state_dict()])
    torch.testing.assert_close(results[1], results[0])
