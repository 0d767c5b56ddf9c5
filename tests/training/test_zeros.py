import pytest
import torch

from sfiformer import SFiFormer
from sfiformer.training import prepare
from sfiformer.training.zeros import zero_share


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model.lam_scaling": "graph"},
        {"model.lam_scaling": "largest"},
        {"model.lam_scaling": "graph", "model.solver": "proximal"},
    ],
)
@pytest.mark.parametrize("together", [1 << 23, 1])
def test_the_share_of_zero_flows(experiment, monkeypatch, settings, together):
    monkeypatch.setattr("sfiformer.training.zeros.TOGETHER", together)
    prepared = prepare(experiment({"model.lam": 20.0, **settings}))
    torch.manual_seed(0)
    model = SFiFormer(prepared.config.model)
    batch = prepared.stores["val"].batch([0, 1])
    share = zero_share(model, batch)

    # By hand: the flows of each layer for the inputs that it got.
    flows, x = [], None
    model.eval()
    with torch.no_grad():
        x, e, structure = model.encoder(batch)
        for layer in model.layers:
            flows += [z.flatten() for z in layer.attention.flows(x, batch.ptr)]
            x, e = layer(x, e, structure)
    entries = torch.cat(flows)
    assert share == (entries == 0).double().mean().item()
    assert 0.1 < share < 1
    sizes = batch.ptr.diff()
    assert len(entries) == 2 * 2 * int((sizes**2).sum())  # layers, heads, pairs


def test_of_a_large_graph_some_queries_are_looked_at(experiment, monkeypatch):
    prepared = prepare(experiment({"model.lam": 20.0, "model.layers": 1}))
    torch.manual_seed(0)
    model, batch = SFiFormer(prepared.config.model).eval(), prepared.stores["val"].batch([0, 1])
    large, small = batch.ptr.diff().tolist()
    limit = (large + small) // 2
    assert small < limit < large
    monkeypatch.setattr("sfiformer.training.zeros.QUERIES", limit)
    with torch.no_grad():
        flows = model.layers[0].attention.flows(model.encoder(batch)[0], batch.ptr)
    flows[0] = flows[0][:, [i * large // limit for i in range(limit)]]
    rows = [z.flatten() for z in flows]
    assert zero_share(model, batch) == pytest.approx((torch.cat(rows) == 0).double().mean().item(), abs=1e-4)


def test_what_underflows_is_no_zero(experiment):
    prepared = prepare(experiment({"model.lam": 0.0, "model.layers": 1, "model.qk_norm": False}))
    torch.manual_seed(0)
    model, batch = SFiFormer(prepared.config.model).eval(), prepared.stores["val"].batch([0])
    attention = model.layers[0].attention
    with torch.no_grad():
        attention.query.weight *= 3000
        flows = attention.flows(model.encoder(batch)[0], batch.ptr)
    assert (flows[0] == 0).any()
    assert zero_share(model, batch) == 0


def test_dense_attention_has_none_and_the_mode_is_left_as_it_was(experiment):
    prepared = prepare(experiment({"model.attention": "dfi"}))
    batch = prepared.stores["val"].batch([0])
    assert zero_share(SFiFormer(prepared.config.model), batch) is None
    model = SFiFormer(prepare(experiment()).config.model)
    assert zero_share(model.train(), batch) is not None
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_graphs_without_nodes_have_no_flows(experiment):
    prepared = prepare(experiment({"model.lam": 20.0}))
    torch.manual_seed(0)
    model, batch = SFiFormer(prepared.config.model), prepared.stores["val"].batch([0, 1])
    share = zero_share(model, batch)
    batch.ptr = torch.cat([batch.ptr, batch.ptr[-1:]])
    assert zero_share(model, batch) == share
