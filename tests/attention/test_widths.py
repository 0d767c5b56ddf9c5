"""Padding to widths that a GPU likes; here the CPU is told to like them too."""

import pytest
import torch

from sfiformer import SFiAttention
from sfiformer.attention import widths
from sfiformer.attention.widths import by_parts, widened
from sfiformer.nn.gated_gcn import GatedGCN
from sfiformer.nn.gps_layer import FeedForward


@pytest.fixture
def gpu_like(monkeypatch):
    """Padding as on a GPU."""

    def wide(width, like):
        return -(-width // widths.MULTIPLE) * widths.MULTIPLE

    monkeypatch.setattr(widths, "wide", wide)


def gradients(module, out):
    return torch.autograd.grad(out.square().sum(), list(module.parameters()), allow_unused=True)


def compare(module, call, request):
    expected = call()
    true = gradients(module, expected)
    request.getfixturevalue("gpu_like")
    out = call()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(module, out), true)


def test_widened():
    x = torch.ones(2, 3, 5)
    y = widened(x, 4, 8)
    assert y.shape == (2, 4, 8)
    assert torch.equal(y[:, :3, :5], x)
    assert y.sum() == x.sum()
    assert widened(x, 3, 5) is x


@pytest.mark.parametrize("activation", [torch.nn.ReLU(), torch.nn.GELU()])
def test_feed_forward(activation, request):
    layers = (torch.nn.Linear(5, 11), activation, torch.nn.Dropout(0.0), torch.nn.Linear(11, 5))
    layer, x = FeedForward(*layers).double(), torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.nn.Sequential(*layers)(x))
    compare(layer, lambda: layer(x), request)


def test_parts_have_zeros_behind_them(gpu_like):
    layer, x = torch.nn.Linear(5, 2 * 11), torch.randn(4, 5)
    parts = by_parts(x, [layer, layer], 2)
    assert parts.shape == (4, 2, 2, 16)
    assert not parts[..., 11:].any()
    for part in parts.unbind(1):
        torch.testing.assert_close(part[..., :11].flatten(1), layer(x))


@pytest.mark.parametrize("settings", [{}, {"mode": "dfi"}, {"adjacency": False, "friction": "tied"}])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention(settings, qk_norm, request):
    torch.manual_seed(0)
    layer = SFiAttention(11, 3, qk_norm=qk_norm, **settings).double()
    x, ptr = torch.randn(9, 11, dtype=torch.float64), torch.tensor([0, 4, 9])
    edges = torch.tensor([[0, 1, 5], [1, 0, 6]])
    compare(layer, lambda: layer(x, edges, ptr), request)


def test_gated_gcn(request):
    torch.manual_seed(0)
    layer = GatedGCN(11).double()
    x, e = torch.randn(9, 11, dtype=torch.float64), torch.randn(3, 11, dtype=torch.float64)
    edges = torch.tensor([[0, 1, 5], [1, 0, 6]])
    compare(layer, lambda: torch.cat(layer(x, e, edges)), request)


@pytest.mark.parametrize("width", [1, 4, 7, 235])
@pytest.mark.parametrize("rows", [0, 1, widths.MANY, widths.MANY + 9])
def test_odd_widths_and_their_gradients(width, rows):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, 6).double() for _ in range(3)]
    x = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(p for layer in layers for p in layer.parameters())]
    together, apart = by_parts(x, layers, 2), torch.stack([layer(x).view(rows, 2, 3) for layer in layers], 1)
    torch.testing.assert_close(together, apart)
    weight = torch.randn_like(apart)
    for got, expected in zip(
        *(torch.autograd.grad((y * weight).sum(), leaves) for y in (together, apart)), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("settings", [{}, {"mode": "dfi"}, {"friction": "tied"}, {"attention": False}])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_many_heads_of_odd_width_are_padded_on_a_cpu(settings, qk_norm, monkeypatch):
    torch.manual_seed(0)
    layer = SFiAttention(6, 3, head_width=5, qk_norm=qk_norm, **settings).double()
    nodes = widths.MANY + 9
    x, ptr = torch.randn(nodes, 6, dtype=torch.float64), torch.tensor([0, 90, nodes])
    edges = torch.tensor([[0, 1, 5], [1, 0, 6]])
    if layer.attention:
        assert [layer.scores(some).q.size(2) for some in (x, x[:90])] == [8, 5]
    out = layer(x, edges, ptr)
    found = gradients(layer, out)
    monkeypatch.setattr(widths, "MANY", nodes + 1)
    expected = layer(x, edges, ptr)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, gradients(layer, expected))


@pytest.mark.parametrize(("dim", "head_width"), [(7, 4), (6, 5), (7, 5)])
def test_odd_widths_are_exported_for_any_number_of_nodes(dim, head_width):
    torch.manual_seed(0)
    layer = SFiAttention(dim, 2, head_width=head_width)
    edges = torch.tensor([[0, 1, 5], [1, 0, 6]])
    nodes = torch.export.Dim("nodes", min=8, max=4 * widths.MANY)
    many, few = ((torch.randn(n, dim), edges, torch.tensor([0, 3, n])) for n in (widths.MANY + 9, 20))
    exported = torch.export.export(layer, many, dynamic_shapes=({0: nodes}, None, None)).module()
    for inputs in (many, few):
        torch.testing.assert_close(exported(*inputs), layer(*inputs), rtol=1e-4, atol=1e-5)
