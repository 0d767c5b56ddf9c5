"""The fused kernels against their plain twin, both measured against float64.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on small graphs; its bfloat16 is wrong).
"""

import math
import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

triton = pytest.importorskip("triton", reason="the kernels need Triton")
tl = pytest.importorskip("triton.language")

from packing import margins, other_last_bits, poisoned  # noqa: E402
from sfiformer.attention import dfi_attention, sfi_attention  # noqa: E402
from sfiformer.attention.kernels import launch  # noqa: E402
from sfiformer.attention.kernels.tiles import kept  # noqa: E402
from sfiformer.attention.packed import packed_attention  # noqa: E402
from sfiformer.flow import flows_from_scores  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
SCALINGS = [(0.1, False), (math.inf, False), (0.1, True)]  # alpha, potential
on_gpu = pytest.mark.skipif(not GPU, reason="no GPU")


@pytest.fixture(autouse=not GPU)
def few_programs(monkeypatch):
    """So few that each looks through several tiles for rows that are not gentle."""
    monkeypatch.setattr(launch, "FEW", 2)


def make(sizes, heads=2, width=20, value_width=24, spread=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(sizes) + sum(sizes) + width)
    ptr = torch.tensor([0, *sizes]).cumsum(0).to(DEVICE)
    widths = (width, width, value_width, width, width)
    scales = (spread, spread, 1.0, spread, spread)
    tensors = [
        (torch.randn(sum(sizes), heads, w, generator=generator) * c).to(DEVICE, dtype).requires_grad_()
        for w, c in zip(widths, scales, strict=True)
    ]
    grad = torch.randn(sum(sizes), heads, value_width, generator=generator).to(DEVICE, dtype)
    return tensors, ptr, grad


def attend(op, tensors, ptr, lam, alpha, potential, max_nodes, dropout_p=0.0, seed=0):
    width = tensors[0].shape[-1]
    seed = torch.tensor(seed, device=ptr.device)
    tail = (max_nodes,) if op is launch.fused_attention else (None, False)
    return op(*tensors, ptr, lam, seed, alpha, potential, width**-0.5, dropout_p, *tail)[0]


def both(sizes, alpha, potential, margin=0.0, **kwargs):
    """Errors of kernel and plain twin for the output and each gradient, relative to float64.

    Rows within ``margin`` of a jump of the gradient have none.
    """
    tensors, ptr, grad = make(sizes, **kwargs)
    if margin:
        grad = grad * (margins(tensors, ptr, alpha, potential) > margin).unsqueeze(-1)
    counts = torch.tensor(sizes, device=DEVICE).clamp(min=1)
    lam = (torch.ones(len(sizes), device=DEVICE) / (1 if potential else counts)).requires_grad_()

    def run(op, cast):
        inputs = [x.detach().to(cast(x.dtype)).requires_grad_() for x in (*tensors, lam)]
        out = attend(op, inputs[:5], ptr, inputs[5], alpha, potential, max(sizes))
        return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    truth = run(packed_attention, lambda _: torch.float64)
    with poisoned():
        fused = run(launch.fused_attention, lambda d: d)
    results = (fused, run(packed_attention, lambda d: d))
    return [
        [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(r, truth, strict=True)]
        for r in results
    ]


def assert_close_to_twin(kernel, plain, floor):
    assert all(math.isfinite(error) for error in kernel)
    limits = [2 * plain[0] + floor] + [3 * error + floor for error in plain[1:]]
    assert all(error <= limit for error, limit in zip(kernel, limits, strict=True)), (kernel, plain)


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


def test_a_key_of_no_weight_and_all_the_friction_leaves():
    q, v = torch.tensor([[[1.0]], [[1.0]]]), torch.tensor([[[1.0]], [[2.0]]])
    k = torch.tensor([[[0.0]], [[20.0]]])
    tensors = [x.to(DEVICE) for x in (q, k, v, q, -k)]
    lam = torch.tensor([0.5], device=DEVICE)
    out = attend(launch.fused_attention, tensors, torch.tensor([0, 2], device=DEVICE), lam, 0.1, False, 2)
    torch.testing.assert_close(out, torch.full_like(out, 2.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.1, math.inf])
