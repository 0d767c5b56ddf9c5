"""Joint weights of several layers: the kernels against slices of a zero matrix, one by one."""

import pytest
import torch
from torch import nn

GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="the kernels need Triton")

from sfiformer.attention import widths  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"


def placed(layers, parts, wide_out, in_parts, wide_in):
    """The joint weight and bias, part by part."""
    out, inner = (
        size // count for size, count in zip(layers[0].weight.shape, (parts, in_parts), strict=True)
    )
    weight = torch.zeros(len(layers), parts, wide_out, in_parts, wide_in, device=DEVICE)
    bias = torch.zeros(len(layers), parts, wide_out, device=DEVICE)
    for i, layer in enumerate(layers):
        for part in range(parts):
            rows = slice(part * out, (part + 1) * out)
            bias[i, part, :out] = layer.bias[rows]
            for group in range(in_parts):
                columns = slice(group * inner, (group + 1) * inner)
                weight[i, part, :out, group, :inner] = layer.weight[rows, columns]
    return weight.flatten(0, 2).flatten(1), bias.flatten()


@pytest.mark.parametrize(
    ("count", "out", "inner", "parts", "in_parts"),
    [(1, 5, 7, 1, 1), (5, 12, 6, 4, 1), (3, 6, 5, 2, 1), (1, 7, 20, 1, 4), (1, 8, 16, 1, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_joint_weights_and_their_gradient(count, out, inner, parts, in_parts, dtype):
    layers = [nn.Linear(inner, out, device=DEVICE) for _ in range(count)]
    wide_out, wide_in = (-(-width // 8) * 8 for width in (out // parts, inner // in_parts))
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    expected = placed(layers, parts, wide_out, in_parts, wide_in)
    found = widths._joined(weights, biases, parts, wide_out, in_parts, wide_in, dtype, False)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b.to(dtype))

    grads = [torch.randn_like(x) for x in found]
    of_found = torch.autograd.grad(found, [*weights, *biases], grads)
    of_expected = torch.autograd.grad(expected, [*weights, *biases], [grad.float() for grad in grads])
    for a, b in zip(of_found, of_expected, strict=True):
        assert torch.equal(a, b)


def test_the_bias_as_a_column():
    layers = [nn.Linear(5, 6, device=DEVICE) for _ in range(3)]
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    joint, bias = placed(layers, 2, 8, 1, 8)
    expected = torch.cat([joint[:, :5], bias[:, None], joint[:, 6:]], 1)
    found, nothing = widths._joined(weights, biases, 2, 8, 1, 8, torch.float32, True)
    assert torch.equal(found, expected)
    assert nothing.numel() == 0
    grad = torch.randn_like(found)
    of_found = torch.autograd.grad(found, [*weights, *biases], grad)
    of_expected = torch.autograd.grad(expected, [*weights, *biases], grad)
    assert all(map(torch.equal, of_found, of_expected))


def test_products_by_parts_are_the_same(monkeypatch):
    layers = [nn.Linear(10, 12, device=DEVICE) for _ in range(5)]
    x = torch.randn(6, 10, device=DEVICE)

    def run():
        out = widths.by_parts(x, layers, 2)
        return [
            out,
            *torch.autograd.grad(out.square().sum(), [p for layer in layers for p in layer.parameters()]),
        ]

    with monkeypatch.context() as patch:
        patch.setattr(widths, "usable", lambda x: False)
        plain = run()
    monkeypatch.setattr(widths, "usable", lambda x: True)
    for a, b in zip(run(), plain, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("own", "width"), [(5, 8), (8, 5), (3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_another_width_and_type(own, width, dtype):
    x = torch.randn(9, own, device=DEVICE, requires_grad=True)
    found = widths._resized(x, width, dtype, min(own, width), False)
    expected = torch.zeros(9, width, device=DEVICE)
    expected[:, : min(own, width)] = x[:, :width]
    assert torch.equal(found, expected.to(dtype))
    weights = torch.randn_like(found)
    (of_x,) = torch.autograd.grad(found, x, weights)
    assert torch.equal(of_x, torch.autograd.grad(expected, x, weights.float())[0])


def test_a_column_of_ones_behind_those_that_count():
    x = torch.randn(4, 6, device=DEVICE, requires_grad=True)
    found = widths._resized(x, 8, torch.float32, 5, True)
    expected = torch.cat([x[:, :5], torch.ones(4, 1, device=DEVICE), torch.zeros(4, 2, device=DEVICE)], 1)
    assert torch.equal(found, expected)
    weights = torch.randn_like(found)
    (of_x,) = torch.autograd.grad(found, x, weights)
    assert torch.equal(of_x, torch.autograd.grad(expected, x, weights)[0])


def test_a_bias_that_nobody_uses_has_no_gradient():
    layer = nn.Linear(5, 3, device=DEVICE)
    weight, _ = widths._joined([layer.weight], [layer.bias], 1, 8, 1, 8, torch.float32, False)
    of_weight, of_bias = torch.autograd.grad(weight.sum(), [layer.weight, layer.bias], allow_unused=True)
    assert torch.equal(of_weight, torch.ones_like(of_weight))
    assert of_bias is None


def test_a_bias_that_is_used_elsewhere_is_a_constant():
    layers = [nn.Linear(5, 3, device=DEVICE) for _ in range(2)]
    x = torch.zeros(1, 5, device=DEVICE)
    plain, apart = widths.joined(layers, x), widths.joined(layers, x, bias_elsewhere=True)
    for found, expected in zip(apart, plain, strict=True):
        assert torch.equal(found, expected)
    parameters = [layers[1].weight, layers[1].bias]
    of_weight, of_bias = torch.autograd.grad(sum(x.sum() for x in apart), parameters, allow_unused=True)
    assert torch.equal(of_weight, torch.ones_like(of_weight))
    assert of_bias is None


def test_one_layer_that_fits_is_taken_as_it_is():
    layer = nn.Linear(16, 8, device=DEVICE)
    weight, bias = widths.joined([layer], torch.zeros(1, 16, device=DEVICE))
    assert weight is layer.weight
    assert bias is layer.bias


def test_the_operator_is_a_good_one():
    layers = [nn.Linear(5, 6, device=DEVICE) for _ in range(2)]
    arguments = ([x.weight for x in layers], [x.bias for x in layers], 2, 8, 1, 8, torch.float32, True)
    torch.library.opcheck(torch.ops.sfiformer.joined, arguments)
