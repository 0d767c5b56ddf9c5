"""Dropout of flows: unbiased, and the same mask forward and backward."""

import pytest
import torch
from torch.autograd import gradcheck

from packing import attend, packed
from sfiformer import sfi_attention
from sfiformer.attention.dropout import dropped

SIZES = (6, 0, 1, 9, 6)
WAYS = [{}, {"return_flows": True}]


def _drop(inputs, p, seed, lam=0.05, **arguments):
    torch.manual_seed(seed)
    out = attend(inputs, lam=lam, dropout_p=p, **arguments)
    return out[0] if isinstance(out, tuple) else out


def _one_hot(sizes, **arguments):
    """Values that show the flows themselves: out[i, h, j] = z_ij for a graph's j-th node."""
    inputs = packed(sizes, value_width=max(sizes), **arguments)
    rows = torch.cat([torch.eye(n, max(sizes), dtype=inputs.v.dtype) for n in sizes])
    return inputs._replace(v=rows[:, None].expand_as(inputs.v).contiguous())


@pytest.mark.parametrize("arguments", WAYS)
def test_a_flow_is_dropped_or_grown(arguments):
    inputs = _one_hot((20, 20, 20, 15), heads=4)
    flows, dropped = _drop(inputs, 0.0, 0), _drop(inputs, 0.25, 0, **arguments)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], flows[kept] / 0.75)
    share = float((kept & (flows > 0)).sum() / (flows > 0).sum())
    assert share == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize("arguments", WAYS)
def test_masks_differ_between_calls_graphs_heads_and_rows(arguments):
    inputs = _one_hot((20, 20), heads=2)
    inputs = inputs._replace(q=torch.zeros_like(inputs.q), q_friction=torch.zeros_like(inputs.q))
    first, second = (_drop(inputs, 0.5, seed, **arguments) != 0 for seed in (0, 1))
    assert torch.equal(first, _drop(inputs, 0.5, 0, **arguments) != 0)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:20], first[20:])
    assert not torch.equal(first[:, 0], first[:, 1])
    assert len(first[:, 0].unique(dim=0)) == 40
    assert not torch.equal(first[:20, 0], first[:20, 0].T)


@pytest.mark.parametrize("arguments", WAYS)
def test_expectation_is_the_flow(arguments):
    inputs = packed(SIZES, dtype=torch.float32)
    mean = sum(_drop(inputs, 0.3, seed, **arguments) for seed in range(200)) / 200
    torch.testing.assert_close(mean, _drop(inputs, 0.0, 0), atol=0.17, rtol=0)


@pytest.mark.parametrize("arguments", [*WAYS, {"scaling": "potential"}, {"solver": "proximal"}])
def test_backward_has_the_mask_of_the_forward(arguments):
    inputs = packed((3, 0, 1, 2), heads=1, width=2).leaves()
    lam = torch.full((4,), 0.2, dtype=torch.float64, requires_grad=True)

    def attention(*x):
        torch.manual_seed(7)
        out = sfi_attention(*x[:5], inputs.ptr, lam=x[5], dropout_p=0.4, **arguments)
        return out[0] if isinstance(out, tuple) else out

    assert gradcheck(attention, (*inputs[:5], lam))


def test_backward_does_not_draw_again():
    """Random numbers drawn between forward and backward change nothing."""
    gradients = []
    for between in (0, 5):
        inputs = packed(SIZES).leaves()
        out = _drop(inputs, 0.5, 3)
        torch.rand(between)
        gradients.append(torch.autograd.grad(out.square().sum(), inputs[:5]))
    for x, y in zip(*gradients, strict=True):
        assert torch.equal(x, y)


def test_chunks_and_rows_have_masks_of_their_own(monkeypatch):
    monkeypatch.setattr("sfiformer.attention.chunks.CHUNK_SIZE", 16)
    inputs = _one_hot((12, 12), heads=2)
    inputs = inputs._replace(q=torch.zeros_like(inputs.q), q_friction=torch.zeros_like(inputs.q))
    kept = _drop(inputs, 0.5, 0) != 0
    assert len(kept.flatten(0, 1).unique(dim=0)) == 48
    leaves = packed((4, 3), heads=1, width=2).leaves()
    assert gradcheck(lambda *x: _drop(leaves._replace(q=x[0], v=x[1]), 0.4, 7), (leaves.q, leaves.v))


@pytest.mark.parametrize("size", [8, 1 << 16])
def test_dropout_of_states(size):
    x = torch.ones(size, 4, requires_grad=True)
    torch.manual_seed(0)
    first = dropped(x, 0.1, training=True)
    second = dropped(x, 0.1, training=True)
    torch.manual_seed(0)
    assert torch.equal(dropped(x, 0.1, training=True), first)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first[first != 0], torch.full_like(first[first != 0], 1 / 0.9))
    (grad,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(grad, first)
    assert torch.equal(dropped(x, 0.1, training=False), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.003, 0.1, 0.5, 0.9])
def test_the_share_of_states_that_dropout_keeps(p, dtype):
    torch.manual_seed(0)
    zero = dropped(torch.ones(1000, 1000, dtype=dtype), p, training=True) == 0
    deviation = (p * (1 - p)) ** 0.5
    assert float(zero.double().mean()) == pytest.approx(p, abs=4 * deviation / 1000)
    # Neither rows nor columns have anything to do with each other.
    for dim in (0, 1):
        assert float(zero.double().mean(dim).std()) == pytest.approx(deviation / 1000**0.5, rel=0.1)
