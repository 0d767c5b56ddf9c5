"""The fused kernels against their plain twin, both measured against float64."""

import math

import pytest
import torch

from kernel_cases import (
    DEVICE,
    GPU,
    SCALINGS,
    assert_close_to_twin,
    attend,
    both,
    few_programs,  # noqa: F401 (for all tests here)
    make,
)
from sfiformer.attention import dfi_attention, sfi_attention
from sfiformer.attention.kernels import launch
from sfiformer.attention.kernels.tiles import kept

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
on_gpu = pytest.mark.skipif(not GPU, reason="no GPU")


@pytest.mark.parametrize(("alpha", "potential"), SCALINGS)
@pytest.mark.parametrize("sizes", [[5, 0, 1, 17], [2, 33], [16, 15, 70]])
def test_matches_the_plain_twin(sizes, alpha, potential):
    assert_close_to_twin(*both(sizes, alpha, potential), floor=2e-6)


@pytest.mark.parametrize("spread", [0.3, 3.0, 8.0])
def test_matches_for_scores_of_any_range(spread):
    for alpha in (0.1, math.inf):
        assert_close_to_twin(*both([7, 20], alpha, False, spread=spread), floor=1e-5 * spread)


@pytest.mark.parametrize("width", [32, 40, 68])
def test_any_width(width):
    assert_close_to_twin(*both([9, 12], 0.1, False, heads=1, width=width, value_width=width), floor=2e-6)


def test_half_precision():
    assert_close_to_twin(*both([9, 20], 0.1, False, dtype=torch.float16), floor=1e-3)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_without_friction_it_is_softmax_attention(dropout_p):
    tensors, ptr, grad = make([9, 0, 20])
    q, k, v = tensors[:3]
    seed, lam = torch.tensor(1, device=DEVICE), torch.zeros(3, device=DEVICE)
    options = (math.inf, False, 0.3, dropout_p, 20)
    out = launch.fused_attention(q, k, v, None, None, ptr, lam, seed, *options)[0]
    got = torch.autograd.grad(out, (q, k, v), grad)
    if (
        dropout_p
    ):  # a mask over the same weights: the mean over many is not needed here, only that it is a mask
        assert out.isfinite().all()
        return
    weights = [
        torch.einsum("ihd,jhd->hij", a, b).mul(0.3).softmax(-1)
        for a, b in zip(q.split([9, 0, 20]), k.split([9, 0, 20]), strict=True)
    ]
    parts = zip(weights, v.split([9, 0, 20]), strict=True)
    expected = torch.cat([torch.einsum("hij,jhd->ihd", w, x) for w, x in parts])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, torch.autograd.grad(expected, (q, k, v), grad), rtol=1e-4, atol=1e-5)


@triton.jit
def mask_kernel(out, seed, dropout_p, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE), tl.arange(0, SIZE)
    tl.store(
        out + rows[:, None] * SIZE + columns[None, :],
        kept(tl.load(seed), (4 * rows + 3)[:, None], columns[None, :], dropout_p),
    )


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_dropped_flows_are_independent(dropout_p):
    size = 256
    masks = []
    for seed in (0, 1, 2**62 - 1):
        mask = torch.full((size, size), torch.nan, device=DEVICE)
        mask_kernel[(1,)](mask, torch.tensor(seed, device=DEVICE), dropout_p, size)
        assert mask.unique().tolist() == [0.0, pytest.approx(1 / (1 - dropout_p))]
        masks.append((mask > 0).double() - (1 - dropout_p))
    one, noise = (
        masks[0],
        5 * dropout_p * (1 - dropout_p) / size,
    )  # five standard deviations of a mean product
    pairs = [(one, other) for other in masks[1:]]
    pairs += [(one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[1:, 1:], one[:-1, :-1]), (one, one.T)]
    assert all(abs(float((a * b).mean())) < noise for a, b in pairs)
    assert abs(float(one.mean())) < 5 * (dropout_p * (1 - dropout_p)) ** 0.5 / size
    assert float(one.mean(1).std()) < 1.2 * (dropout_p * (1 - dropout_p) / size) ** 0.5
    assert float(one.mean(0).std()) < 1.2 * (dropout_p * (1 - dropout_p) / size) ** 0.5
    # Any two rows: were a flow's fate the sum (mod 2) of its row's and its column's, all rows would be one or its opposite.
    rows = one @ one.T / (dropout_p * (1 - dropout_p) * size**0.5)
    above = torch.triu(torch.ones_like(rows, dtype=torch.bool), 1)
    assert abs(float(rows[above].square().mean()) - 1) < 0.05


