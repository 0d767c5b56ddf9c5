"""The fused kernels at the edge of their numbers: ties, heavy keys, no flow, no friction, the end of a type, NaN."""

import math

import pytest
import torch

from kernel_cases import (
    DEVICE,
    GPU,
    attend,
    both,
    few_programs,  # noqa: F401 (for all tests here)
    make,
)
from packing import other_last_bits
from sfiformer.attention.kernels import launch
from sfiformer.attention.packed import packed_attention
from sfiformer.flow import flows_from_scores


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


def test_no_flow_pays_where_scores_range_beyond_the_type():
    ends, ones = torch.tensor([[[1.0]], [[-1.0]]]), torch.ones(2, 1, 1)
    tensors = [x.to(DEVICE).requires_grad_() for x in (800 * ones, ends, ones, 0 * ones, 0 * ones)]
    lam = torch.tensor([0.5], device=DEVICE, requires_grad=True)
    out = attend(launch.fused_attention, tensors, torch.tensor([0, 2], device=DEVICE), lam, 0.1, False, 2)
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), [*tensors, lam]))


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


def test_rows_of_bfloat16_need_no_pivot_where_they_have_none(monkeypatch):
    """Up to its bound of gentleness they lose less than bfloat16 rounds, 2⁻⁹. (Here in float32, which shows the loss alone.)"""
    bound = math.log(16384)
    assert launch.log_gentle(torch.empty(0, dtype=torch.bfloat16)) == bound
    monkeypatch.setattr(launch, "log_gentle", lambda q: bound)
    seen = []
    forward = launch.forward_kernel

    class Spy:
        def __getitem__(self, grid):
            def run(*args, **kwargs):
                forward[grid](*args, **kwargs)
                seen.append(args[6][1])  # levels: NaN where rows are not gentle, half of eta elsewhere

            return run

    monkeypatch.setattr(launch, "forward_kernel", Spy())
    kernel, _ = both([60], 0.1, False, margin=1e-4, spread=2.2)
    assert max(kernel) < 2**-9
    assert any(float(level.nan_to_num().max()) > 1024 for level in seen)
