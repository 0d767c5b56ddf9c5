import pytest
import torch

from sfiformer import ModelConfig
from sfiformer.nn import GatedGCN
from sfiformer.nn.local import PyGLocal, make_local


@pytest.mark.parametrize("kind", ["gcn", "gin", "gine", "gat", "sage"])
def test_pyg_layers(kind):
    local = make_local(ModelConfig(dim=6, local=kind, heads=4), last=False).eval()
    x, e, edge_index = torch.randn(3, 6), torch.randn(2, 6), torch.tensor([[0, 1], [1, 0]])
    new_x, new_e = local(x, e, edge_index)
    assert new_x.shape == x.shape
    assert new_e is e
    assert torch.equal(local(x, 2 * e, edge_index)[0], new_x) == (kind not in ("gine", "gat"))
    nothing = torch.zeros(2, 0, dtype=torch.long)
    assert local(x[:1], e[:0], nothing)[0].isfinite().all()


def test_residual():
    local = PyGLocal("sage", 6, heads=1, dropout=0.0, activation="relu")
    x, edge_index = torch.randn(3, 6), torch.tensor([[0, 1], [1, 0]])
    torch.testing.assert_close(local(x, None, edge_index)[0], x + local.conv(x, edge_index))


def test_gated_gcn_of_the_last_layer():
    config = ModelConfig(pe="eslappe")
    assert isinstance(make_local(config, last=True), GatedGCN)
    assert make_local(config, last=False).update_edges
    assert not make_local(config, last=True).update_edges
    assert make_local(config, last=True).pe_gate is not None
