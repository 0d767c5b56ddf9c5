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


def test_dense_attention_has_none_and_the_mode_is_left_as_it_was(experiment):
    prepared = prepare(experiment({"model.attention": "dfi"}))
    batch = prepared.stores["val"].batch([0])
    assert zero_share(SFiFormer(prepared.config.model), batch) is None
    model = SFiFormer(prepare(experiment()).config.model)
    assert zero_share(model.train(), batch) is not None
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
