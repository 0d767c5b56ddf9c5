"""The streaming kernels against the plain twin, both measured against float64, and against the kernels with rows on chip.

On a machine without a GPU they run in Triton's interpreter, where every graph is streamed, however small.
"""

import math

import pytest
import torch

from kernel_cases import DEVICE, GPU, SCALINGS
from packing import margins, other_last_bits, poisoned
from sfiformer.attention import dfi_attention, fused, kernels, sfi_attention, widths
from sfiformer.attention.kernels import launch
from sfiformer.attention.packed import packed_attention

on_gpu = pytest.mark.skipif(not GPU, reason="no GPU")


@pytest.fixture(autouse=not GPU)
def large_tiles(monkeypatch):
    """What the interpreter takes per operation hardly depends on the tile."""
    monkeypatch.setattr(launch, "stream_tiles", lambda q, v, streamed: (launch.Stream(64, 64, 4, 1),) * 4)


@pytest.fixture
def stream_all(monkeypatch):
    monkeypatch.setattr(launch, "MAX_NODES", 0)


def make(sizes, heads=1, width=20, value_width=24, spread=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(sizes) + width)
    widths, scales = (width, width, value_width, width, width), (spread, spread, 1.0, spread, spread)
    tensors = [
        (torch.randn(sum(sizes), heads, w, generator=generator) * c).to(DEVICE, dtype)
        for w, c in zip(widths, scales, strict=True)
    ]
    grad = torch.randn(sum(sizes), heads, value_width, generator=generator).to(DEVICE, dtype)
    return tensors, grad


def attend(op, tensors, sizes, lam, alpha, potential, dropout_p=0.0, seed=0):
    ptr = torch.tensor([0, *sizes], device=DEVICE).cumsum(0)
    if op is sfi_attention:
        scaling = "potential" if potential else "absolute"
        return (op(*tensors, ptr, lam=lam, alpha=alpha, scaling=scaling, max_nodes=max(sizes)),)
    seed = torch.tensor(seed, device=DEVICE)
    tail = (max(sizes),) if op is launch.fused_attention else (None, False)
    return op(*tensors, ptr, lam, seed, alpha, potential, tensors[0].shape[-1] ** -0.5, dropout_p, *tail)


def with_gradients(op, sizes, tensors, grad, alpha, potential, dtype=None, **kwargs):
    """Output and gradients of the five tensors and λ, at λ* = 1."""
    lam = torch.tensor([1.0 if potential else 1 / max(n, 1) for n in sizes], device=DEVICE)
    inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (*tensors, lam)]
    out = attend(op, inputs[:5], sizes, inputs[5], alpha, potential, **kwargs)[0]
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def relative_errors(results, truth):
    return [
        float((a.double() - b).norm() / b.norm().clamp(min=1e-30))
        for a, b in zip(results, truth, strict=True)
    ]


def assert_as_good_as_the_twin(
    sizes, alpha, potential, floor, op=launch.fused_attention, margin=0.0, **kwargs
):
    """Rows within ``margin`` of a jump of the gradient are given none."""
    tensors, grad = make(sizes, **kwargs)
    if margin:
        ptr = torch.tensor([0, *sizes], device=DEVICE).cumsum(0)
        clear = margins(tensors, ptr, alpha, potential) > margin
        assert clear.double().mean() > 0.3
        grad = grad * clear.unsqueeze(-1)
    case = (sizes, tensors, grad, alpha, potential)
    truth = with_gradients(packed_attention, *case, dtype=torch.float64)
    with poisoned():
        kernel = relative_errors(with_gradients(op, *case), truth)
    plain = relative_errors(with_gradients(packed_attention, *case), truth)
    limits = [2 * plain[0] + floor] + [3 * error + floor for error in plain[1:]]
    assert all(error <= limit for error, limit in zip(kernel, limits, strict=True)), (kernel, plain)


def assert_at_scale(sizes, scale, alpha, potential, **kwargs):
    """With scores of standard deviation ``scale``; rows within rounding of a jump have no gradient."""
    floor, margin = 1e-5 * max(scale**0.5, 1), 2e-5 * max(scale, 1)
    assert_as_good_as_the_twin(sizes, alpha, potential, floor, margin=margin, spread=scale**0.5, **kwargs)