def test_gradients_where_the_first_solution_is_wrong_and_the_right_one_gentle(alpha):
    # κ f p of the last key is e⁷¹, beyond plain exponentials; that of the first, which carries all the flow, is e⁻⁹.
    ones, k, k_friction = torch.ones(3, 1, 1), torch.tensor([70.0, 0, 0]), torch.tensor([0, 14.3, 80.0])
    parts = (ones, k.view(3, 1, 1), torch.tensor([[[1.0]], [[2.0]], [[4.0]]]), ones, k_friction.view(3, 1, 1))
    tensors = [x.to(DEVICE).requires_grad_() for x in parts]
    lam = torch.ones(1, device=DEVICE, requires_grad=True)
    out = attend(launch.fused_attention, tensors, torch.tensor([0, 3], device=DEVICE), lam, alpha, False, 3)
    torch.testing.assert_close(out, torch.ones_like(out))
    of_q, of_k, of_v, *rest = torch.autograd.grad(out.sum(), [*tensors, lam])
    assert of_v.flatten().tolist() == [3, 0, 0]
    for grad in (of_q, of_k, *rest):  # in float64 none of these exceeds 2e-28
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=2e-28)


def test_no_flow_pays_gives_zeros():
    tensors, ptr, grad = make([3, 1])
    lam = torch.tensor([50.0, 50.0], device=DEVICE, requires_grad=True)
    out = attend(launch.fused_attention, tensors, ptr, lam, 0.1, False, 3)
    grads = torch.autograd.grad(out, [*tensors, lam], grad)
    assert not out.any()
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize(
    ("dtype", "upstream"), [(torch.float32, 1), (torch.float16, 1), (torch.float32, 1e28)]
)
def test_duplicated_keys_have_finite_gradients(dtype, upstream, dropout_p):
    """Dropout tells twins apart, and the derivatives of their flows exceed any type; so may those of the layer above."""
    tensors, ptr, grad = make([8], spread=6.0, dtype=dtype)
    with torch.no_grad():
        for x in tensors:
            x[4:] = x[:4]
    lam = torch.tensor([0.2], device=DEVICE, requires_grad=True)
    out = attend(launch.fused_attention, tensors, ptr, lam, 0.1, False, 8, dropout_p)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, [*tensors, lam], upstream * grad))


def test_gradients_of_scores_beyond_the_type_stay_within_it():
    """∂L/∂s exceeds float16 where ∂L/∂q, its product with small keys, does not."""
    tensors, ptr, grad = make([9, 20], width=16, value_width=16, dtype=torch.float16)
    factors = (200, 0.02, 2, 50, 0.02)
    tensors = [(x.detach().float() * factor).half() for x, factor in zip(tensors, factors, strict=True)]
    lam, grad = torch.tensor([1 / 9, 1 / 20], device=DEVICE), (4e4 * grad.float()).clamp(-6e4, 6e4)

    def gradients(op, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in tensors]
        out = attend(op, inputs, ptr, lam, 0.1, False, 20)
        return torch.autograd.grad(out, inputs, grad.to(dtype))

    of_q, *others = gradients(launch.fused_attention, torch.float16)
    truth = gradients(packed_attention, torch.float64)[0]
    assert all(g.isfinite().all() for g in (of_q, *others))
    assert truth.abs().max() < 3e4
    assert (of_q.double() * truth).sum() > 0.3 * truth.square().sum()  # shorter at most, not another


@pytest.mark.parametrize("lam", [0.0, 1e-30])
def test_hardly_any_friction_and_steep_gradients(lam):
    tensors, ptr, grad = make([20, 9])
    strength = torch.full((2,), lam, device=DEVICE, requires_grad=True)
    out = attend(launch.fused_attention, tensors, ptr, strength, 0.1, False, 20)
    grads = torch.autograd.grad(out, [*tensors, strength], 1e28 * grad)
    assert all(g.isfinite().all() for g in grads[:5])


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


@pytest.mark.parametrize("friction", [True, False])
def test_a_row_of_scores_that_are_no_numbers_is_none(monkeypatch, friction):
    """And no row is left as the memory was."""
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, 777.0))
    tensors, ptr, _ = make([20, 70])
    tensors = [x.detach() for x in tensors]
    tensors[0][3] = torch.nan
    lam, alpha = torch.tensor([1 / 20, 1 / 70], device=DEVICE), 0.1 if friction else math.inf
    out = attend(
        launch.fused_attention,
        [*tensors[:3], *(tensors[3:] if friction else [None] * 2)],
        ptr,
        lam,
        alpha,
        False,
        70,
    )
    assert out[3].isnan().all()
    others = torch.cat([out[:3], out[4:]])
    assert others.isfinite().all()
    assert float(others.abs().max()) < 100


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


