import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import LayerNorm as PyGLayerNorm

from sfiformer import ranks
from sfiformer.nn.norms import BatchNorm, GraphLayerNorm, add_and_norm, make_norm
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


def _double_norm(*, shared=False):
    norm = BatchNorm(4).double()
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    if shared:
        ranks.join(norm)
    return norm


def _rows(count, padding, garbage):
    """x and the gradient of the output, [count + padding, 4], real rows first."""
    generator = torch.Generator().manual_seed(count)
    x, grad = torch.randn(2, count, 4, generator=generator, dtype=torch.float64) * 3 + 7
    return [torch.cat([values, values.new_full((padding, 4), garbage)]) for values in (x, grad)]


@pytest.mark.parametrize("garbage", [1e30, float("nan")])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
@pytest.mark.parametrize("shared", [False, True])
def test_padding_rows_change_nothing(shared, count, garbage):
    results = []
    for padding in (0, 5):
        norm = _double_norm(shared=shared and padding > 0)
        x, grad = _rows(count, padding, garbage)
        rows = torch.tensor(count) if padding else None
        out = norm(x.requires_grad_(), rows=rows, activation="gelu")
        out.backward(grad)
        assert not out[count:].any()
        assert not x.grad[count:].any()
        results.append(
            [out[:count], x.grad[:count], norm.weight.grad, norm.bias.grad, *norm.state_dict().values()]
        )
    torch.testing.assert_close(results[1], results[0])


def test_the_parts_around_batch_norm_are_pytorchs():
    """To the bit, with the same draws of dropout."""
    x, update, residual = torch.randn(3, 8, 4)
    ours, reference = BatchNorm(4), nn.BatchNorm1d(4)
    torch.manual_seed(3)
    after = ours(x, activation="relu", dropout=0.5, residual=residual)
    before = add_and_norm(ours, x, update, GRAPHS, dropout=0.5, residual=residual)
    torch.manual_seed(3)
    assert torch.equal(after, residual + F.dropout(F.relu(reference(x)), 0.5))
    assert torch.equal(before, residual + reference(x + F.dropout(update, 0.5)))
