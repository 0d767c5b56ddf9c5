"""Products with weights: those whose weight's gradient is apart are those of PyTorch."""

import ctypes
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from sfiformer.attention import products
from sfiformer.attention.products import product


@pytest.fixture
def apart(monkeypatch):
    """As in a captured step, but for the streams; gives the shapes of gradients that came about apart."""
    made = []
    backward = products._OfWeight.backward

    def seen(ctx, of_y):
        found = backward(ctx, of_y)
        made.append(found[0].shape)
        return found

    monkeypatch.setattr(products._OfWeight, "backward", staticmethod(seen))
    monkeypatch.setattr(products, "stream_ahead", lambda x: object())
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, side: None)
    return made


def results(call, x, weight):
    """Of a weight that is used twice: the product, and the gradients of both."""
    x, weight = (z.detach().requires_grad_() for z in (x, weight))
    joint = 2 * weight  # made ahead
    y = call(call(x.sin(), joint), joint.t().contiguous()) + x
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight])]


def test_gradients_apart_are_those_of_linear(apart):
    torch.manual_seed(0)
    x, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    for left, right in zip(results(product, x, weight), results(F.linear, x, weight), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    assert sorted(apart) == [(3, 5), (5, 3)]


def test_what_another_stream_may_still_read_is_not_changed(apart, monkeypatch):
    """A gradient that goes to a sum, too, would be added to in place as soon as nobody else held it."""
    seen, backward = [], products._OfWeight.backward

    def watched(ctx, of_y):
        place = of_y.data_ptr(), of_y.numel() * of_y.element_size()
        seen.append((*place, ctypes.string_at(*place)))
        return backward(ctx, of_y)

    monkeypatch.setattr(products._OfWeight, "backward", staticmethod(watched))
    torch.manual_seed(0)
    x, first, second = (torch.randn(8, 8, requires_grad=True) for _ in range(3))
    h = x.sin()
    y = product(product(h, 2 * first).relu(), 2 * second) + h  # the gradient of y is that of both terms
    loss = (y * y).sum()
    loss.backward()
    assert len(seen) == 2
    assert all(ctypes.string_at(place, size) == before for place, size, before in seen)


def test_what_is_large_or_constant_or_of_two_types_is_not_taken_apart(apart, monkeypatch):
    x, weight = torch.randn(7, 5), torch.randn(3, 5, requires_grad=True)
    product(x, weight).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        product(x.clone().requires_grad_(), weight.bfloat16()).sum().backward()
    monkeypatch.setattr(products, "LARGE", 7 * 3 * 4 - 1)
    product(x.clone().requires_grad_(), weight).sum().backward()
    assert apart == []