@pytest.mark.parametrize(("alpha", "potential"), SCALINGS)
def test_matches_the_plain_twin(stream_all, alpha, potential):
    assert_as_good_as_the_twin([70, 0, 1], alpha, potential, floor=3e-6)


@pytest.mark.parametrize(
    ("scale", "potential"),
    [*((x, False) for x in (0.1, 1, 10, 30, 100)), (0.1, True), (10, True), (100, True)],
)
def test_matches_for_scores_of_any_range(stream_all, scale, potential):
    assert_at_scale([70, 40], scale, 0.1, potential)


@pytest.mark.parametrize(
    ("scale", "alpha", "potential"),
    [(1, math.inf, False), (10, 0.1, True), (30, 0.1, False), (100, 0.1, True)],
)
def test_matches_in_half_precision(stream_all, scale, alpha, potential):
    assert_at_scale([70, 40], scale, alpha, potential, dtype=torch.float16)


@pytest.mark.parametrize(
    ("scale", "width", "value_width", "dtype"),
    [(1, 68, 68, torch.float16), (100, 40, 72, torch.float32), (100, 16, 40, torch.float16)],
)
def test_heads_in_two_parts(stream_all, scale, width, value_width, dtype):
    assert_at_scale([80], scale, 0.1, False, width=width, value_width=value_width, dtype=dtype)


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_half_precision_ends_at_its_range(stream_all, spread):
    tensors, _ = make([40], spread=spread, dtype=torch.float16)
    tensors[2].detach().fill_(60000.0)
    lam = torch.tensor([0.02], device=DEVICE)
    out = attend(launch.fused_attention, tensors, [40], lam, 0.1, False, dropout_p=0.5, seed=3)[0]
    assert out.isfinite().all()
    assert float(out.abs().max()) == 65504


@pytest.mark.skipif(GPU, reason="on a GPU the kernels differ in their last bits without help")
@pytest.mark.parametrize("most_on_chip", [0, 1024])
@pytest.mark.parametrize(("scale", "sizes"), [(30, [70, 64]), (100, [70, 64]), (100, [60, 66])])
def test_scores_may_come_out_with_other_last_bits(monkeypatch, scale, sizes, most_on_chip):
    monkeypatch.setattr(launch, "MAX_NODES", most_on_chip)
    other_last_bits(monkeypatch)
    tensors, grad = make(sizes, spread=scale**0.5)
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    clear = (margins(tensors, ptr, 0.1) > 1e-4 * scale).unsqueeze(-1)
    grad = grad * clear
    case = (sizes, tensors, grad, 0.1, False)
    truth = with_gradients(packed_attention, *case, dtype=torch.float64)
    out, *gradients = with_gradients(launch.fused_attention, *case)
    errors = relative_errors([out * clear, *gradients], [truth[0] * clear, *truth[1:]])
    assert max(errors) < 2e-5 * scale, errors


def test_small_and_large_graphs_share_a_batch(monkeypatch):
    sizes = [40, 70, 3]
    tensors, grad = make(sizes)
    on_chip = with_gradients(launch.fused_attention, sizes, tensors, grad, 0.1, False)
    monkeypatch.setattr(launch, "MAX_NODES", 64)
    mixed = with_gradients(launch.fused_attention, sizes, tensors, grad, 0.1, False)
    assert max(relative_errors(mixed, [x.double() for x in on_chip])) < 3e-6


@pytest.fixture
def large_from_65(monkeypatch):
    """`fused_attend` sends the CPU's tensors to the kernels too, and streams graphs of more than 64 nodes."""
    if GPU:
        pytest.skip("a GPU does so with larger graphs, below")
    for module in (kernels, fused):
        monkeypatch.setattr(module, "usable", lambda x: x.dtype != torch.float64)
    for module in (fused, launch):
        monkeypatch.setattr(module, "MAX_NODES", 64)


