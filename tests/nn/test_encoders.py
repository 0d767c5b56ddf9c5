import re

import pytest
import torch
from torch_geometric.data import Data

import sfiformer.data
from sfiformer import ModelConfig
from sfiformer.nn.encoders import FeatureEncoder, LapPE
from sfiformer.nn.features import BOND_VOCABULARY, EmbeddingSum, LinearEncoder
from sfiformer.nn.partition import Partition

GRAPHS = Partition(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 3, 5]), 2, 3)
OPEN = {
    "node_encoder": "linear",
    "node_features": 3,
    "edge_encoder": "constant",
    "head": "node",
    "outputs": 1,
}


def test_embedding_sum_adds_one_row_of_each_table():
    encoder = EmbeddingSum(BOND_VOCABULARY, 4, "edge_attr")
    tables = encoder.tables.weight.split([5, 6, 2])
    features = torch.tensor([[4, 5, 1], [0, 0, 0]], dtype=torch.uint8)
    wanted = torch.stack(
        [tables[0][4] + tables[1][5] + tables[2][1], tables[0][0] + tables[1][0] + tables[2][0]]
    )
    torch.testing.assert_close(encoder(features), wanted)
    assert encoder(features[:0]).shape == (0, 4)


def test_embedding_sum_refuses_what_is_outside_its_tables():
    encoder = EmbeddingSum(BOND_VOCABULARY, 4, "edge_attr")
    with pytest.raises(ValueError, match=r"edge_attr\[1, 1\] is 6; column 1 takes 0 to 5"):
        encoder(torch.tensor([[0, 0, 0], [0, 6, 0]]))
    with pytest.raises(ValueError, match="3 columns of integers"):
        encoder(torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_embedding_sum_as_a_product_is_the_lookup(dtype, monkeypatch):
    torch.manual_seed(0)
    encoder = EmbeddingSum((119, 5, 1, 12), 6, "x")
    features = torch.stack([torch.randint(size, (40,)) for size in encoder.vocabulary], dim=1).to(dtype)
    weight = encoder.tables.weight
    results = []
    for product in (False, True):
        monkeypatch.setattr(encoder, "_multiplies", lambda _, product=product: product)
        with torch.autocast("cpu", torch.bfloat16):
            out = encoder(features)
        results.append([out, *torch.autograd.grad(out.square().sum(), weight)])
        assert encoder(features[:0]).shape == (0, 6)
    for lookup, product in zip(*results, strict=True):
        torch.testing.assert_close(product, lookup)


@pytest.mark.parametrize("value", [-1, 6, 255, 2**24 + 1])
def test_embedding_sum_as_a_product_refuses_what_is_outside_its_tables(value, monkeypatch):
    encoder = EmbeddingSum(BOND_VOCABULARY, 4, "edge_attr")
    monkeypatch.setattr(encoder, "_multiplies", lambda _: True)
    with pytest.raises(RuntimeError):  # asserted on the device: that of a GPU would not be waited for
        encoder(torch.tensor([[0, 0, 0], [0, value, 0]]))


def test_linear_takes_small_integers_and_single_columns():
    encoder = LinearEncoder(1, 4, "x")
    column = torch.tensor([[3], [5]], dtype=torch.uint8)
    torch.testing.assert_close(encoder(column), encoder(column.flatten().float()))
    with pytest.raises(ValueError, match=r"x has shape \[2, 3\]; the model takes 1 columns"):
        encoder(torch.zeros(2, 3))


def _lappe_inputs():
    vectors, values = torch.randn(5, 3), torch.rand(2, 3)
    vectors[3:, 2], values[1, 2] = torch.nan, torch.nan  # a graph of two nodes has two eigenpairs
    return vectors, values


def test_lappe_sums_over_the_eigenpairs_there_are():
    encoder = LapPE(4).eval()
    vectors, values = _lappe_inputs()
    out = encoder(vectors, values, GRAPHS)
    for node, graph in enumerate(GRAPHS.batch.tolist()):
        pairs = [torch.stack([vectors[node, k], values[graph, k]]) for k in range(3 - graph)]
        torch.testing.assert_close(out[node], sum(encoder.phi(pair) for pair in pairs))
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


def test_lappe_flips_signs_a_graph_and_vector_at_a_time_in_training_only():
    encoder = LapPE(4)
    vectors, values = _lappe_inputs()
    plain = encoder.eval()(vectors, values, GRAPHS)
    torch.testing.assert_close(encoder(vectors, values, GRAPHS), plain)
    torch.manual_seed(0)
    flipped = encoder.train()(vectors[:3, :1], values[:1, :1], Partition(*_one_graph(3)))
    options = [
        encoder.eval()(s * vectors[:3, :1], values[:1, :1], Partition(*_one_graph(3))) for s in (1, -1)
    ]
    assert any(torch.equal(flipped, option) for option in options)
    draws = {tuple(encoder.train()(vectors, values, GRAPHS).flatten().tolist()) for _ in range(20)}
    assert len(draws) > 1
    off = LapPE(4, sign_flip=False)
    torch.testing.assert_close(off.train()(vectors, values, GRAPHS), off.eval()(vectors, values, GRAPHS))


def _one_graph(nodes):
    return torch.zeros(nodes, dtype=torch.long), torch.tensor([0, nodes]), 1, nodes


def test_eslappe_gives_squared_distances(make_batch):
    config = ModelConfig(**OPEN, pe="eslappe", pe_size=4)
    batch, encoder = make_batch(config), FeatureEncoder(config)
    x, _, structure = encoder(batch)
    p = encoder.position(batch.eslappe_vectors)
    for k, (j, i) in enumerate(batch.edge_index.t().tolist()):
        torch.testing.assert_close(structure.distance[k, 0], (p[i] - p[j]).pow(2).sum())
    assert x.shape == (batch.num_nodes, config.dim)


def test_rwse_joins_the_node_features(make_batch):
    config = ModelConfig(**OPEN, pe="rwse", pe_size=4)
    batch, encoder = make_batch(config), FeatureEncoder(config)
    centred = batch.rwse - batch.rwse.mean(0)
    normed = centred / (centred.square().mean(0) + 1e-5).sqrt()
    projection = encoder.position.projection
    wanted = torch.cat([encoder.node(batch.x), normed @ projection.weight.T + projection.bias], dim=1)
    torch.testing.assert_close(encoder(batch)[0], wanted)
    encoder.eval()
    encoder.position.norm.running_mean.fill_(0.25)
    encoder.position.norm.running_var.fill_(4.0)
    wanted = (batch.rwse - 0.25) / 2 @ projection.weight.T + projection.bias
    torch.testing.assert_close(encoder(batch)[0][:, -config.pe_dim :], wanted, rtol=1e-5, atol=1e-5)


def test_a_missing_or_misshapen_field_is_named(make_batch):
    encoder = FeatureEncoder(ModelConfig(**OPEN, pe="rwse", pe_size=4))
    with pytest.raises(ValueError, match=r"rwse has shape \[28, 6\]; the model has pe_size: 4"):
        encoder(make_batch(ModelConfig(**OPEN, pe="rwse", pe_size=6)))
    batch = make_batch(encoder_config := ModelConfig(**OPEN, pe="rwse", pe_size=4))
    del batch.rwse
    with pytest.raises(ValueError, match="no field 'rwse', which pe: rwse needs"):
        encoder(batch)
    batch = make_batch(encoder_config)
    batch.x = None
    with pytest.raises(ValueError, match="the batch has no 'x'"):
        encoder(batch)


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"node_encoder": None}, "node_encoder"),
        ({"node_features": None}, "node_features"),
        ({"edge_encoder": "categories"}, "edge_categories"),
    ],
)
def test_open_settings_are_named(settings, missing):
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        FeatureEncoder(ModelConfig(**{**OPEN, **settings}))


