import pytest
import torch
from torch import nn
from torch_geometric.nn import LayerNorm as PyGLayerNorm

from sfiformer import ranks
from sfiformer.nn.norms import BatchNorm, GraphLayerNorm, make_norm
from sfiformer.nn.partition import Partition

GRAPHS = Partition(torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 3, 4, 6]), 3, 3)


def test_graph_layer_norm_is_pygs():
    norm, reference = GraphLayerNorm(5), PyGLayerNorm(5, mode="graph")
    with torch.no_grad():
        norm.weight.copy_(torch.randn(5)), norm.bias.copy_(torch.randn(5))
        reference.weight.copy_(norm.weight), reference.bias.copy_(norm.bias)
    x = 3 + 2 * torch.randn(6, 5)
    torch.testing.assert_close(norm(x, GRAPHS), reference(x, GRAPHS.batch, batch_size=3))


@pytest.mark.parametrize("rows", [0, 1])
def test_batch_norm_without_a_variance_keeps_its_statistics(rows):
    norm = BatchNorm(3)
    norm(torch.randn(8, 3))
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    x = torch.randn(rows, 3, requires_grad=True)
    out = norm(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())


def test_batch_norm_is_pytorchs():
    x = torch.randn(7, 3)
    ours, reference = BatchNorm(3), torch.nn.BatchNorm1d(3)
    torch.testing.assert_close(ours(x), reference(x))
    torch.testing.assert_close(ours.running_var, reference.running_var)


@pytest.mark.parametrize(("kind", "parameters"), [("batch", 8), ("layer", 8), ("graph", 8), ("none", 0)])
def test_make_norm(kind, parameters):
    norm = make_norm(kind, 4)
    assert norm(torch.randn(6, 4), GRAPHS).shape == (6, 4)
    assert sum(p.numel() for p in norm.parameters()) == parameters


def test_batch_norm_over_ranks_is_batch_norm_where_there_is_one():
    """Forward, gradients and running statistics of the formula that ranks share."""
    torch.manual_seed(0)
    plain, shared = BatchNorm(5).double(), BatchNorm(5).double()
    ranks.join(shared)
    for module in (plain, shared):
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    for rows in (9, 2, 1, 0):
        x = torch.randn(rows, 5, dtype=torch.float64) * 3 + 7
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [module(y) for module, y in zip((plain, shared), inputs, strict=True)]
        torch.testing.assert_close(outputs[1], outputs[0])
        if rows > 2:
            for out in outputs:
                (out**3).sum().backward()
            torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
            torch.testing.assert_close(shared.weight.grad, plain.weight.grad)
    torch.testing.assert_close(dict(shared.named_buffers()), dict(plain.named_buffers()))