@pytest.mark.parametrize(("alpha", "potential"), SCALINGS)
def test_sfi_attention_streams_large_graphs(large_from_65, alpha, potential):
    sizes = [9, 70]
    tensors, grad = make(sizes)
    case = (sizes, tensors, grad, alpha, potential)
    got, expected = (with_gradients(op, *case) for op in (sfi_attention, launch.fused_attention))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_heads_of_other_widths_are_padded(large_from_65, monkeypatch):
    sizes = [9, 20]
    tensors, grad = make(sizes, width=13, value_width=5)
    case = (sizes, tensors, grad, 0.1, False)
    expected = with_gradients(launch.fused_attention, *case)
    monkeypatch.setattr(fused, "wide", lambda width, like: 16)
    monkeypatch.setattr(widths, "usable", lambda x: True)
    for a, b in zip(with_gradients(sfi_attention, *case), expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_nodes", [None, 70])
def test_dense_attention_leaves_large_graphs_to_pytorch(large_from_65, monkeypatch, max_nodes):
    (q, k, v, _, _), _ = make([9, 70])
    monkeypatch.delattr(launch, "fused_attention")
    ptr = torch.tensor([0, 9, 79], device=DEVICE)
    out = dfi_attention(q, k, v, ptr, max_nodes=max_nodes)
    torch.testing.assert_close(out, softmax_attention(q, k, v, [9, 70]), rtol=1e-5, atol=1e-5)


def softmax_attention(q, k, v, sizes):
    parts = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
    outs = [(a @ b.mT * a.shape[-1] ** -0.5).softmax(-1) @ c for a, b, c in parts]
    return torch.cat(outs, 1).transpose(0, 1)


@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_a_row_takes_few_sweeps_and_says_so(stream_all, spread):
    tensors, _ = make([130], width=16, value_width=16, spread=spread)
    lam = torch.tensor([1 / 130], device=DEVICE)
    _, stats, _ = attend(launch.fused_attention, tensors, [130], lam, 0.1, False)
    assert len(stats) == 11
    assert stats[9].abs().ge(2).all()
    assert stats[9].le(4).all()
    assert stats[9].lt(0).any() == (spread > 1)  # measured from a pivot


def test_friction_without_strength_is_softmax(stream_all):
    tensors, _ = make([70], width=16, value_width=16)
    lam = torch.zeros(1, device=DEVICE)
    out, _, _ = attend(launch.fused_attention, tensors, [70], lam, math.inf, False)
    q, k, v = (x[:, 0] for x in tensors[:3])
    torch.testing.assert_close(out[:, 0], torch.softmax(q @ k.T / 4, -1) @ v, rtol=1e-5, atol=1e-6)


def test_no_flow_pays_gives_zeros(stream_all):
    tensors, grad = make([40])
    inputs = [x.requires_grad_() for x in (*tensors, torch.tensor([5e3], device=DEVICE))]
    out, _, _ = attend(launch.fused_attention, inputs[:5], [40], inputs[5], 0.1, False)
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out, inputs, grad))


@pytest.mark.parametrize(("dropout_p", "upstream"), [(0.0, 1), (0.5, 1), (0.5, 1e28)])
def test_duplicated_keys_have_finite_gradients(stream_all, dropout_p, upstream):
    tensors, grad = make([64], spread=6.0)
    for x in tensors:
        x[32:] = x[:32]
    case = ([64], tensors, upstream * grad, 0.1, False)
    assert all(
        x.isfinite().all() for x in with_gradients(launch.fused_attention, *case, dropout_p=dropout_p, seed=5)
    )


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_dropout_is_that_of_the_rows_on_chip(monkeypatch, spread):
    tensors, grad = make([60], spread=spread)
    case = ([60], tensors, grad, 0.1, False)
    on_chip = with_gradients(launch.fused_attention, *case, dropout_p=0.4, seed=5)
    monkeypatch.setattr(launch, "MAX_NODES", 0)
    streamed = with_gradients(launch.fused_attention, *case, dropout_p=0.4, seed=5)
    assert max(relative_errors(streamed, [x.double() for x in on_chip])) < 1e-5 * spread**2


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("alpha", "potential"), SCALINGS)
@pytest.mark.parametrize("scale", [0.1, 1, 10, 30, 100])
def test_large_graphs(scale, alpha, potential, dtype):
    assert_at_scale([2049, 700], scale, alpha, potential, dtype=dtype, **SHAPE)


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float16, 40), (torch.bfloat16, 68), (torch.bfloat16, 235), (torch.float32, 235)],
)
def test_any_width(stream_all, dtype, width):
    assert_at_scale([2049, 700], 1, 0.1, False, dtype=dtype, heads=2, width=width, value_width=width)


