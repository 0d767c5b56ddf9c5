"""Projections taken apart by the fused kernels, against plain PyTorch in float64.

On a machine without a GPU the kernels run in Triton's interpreter (whose bfloat16 is wrong).
"""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

pytest.importorskip("triton", reason="the kernels need Triton")

from sfiformer import SFiAttention  # noqa: E402
from sfiformer.attention.kernels import parts as kernels  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"


def _packed(nodes, parts, heads, width, dtype=torch.float32):
    torch.manual_seed(nodes)
    packed = torch.randn(nodes, parts, heads, width).to(DEVICE, dtype).requires_grad_()
    return packed, [torch.randn(nodes, heads, width).to(DEVICE, dtype) for _ in range(parts)]


def _truth(packed, grads, eps):
    packed = packed.detach().double().requires_grad_()
    *scores, values = packed.unbind(1)
    out = [x / (x.square().mean(-1, keepdim=True) + eps).sqrt() for x in scores] + [values]
    return out + list(torch.autograd.grad(out, packed, [grad.double() for grad in grads]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(70, 5, 4, 8), (9, 3, 3, 40), (5, 5, 1, 240), (0, 3, 2, 8)])
def test_against_pytorch(shape, dtype):
    packed, grads = _packed(*shape, dtype)
    out = kernels.normalised_parts(packed, 1e-3)
    assert all(part.is_contiguous() and part.dtype == dtype for part in out)
    found = [*out, *torch.autograd.grad(out, packed, grads)]
    for a, b in zip(found, _truth(packed, grads, 1e-3), strict=True):
        error = (a.double() - b).norm() / b.norm().clamp(min=1e-3)
        assert error < (1e-6 if dtype == torch.float32 else 1e-3)


def test_parts_without_a_gradient():
    packed, grads = _packed(6, 3, 2, 8)
    grads[1] = torch.zeros_like(grads[1])
    out = kernels.normalised_parts(packed, 1e-6)
    (found,) = torch.autograd.grad((out[0], out[2]), packed, (grads[0], grads[2]))
    torch.testing.assert_close(found, _truth(packed, grads, 1e-6)[-1].float())


@pytest.mark.parametrize("options", [{}, {"mode": "dfi"}, {"friction": "tied"}])
def test_the_layer_agrees_with_its_plain_twin(options, monkeypatch):
    torch.manual_seed(0)
    layer = SFiAttention(12, 3, **options).to(DEVICE)
    x = torch.randn(14, 12, device=DEVICE)
    edge_index, ptr = torch.randint(14, (2, 40), device=DEVICE), torch.tensor([0, 14], device=DEVICE)
    results = []
    for fused in (False, True):
        monkeypatch.setattr(layer, "_parts_in_kernel", lambda _, fused=fused: fused)
        out = layer(x, edge_index, ptr)
        results.append([out, *torch.autograd.grad(out.pow(3).sum(), list(layer.parameters()))])
    for plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-4)


def test_the_operators_declare_what_they_do():
    packed, grads = _packed(6, 3, 2, 8)
    packed, checks = packed.detach(), ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.taken_apart, (packed, 1e-6), test_utils=checks)
    torch.library.opcheck(kernels.taken_apart_backward, (grads, packed, 1e-6), test_utils=checks)