@pytest.mark.parametrize(
    ("ahead", "lam", "alpha", "spread"),
    [(20.0, 1.0, 0.1, 1.0), (60.0, 1.0, 0.1, 1.0), (20.0, 100.0, math.inf, 1e-2)],
)
def test_a_heavy_key_at_the_edge(ahead, lam, alpha, spread):
    """One key has e^ahead times the weight of the others, and a friction at which its flow just ends, give or take an ulp.

    No flow exceeds the whole, and queries and keys agree on who is active: the gradients of both come of one ∂L/∂u.
    """
    rows, kinds = 64, 4
    kind = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.arange(rows - 1) % (kinds - 1)])
    generator = torch.Generator().manual_seed(0)
    s, u = (torch.randn(rows, kinds, generator=generator).double() for _ in range(2))
    s[:, 0] = s.amax(1) + ahead
    s, u = s.float().double(), u * spread
    low, high = (torch.full((rows,), x, dtype=torch.float64) for x in (-60.0, 60.0))
    for _ in range(50):
        u[:, 0] = (low + high) / 2
        flows = flows_from_scores(s[:, kind], u[:, kind], lam=lam, alpha=alpha)[:, 0] > 0
        low, high = torch.where(flows, u[:, 0], low), torch.where(flows, high, u[:, 0])
    keys = torch.eye(16)[kind].unsqueeze(1)  # so that a score is an entry of the query, a quarter of it
    grad = torch.randn(keys.shape, generator=generator).to(DEVICE)
    ptr, strength = torch.tensor([0, rows], device=DEVICE), torch.full((1,), lam, device=DEVICE)
    for ulps in (-2, -1, 0, 1, 2, 4):
        u[:, 0] = low.float() * (1 + ulps * 2**-24)
        q, q_friction = (
            torch.zeros(rows, 1, 16).index_copy(2, torch.arange(kinds), 4 * x[:, None].float())
            for x in (s, u)
        )
        tensors = [
            x.to(DEVICE).requires_grad_() for x in (q, keys.clone(), keys.clone(), q_friction, keys.clone())
        ]
        out = attend(launch.fused_attention, tensors, ptr, strength, alpha, False, rows)
        assert out.max() < 1 + 1e-5
        *_, of_queries, of_keys = torch.autograd.grad(out, tensors, grad)
        # The first key is the only one of its kind, so ∂L/∂u_i0 is the first entry of the gradient of q̃_i.
        expected = (of_queries[:, 0, :1] * q_friction[:, 0].to(DEVICE)).sum(0)
        torch.testing.assert_close(
            of_keys[0, 0], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
        )


@pytest.mark.skipif(GPU, reason="on a GPU the kernels differ in their last bits without help")
def test_a_heavy_key_whose_last_bits_put_it_in_and_out(monkeypatch):
    """One key has e^30 times the weight of the others, and a friction that is theirs to rounding, another time otherwise.

    Wherever the kernels see it, none makes a flow, or a gradient, of its weight alone.
    """
    other_last_bits(monkeypatch)
    rows = 64
    kind = torch.ones(rows, dtype=torch.int64)
    kind[0], kind[1] = 0, 2  # heavy; and so light that κ f of the others is large
    s, u = (torch.tensor(x).expand(rows, 1, 3) for x in ([30.0, 0.0, -40.0], [1 + 6e-6, 1.0, 1.5]))
    keys = torch.eye(16)[kind].unsqueeze(1)
    q, q_friction = (torch.zeros(rows, 1, 16).index_copy(2, torch.arange(3), 4 * x) for x in (s, u))
    tensors = [x.clone().requires_grad_() for x in (q, keys, keys, q_friction, keys)]
    out = attend(
        launch.fused_attention, tensors, torch.tensor([0, rows]), torch.tensor([1e-6]), math.inf, False, rows
    )
    drawn = out[:, 0, 0] > 0.5
    assert 0 < int(drawn.sum()) < rows  # some rows draw from the heavy key, and some do not
    grad = torch.randn(keys.shape, generator=torch.Generator().manual_seed(0))
    of_q, of_k, of_v, *of_friction = torch.autograd.grad(out, tensors, grad)
    assert max(float(x.abs().max()) for x in (of_q, of_k)) < 1e-3
    assert float(of_v.abs().max()) < rows
    # κ f p of the others is e^22; with the heavy key's p, e^52.
    assert max(float(x.abs().max()) for x in of_friction) < 1e14


def test_the_gradient_of_lambda_is_zero_where_lambda_is():
    tensors, ptr, grad = make([9, 12])
    lam = torch.tensor([0.4, 0.0], device=DEVICE, requires_grad=True)
    out = attend(launch.fused_attention, tensors, ptr, lam, 0.1, False, 12)
    of_lam = torch.autograd.grad(out, lam, grad)[0]
    assert of_lam[0] != 0
    assert of_lam[1] == 0


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