EVERY_SIZE = [0, 1, 2, 15, 16, 17, 31, 32, 33, 150, 480, 513, 2049]
# To a compiled kernel these batches look alike, and like those of the next test: kernels take long to compile.
SHAPE = {"heads": 2, "width": 64, "value_width": 64}


@on_gpu
@pytest.mark.parametrize(
    ("sizes", "dtype", "potential", "spread"),
    [
        (EVERY_SIZE, torch.float32, False, 1.0),
        (EVERY_SIZE, torch.float32, False, 10.0),
        (EVERY_SIZE, torch.bfloat16, False, 1.0),
        (EVERY_SIZE, torch.bfloat16, False, 10.0),
        (EVERY_SIZE, torch.bfloat16, True, 1.0),
        ([20_000, 33], torch.float32, False, 1.0),
        ([20_000, 33], torch.bfloat16, False, 1.0),
        ([20_000, 33], torch.bfloat16, True, 1.0),
    ],
)
def test_sfi_attention_at_every_size(sizes, dtype, potential, spread):
    exact = dtype == torch.float32  # so much that one key across its threshold would show
    floor, margin = 1e-5 * spread if exact else 1e-3, 2e-5 if exact and spread == 1 else 0.0
    options = {"op": sfi_attention, "spread": spread, "dtype": dtype, "margin": margin}
    assert_as_good_as_the_twin(sizes, 0.1, potential, floor, **options, **SHAPE)


@on_gpu
@pytest.mark.parametrize("sizes", [[2049, 700], [20_000, 33]])
def test_sfi_attention_streams_repeatably_and_is_captured(sizes):
    tensors, grad = make(sizes, dtype=torch.bfloat16, **SHAPE)
    ptr, lam = torch.tensor([0, *sizes], device=DEVICE).cumsum(0), 1 / max(sizes)
    strengths = torch.full((len(sizes),), lam, device=DEVICE)
    expected, stats, _ = attend(launch.fused_attention, tensors, sizes, strengths, 0.1, False)
    assert stats[9, : sizes[0]].abs().ge(2).all()
    for x in tensors:
        x.requires_grad_()

    def both():
        out = sfi_attention(*tensors, ptr, lam=lam, max_nodes=max(sizes))
        return out.detach(), *torch.autograd.grad(out, tensors, grad)

    once = both()
    assert torch.equal(once[0], expected)
    assert all(torch.equal(a, b) for a, b in zip(once, both(), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        for x in tensors:
            x.mul_(0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, both(), strict=True))


@on_gpu
@pytest.mark.parametrize(
    ("sizes", "dtype", "width"),
    [
        ([2049, 40, 0, 40], torch.float32, 35),
        ([2049, 40], torch.float16, 68),
        ([20_000, 5], torch.bfloat16, 64),
    ],
)
def test_dense_attention_on_large_graphs(sizes, dtype, width):
    tensors, grad = make(sizes, width=width, value_width=width, dtype=dtype)
    ptr = torch.tensor([0, *sizes], device=DEVICE).cumsum(0)

    def run(attention, dtype=dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]

    truth = run(lambda *inputs: softmax_attention(*inputs, sizes), torch.float64)
    plain = relative_errors(run(lambda *inputs: softmax_attention(*inputs, sizes)), truth)
    fused = relative_errors(run(lambda *inputs: dfi_attention(*inputs, ptr)), truth)
    assert all(error <= 2 * limit + 1e-5 for error, limit in zip(fused, plain, strict=True)), (fused, plain)


def test_is_a_proper_operator(monkeypatch):
    monkeypatch.setattr(launch, "MAX_NODES", 32)
    tensors, _ = make([40, 5], width=16, value_width=16)
    ptr, lam = torch.tensor([0, 40, 45], device=DEVICE), torch.tensor([1 / 40, 1 / 5], device=DEVICE)
    args = [*(x.requires_grad_() for x in tensors), ptr, lam.requires_grad_(), torch.tensor(0, device=DEVICE)]
    torch.library.opcheck(launch.fused_attention.plain, (*args, 0.1, False, 0.25, 0.0, 40))
