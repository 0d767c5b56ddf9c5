"""Dense attention, by the operator of a CPU and by PyTorch's kernel, against softmax graph by graph."""

from itertools import pairwise

import pytest
import torch

from packing import RAGGED, attend, packed, poisoned
from sfiformer import dfi_attention
from sfiformer.attention import cpu, dense

WAYS = {"operator": 1 << 20, "PyTorch's kernel": 0}  # the largest graph that the operator serves
PRECISE = {torch.float64: (1e-10, 1e-12), torch.float32: (1e-4, 1e-5), torch.bfloat16: (3e-2, 3e-2)}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(dense, "LARGEST", WAYS[request.param])
    return request.param


def softmax_one_by_one(q, k, v, ptr):
    outs = [v[:0]]
    for start, end in pairwise(ptr.tolist()):
        scores = torch.einsum("ihd,jhd->hij", q[start:end], k[start:end]) / q.shape[-1] ** 0.5
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[start:end]))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("sizes", [RAGGED, (0,), (1,), (40, 40, 71, 300), (cpu.MOST + 1, 3)])
def test_is_softmax_of_each_graph(way, sizes, dtype):
    q, k, v, *_, ptr = packed(sizes, value_width=5, dtype=dtype).leaves()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with poisoned():
        out = dfi_attention(q, k, v, ptr)
        got = torch.autograd.grad(out.double().square().sum(), (q, k, v))
    expected = softmax_one_by_one(*exact, ptr)
    true = torch.autograd.grad(expected.square().sum(), exact)
    rtol, atol = PRECISE[dtype]
    assert out.dtype == dtype
    for found, right in zip((out, *got), (expected, *true), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=rtol, atol=atol)


def test_nodes_beyond_the_last_graph_have_nothing(way):
    q, k, v, *_ = packed((4, 6)).leaves()
    out = dfi_attention(q, k, v, torch.tensor([0, 4]), check=False)
    of_inputs = torch.autograd.grad(out.sum(), (q, k, v))
    assert not any(bool(x[4:].any()) for x in (out, *of_inputs))
    assert bool(out[:4].all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [30, cpu.MOST + 1])  # by either way without dropout
def test_dropout_is_a_mask_of_flows_that_keeps_the_mean(size, dtype):
    p, (q, k, v, *_, ptr) = 0.4, packed((size, 4), heads=1, width=4, dtype=dtype).leaves()
    of_node = torch.eye(size + 4, dtype=dtype)[
        :, None
    ]  # [nodes, 1, nodes]: the output is the flows themselves
    z = softmax_one_by_one(q, k, of_node, ptr)

    def attend(values):
        torch.manual_seed(3)
        return dfi_attention(q, k, values, ptr, dropout_p=p)

    left = attend(of_node)
    on = left != 0
    torch.testing.assert_close(left[on], (z / (1 - p))[on])
    entries = size * size + 16
    assert float(on.sum()) / entries == pytest.approx(1 - p, abs=4 * (p * (1 - p) / entries) ** 0.5)
    # The gradients are those of the same mask.
    weight = torch.linspace(-1, 1, v.numel(), dtype=dtype).view_as(v)
    got = torch.autograd.grad((attend(v) * weight).sum(), (q, k, v))
    masked = (z * on / (1 - p)).squeeze(1) @ v.squeeze(1)
    true = torch.autograd.grad((masked[:, None] * weight).sum(), (q, k, v))
    for found, right in zip(got, true, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 5, 2), (4, 7, 7), (1, 130, 300)])
def test_loops(shape, dropout_p):
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(0)
    s, g = (3 * torch.randn(shape, generator=generator) for _ in range(2))
    keep = torch.rand(shape, generator=generator) >= dropout_p
    mask = keep.numpy() if dropout_p else None
    leaf = s.double().requires_grad_()
    z = leaf.softmax(-1) * keep
    (true,) = torch.autograd.grad((z * g).sum(), leaf)
    again, of_scores, of_flows = s.clone(), s.clone(), g.clone()
    cpu.soften(again, mask)
    cpu.soften_gradients(of_scores, mask, of_flows)
    for found in (again, of_flows):
        torch.testing.assert_close(found.double(), z.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(of_scores.double(), true, rtol=1e-4, atol=1e-5)


def test_scores_that_are_no_number_stay_so():
    q, k, v, *_, ptr = packed((4, 6), dtype=torch.float32)
    q[2, 0] = torch.nan
    wrong = dfi_attention(q, k, v, ptr, check=False).isnan()
    assert bool(wrong[2, 0].all())
    assert int(wrong.sum()) == v.shape[-1]


@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_values_are_looked_at(way, side):
    inputs = packed((4, 6))
    getattr(inputs, side)[1, 1, 1] = torch.inf
    with pytest.raises(ValueError, match=f"{side}.*finite"):
        dfi_attention(inputs.q, inputs.k, inputs.v, inputs.ptr)


def test_a_graph_is_as_exact_beside_a_large_one_under_autocast():
    q, k, v = torch.randn(3, dense.LARGEST + 40, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        beside = dfi_attention(q, k, v, torch.tensor([0, 20, len(q)]))[:20]
        alone = dfi_attention(q[:20], k[:20], v[:20], torch.tensor([0, 20]))
    assert beside.dtype == alone.dtype == torch.float32
    torch.testing.assert_close(beside, alone)


def test_nodes_before_the_first_graph_have_nothing(way):
    q, k, v = torch.randn(3, 9, 2, 8)
    with poisoned():
        out = dfi_attention(q, k, v, torch.tensor([2, 6, 9]), check=False)
    assert not out[:2].any()
    assert out[2:].all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_default_device_is_none_of_its_business(dropout_p):
    inputs = packed(dtype=torch.float32)
    torch.manual_seed(0)
    expected = attend(inputs, lam=0.3, dropout_p=dropout_p)
    torch.manual_seed(0)
    with torch.device("meta"):
        found = attend(inputs, lam=0.3, dropout_p=dropout_p)
        dense_found = dfi_attention(inputs.q, inputs.k, inputs.v, inputs.ptr)
    assert torch.equal(found, expected)
    assert torch.equal(dense_found, dfi_attention(inputs.q, inputs.k, inputs.v, inputs.ptr))
