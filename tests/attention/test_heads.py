"""Heads out of a joint product: the kernels against a definition in float64, with its gradient by autograd."""

import pytest
import torch

GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="the kernels need Triton")

from sfiformer.attention import cpu, heads  # noqa: E402
from sfiformer.attention.kernels import heads as kernels  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
EPS = 1e-3


def defined(packed, normed):
    x = packed.unbind(1)
    return [part / (part.square().mean(-1, keepdim=True) + EPS).sqrt() for part in x[:normed]] + [*x[normed:]]


@pytest.mark.parametrize(("parts", "normed"), [(2, 2), (3, 2), (3, 0), (5, 4)])
@pytest.mark.parametrize("shape", [(7, 3, 20), (1, 4, 16), (0, 2, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_make_heads_and_their_gradient(parts, normed, shape, dtype):
    nodes, count, width = shape
    packed = torch.randn(nodes, parts, count, width, device=DEVICE).to(dtype)
    grads = [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(parts)]
    wide = packed.double().requires_grad_()
    expected = defined(wide, normed)
    (of_packed,) = torch.autograd.grad(expected, wide, [grad.double() for grad in grads])

    *found, scales = kernels.split(packed, normed, EPS)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    for part, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(part.double(), truth, **tolerance)
    torch.testing.assert_close(kernels.join(grads, packed, scales).double(), of_packed, **tolerance)


def test_the_operator_is_the_plain_version(monkeypatch):
    packed = torch.randn(5, 5, 2, 12, device=DEVICE, requires_grad=True)
    weights = torch.randn(5, 5, 2, 12, device=DEVICE)

    def run():
        parts = heads.split_heads(packed, 4, EPS)
        total = sum((part * weights[:, i]).sum() for i, part in enumerate(parts) if i != 2)  # one gets none
        return [*parts, *torch.autograd.grad(total, packed)]

    with monkeypatch.context() as patch:
        patch.setattr(heads, "usable", lambda x: False)
        plain = run()
    monkeypatch.setattr(heads, "usable", lambda x: True)
    for a, b in zip(run(), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(GPU, reason="of a CPU")
@pytest.mark.parametrize(("parts", "normed"), [(2, 2), (3, 2), (5, 4)])
def test_on_a_cpu_it_is_the_definition_and_can_be_differentiated_twice(parts, normed):
    packed = torch.randn(4, parts, 2, 5, dtype=torch.float64, requires_grad=True)
    for found, truth in zip(heads.split_heads(packed, normed, EPS), defined(packed, normed), strict=True):
        torch.testing.assert_close(found, truth)
    assert "split_heads" in type(heads.split_heads(packed, normed, EPS)[0].grad_fn).__name__
    torch.autograd.gradcheck(lambda x: tuple(heads.split_heads(x, normed, EPS)), packed)
    torch.autograd.gradgradcheck(lambda x: tuple(heads.split_heads(x, normed, EPS)), packed)


@pytest.mark.skipif(GPU, reason="of a CPU")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("parts", "normed"), [(2, 2), (3, 2), (5, 4)])
@pytest.mark.parametrize("shape", [(300, 3, 20), (40, 4, 67), (1, 1, 1), (0, 2, 8)])
def test_loops_make_heads_and_their_gradient(monkeypatch, parts, normed, shape, threads):
    pytest.importorskip("numba")
    calls = []
    monkeypatch.setattr(cpu, "normalise", lambda *given, make=cpu.normalise: calls.append(0) or make(*given))
    nodes, count, width = shape
    apart = torch.randn(parts, nodes, count, width)
    packed = apart.transpose(0, 1).requires_grad_()  # not contiguous
    wide = packed.detach().double().requires_grad_()
    grads = [torch.randn(nodes, width, count).transpose(1, 2) for _ in range(parts)]
    grads[0] = torch.ones(()).expand(shape)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = heads.split_heads(packed, normed, EPS)
        of_packed = torch.autograd.grad(found, packed, grads)
    finally:
        torch.set_num_threads(before)
    expected = defined(wide, normed)
    right = torch.autograd.grad(expected, wide, [grad.double() for grad in grads])
    assert calls == [0]
    assert all(x.is_contiguous() for x in found)
    for x, y in zip((*found, *of_packed), (*expected, *right), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("parts", "normed"), [(2, 2), (5, 4)])
def test_many_gradients_can_be_had_at_once(parts, normed):
    packed = torch.randn(4, parts, 2, 5, device=DEVICE, requires_grad=True)
    made = heads.split_heads(packed, normed, EPS)
    grads = torch.randn(3, parts, *made[0].shape, device=DEVICE)
    together = torch.autograd.grad(
        made, packed, list(grads.unbind(1)), is_grads_batched=True, retain_graph=True
    )[0]
    apart = [torch.autograd.grad(made, packed, list(own), retain_graph=True)[0] for own in grads]
    torch.testing.assert_close(together, torch.stack(apart))


def test_the_operator_is_a_good_one():
    packed = torch.randn(5, 5, 2, 12, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.sfiformer.split_heads, (packed, 4, EPS))
