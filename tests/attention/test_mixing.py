"""The fused end of the attention layer against plain PyTorch in float64.

On a machine without a GPU the kernels run in Triton's interpreter (whose bfloat16 is wrong).
"""

import pytest
import torch
from torch.nn import functional as F

GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="the kernels need Triton")

from sfiformer import SFiAttention  # noqa: E402
from sfiformer.attention.kernels import mixing  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"


def _inputs(nodes, dim, wide, raw_gamma=0.3, dtype=torch.float32):
    """near and far [nodes, wide], the raw γ, b, gain and shift; and the gradient that comes in."""
    generator = torch.Generator().manual_seed(nodes + dim)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    states = [(normal(nodes, wide) + shift).to(dtype) for shift in (0.5, -1.0)]
    vectors = [normal(dim) for _ in range(3)]
    inputs = [*states, torch.tensor(raw_gamma, device=DEVICE), *vectors]
    return [value.requires_grad_() for value in inputs], normal(nodes, dim)


def _truth(inputs, grad):
    near, far, raw_gamma, bias, gain, shift = inputs = [v.detach().double().requires_grad_() for v in inputs]
    dim, gamma = len(bias), raw_gamma.exp().log1p()
    mixed = ((near + gamma * far) / (1 + gamma))[:, :dim] + bias
    out = F.layer_norm(mixed, (dim,), gain, shift)
    return [out, *torch.autograd.grad(out, inputs, grad.double())]


def _fused(inputs, grad):
    out = mixing.mixed_norm(*inputs, 1e-5)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def _assert_close(found, wanted, rtol):
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        error = (a.double() - b).norm() / b.norm().clamp(min=1e-3)
        assert error < rtol, (index, float(error))


@pytest.mark.parametrize("raw_gamma", [0.3, -30.0, 40.0])
@pytest.mark.parametrize(("nodes", "dim", "wide"), [(70, 32, 32), (33, 235, 240), (5, 3, 8), (1, 40, 40)])
def test_against_pytorch(nodes, dim, wide, raw_gamma):
    inputs, grad = _inputs(nodes, dim, wide, raw_gamma)
    found = _fused(inputs, grad)
    assert not any(part[:, dim:].any() for part in found[1:3])
    _assert_close(found, _truth(inputs, grad), 1e-4)


def test_half_precision_states():
    inputs, grad = _inputs(50, 20, 24, dtype=torch.float16)
    found = _fused(inputs, grad)
    assert [part.dtype for part in found[:3]] == [torch.float32, torch.float16, torch.float16]
    _assert_close(found, _truth(inputs, grad), 1e-3)


def test_more_tiles_than_pieces(monkeypatch):
    monkeypatch.setattr(mixing, "PARTS", 2)
    inputs, grad = _inputs(700, 60, 64)
    wanted = _truth(inputs, grad)
    strided = F.pad(grad, (0, 4))[:, :60]
    _assert_close(_fused(inputs, strided), wanted, 1e-4)


def test_without_rows():
    inputs, grad = _inputs(0, 5, 8)
    out, *grads = _fused(inputs, grad)
    assert out.shape == (0, 5)
    assert not any(part.any() for part in grads)


@pytest.mark.parametrize("dim", [12, 13])
def test_the_layer_uses_the_kernel_and_agrees_with_its_plain_twin(dim, monkeypatch):
    torch.manual_seed(0)
    layer = SFiAttention(dim, 3).to(DEVICE)
    x = torch.randn(14, dim, device=DEVICE)
    edge_index, ptr = torch.randint(14, (2, 40), device=DEVICE), torch.tensor([0, 14], device=DEVICE)
    results = []
    for fused in (False, True):
        monkeypatch.setattr(layer, "_ends_in_kernel", lambda _, fused=fused: fused)
        out = layer(x, edge_index, ptr)
        assert ("mixed_norm" in str(out.grad_fn)) == fused
        results.append([out, *torch.autograd.grad(out.pow(3).sum(), list(layer.parameters()))])
    for plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-4)


def test_the_operators_declare_what_they_do():
    inputs, grad = _inputs(9, 5, 8)
    near, far, raw_gamma, bias, gain, shift = (value.detach() for value in inputs)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        mixing.mixed_norm.plain, (near, far, raw_gamma, bias, gain, shift, 1e-5), test_utils=checks
    )
    inputs = (grad, near, far, raw_gamma, bias, gain, 1e-5)
    torch.library.opcheck(mixing.mixed_norm_backward.plain, inputs, test_utils=checks)