@pytest.mark.parametrize("pe", ["lappe", "eslappe", "rwse"])
def test_what_is_said_of_a_missing_encoding_helps(pe):
    graph = Data(x=torch.randn(6, 3), edge_index=torch.randint(6, (2, 20)))
    settings = {"dim": 12, "pe": pe, "pe_size": 5, "pe_dim": 4, "node_encoder": "linear", "node_features": 3}
    encoder = FeatureEncoder(ModelConfig(**settings, edge_encoder="constant"))
    with pytest.raises(ValueError, match="no field") as error:
        encoder(graph)
    remedy = re.search(r"AddEncodings\(.*\)\(data\)", str(error.value))[0]
    encoder(eval(remedy, vars(sfiformer.data) | {"data": graph}))


def test_graphs_without_edges_need_no_edge_attr(make_batch):
    config = ModelConfig(**{**OPEN, "edge_encoder": "bond"})
    batch = make_batch(config, sizes=(-3, 1))
    batch.edge_attr = None
    assert FeatureEncoder(config)(batch)[1].shape == (0, config.dim)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, True),
        ({"attention": "adjacency", "adjacency": False}, True),
        ({"attention": "dfi", "adjacency": False}, False),
        ({"attention": "softmax"}, False),
        ({"attention": "none"}, False),
    ],
)
def test_the_adjacency_is_made_once_where_it_is_needed(settings, wanted, make_batch):
    config = ModelConfig(**OPEN, **settings)
    structure = FeatureEncoder(config)(make_batch(config))[2]
    assert (structure.adjacency is not None) == wanted
