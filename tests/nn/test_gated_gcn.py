import pytest
import torch

from sfiformer.nn import GatedGCN


def _by_hand(layer: GatedGCN, x, e, edge_index, gate):
    """The equations of the layer, an edge at a time, without the residual update."""
    d = x.size(1)
    weights, biases = layer.node_projection.weight.split(d), layer.node_projection.bias.split(d)
    A, D, B, E = (lambda v, w=w, b=b: w @ v + b for w, b in zip(weights, biases, strict=True))
    x_hat, e_hat = [], {}
    for i in range(x.size(0)):
        above, below = torch.zeros(d), torch.zeros(d)
        for k in range(edge_index.size(1)):
            j, target = edge_index[:, k].tolist()
            if target == i:
                e_hat[k] = D(x[i]) + E(x[j]) + layer.edge_projection(e[k])
                eta = torch.sigmoid(e_hat[k]) * gate[k]
                above, below = above + eta * B(x[j]), below + eta
        x_hat.append(A(x[i]) + above / (below + 1e-6))
    return torch.stack(x_hat), torch.stack([e_hat[k] for k in range(edge_index.size(1))])


@pytest.mark.parametrize("residual", [1, 0])
@pytest.mark.parametrize("pe_gate", [False, True])
def test_against_the_equations(pe_gate, residual):
    torch.manual_seed(0)
    layer = GatedGCN(6, activation="gelu", pe_gate=pe_gate, dropout=0.5, residual=bool(residual)).eval()
    layer.node_norm.running_mean.normal_()
    layer.edge_norm.running_var.uniform_(0.5, 2)
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 1], [1, 2, 1, 1, 2, 1]])  # node 0 and 3 receive nothing; 1 → 1
    x, e, distance = torch.randn(4, 6), torch.randn(6, 6), torch.rand(6, 1)
    gate = layer.pe_gate(distance) if pe_gate else torch.ones(6, 1)
    x_hat, e_hat = _by_hand(layer, x, e, edge_index, gate)
    gelu = torch.nn.functional.gelu
    new_x, new_e = layer(x, e, edge_index, distance if pe_gate else None)
    torch.testing.assert_close(new_x, residual * x + gelu(layer.node_norm(x_hat)))
    torch.testing.assert_close(new_e, residual * e + gelu(layer.edge_norm(e_hat)))


@pytest.mark.parametrize("nodes", [1, 3])
def test_without_edges(nodes):
    layer = GatedGCN(4)
    x = torch.randn(nodes, 4, requires_grad=True)
    new_x, new_e = layer(x, torch.zeros(0, 4), torch.zeros(2, 0, dtype=torch.long))
    new_x.sum().backward()
    assert new_x.isfinite().all()
    assert new_e.shape == (0, 4)
    assert x.grad.isfinite().all()
    assert layer.edge_norm.running_var.isfinite().all()


def test_parameter_count():
    d = 7
    assert sum(p.numel() for p in GatedGCN(d).parameters()) == 5 * d * d + 9 * d
    assert sum(p.numel() for p in GatedGCN(d, pe_gate=True).parameters()) == 5 * d * d + 12 * d + 1


def test_a_last_layer_leaves_the_edges():
    layer = GatedGCN(4, update_edges=False)
    e = torch.randn(2, 4)
    assert layer(torch.randn(3, 4), e, torch.tensor([[0, 1], [1, 2]]))[1] is e
    assert not layer.edge_norm.weight.requires_grad


def test_half_precision():
    layer = GatedGCN(8)
    with torch.autocast("cpu", torch.bfloat16):
        new_x, new_e = layer(torch.randn(3, 8), torch.randn(2, 8), torch.tensor([[0, 1], [1, 2]]))
    assert new_x.dtype == new_e.dtype == torch.float32