def test_dropout_keeps_the_mean_and_repeats_in_the_backward():
    tensors, ptr, grad = make([12], heads=1)
    lam = torch.tensor([0.1], device=DEVICE)
    once = attend(launch.fused_attention, tensors, ptr, lam, 0.1, False, 12, 0.5, seed=3)
    again = attend(launch.fused_attention, tensors, ptr, lam, 0.1, False, 12, 0.5, seed=3)
    assert torch.equal(once, again)
    other = attend(launch.fused_attention, tensors, ptr, lam, 0.1, False, 12, 0.5, seed=4)
    assert not torch.equal(once, other)
    # the output is linear in v: its gradient is the output's own mask, transposed
    of_v = torch.autograd.grad(once, tensors[2], grad)[0]
    moved = [x.detach().clone() for x in tensors]
    moved[2] += 1.0
    shifted = attend(launch.fused_attention, moved, ptr, lam, 0.1, False, 12, 0.5, seed=3)
    torch.testing.assert_close(((shifted - once) * grad).sum(), of_v.sum(), rtol=1e-4, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[150, 8, 300, 444], [480, 513], [1000, 31, 32]])
def test_large_graphs(sizes, dtype):
    floor = 3e-6 if dtype == torch.float32 else 1e-3
    assert_close_to_twin(
        *both(sizes, 0.1, False, margin=2e-5, heads=4, width=68, value_width=68, dtype=dtype), floor=floor
    )


@on_gpu
def test_sfi_attention_chooses_them_and_compiles_and_is_captured():
    tensors, ptr, grad = make([150, 44, 20], width=68, value_width=68)

    def attention(*inputs):
        return sfi_attention(*inputs, ptr, lam=0.01, max_nodes=150)

    before = [x.detach() for x in tensors]
    expected = attend(
        launch.fused_attention, before, ptr, torch.full((3,), 0.01, device=DEVICE), 0.1, False, 150
    )
    assert torch.equal(attention(*before), expected)
    compiled = torch.compile(attention, fullgraph=True)
    torch.testing.assert_close(compiled(*before), expected)
    torch.autograd.grad(
        attention(*tensors), tensors, grad
    )  # kernels cannot be loaded in the middle of a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(attention(*tensors), tensors, grad)
    with torch.no_grad():
        for x in tensors:
            x.mul_(0.5)
    graph.replay()
    for a, b in zip(captured, torch.autograd.grad(attention(*tensors), tensors, grad), strict=True):
        assert torch.equal(a, b)


@on_gpu
def test_dfi_attention_chooses_them():
    tensors, ptr, _ = make([150, 44, 20], width=68, value_width=68)
    q, k, v = (x.detach() for x in tensors[:3])
    expected = dfi_attention(*(x.double() for x in (q, k, v)), ptr)
    torch.testing.assert_close(dfi_attention(q, k, v, ptr).double(), expected, rtol=1e-5, atol=1e-5)


@on_gpu
def test_two_runs_agree_to_the_bit():
    runs = []
    for _ in range(2):
        tensors, ptr, grad = make([150, 444, 20], width=68, value_width=68, dtype=torch.bfloat16)
        lam = torch.full((3,), 0.01, device=DEVICE, requires_grad=True)
        out = attend(launch.fused_attention, tensors, ptr, lam, 0.1, False, 444)
        runs.append([out, *torch.autograd.grad(out, [*tensors, lam], grad)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
