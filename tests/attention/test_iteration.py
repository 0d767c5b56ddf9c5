"""The paper's iteration by kernels is the plain one, and so are its derivatives.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on small matrices).
"""

import pytest
import torch

from sfiformer.attention import functional, iteration, one_block, sfi_attention
from sfiformer.attention.iteration import FusedProximal, fused_iteration
from sfiformer.attention.kept_flows import Settings, attention_and_flows
from sfiformer.attention.one_block import in_one_block
from sfiformer.flow import Proximal, flows_from_scores

pytest.importorskip("triton", reason="the kernels need Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (4, 3, 0)  # of matrices side by side


def _problem(dtype=torch.float64, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    s, u = (spread * torch.randn(len(SIZES), 1, 4, 4, generator=generator, dtype=dtype) for _ in range(2))
    real = torch.arange(4) < torch.tensor(SIZES).unsqueeze(1)
    mask = (real.unsqueeze(1) & real.unsqueeze(2)).unsqueeze(1).expand_as(s)
    lam = torch.tensor([0.2, 0.05, 0.1], dtype=dtype).view(-1, 1, 1)
    return [x.to(DEVICE) for x in (s, u, lam, mask)]


def _flows_and_gradients(solver, alpha, problem):
    s, u, lam, mask = problem
    s, u, lam = (x.clone().requires_grad_() for x in (s, u, lam))
    z = flows_from_scores(s, u, lam=lam, alpha=alpha, mask=mask, solver=solver)
    weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype, device=z.device).view_as(z)
    return z, *torch.autograd.grad((z * weights).sum() + (z * z).sum(), (s, u, lam))


@pytest.mark.parametrize("iterations", [1, 2, 3, 10])
@pytest.mark.parametrize("start", ["uniform", "softmax"])
def test_flows_and_derivatives_are_those_of_the_plain_iteration(iterations, start):
    problem = _problem()
    got = _flows_and_gradients(FusedProximal(iterations, start=start), 0.1, problem)
    expected = _flows_and_gradients(Proximal(iterations, start=start), 0.1, problem)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
    assert torch.equal(got[0] == 0, expected[0] == 0)


def test_keys_may_be_missing_anywhere():
    """A hole in a row, rows without keys (the first of a matrix among them), and a matrix without any."""
    s, u, lam, mask = _problem()
    mask = torch.ones_like(mask)
    mask[0, :, 1, 2], mask[0, :, 3], mask[1, :, 0], mask[1, :, :, 3], mask[2] = (
        False,
        False,
        False,
        False,
        False,
    )
    got, expected = (
        _flows_and_gradients(solver, 0.1, (s, u, lam, mask)) for solver in (FusedProximal(5), Proximal(5))
    )
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_a_learnt_penalty_has_the_derivative_of_the_plain_iteration():
    s, u, lam, mask = _problem()

    def learnt(solver):
        alpha = torch.tensor(0.1, dtype=s.dtype, device=DEVICE, requires_grad=True)
        z = flows_from_scores(s, u, lam=lam, alpha=alpha, mask=mask, solver=solver)
        return torch.autograd.grad(z.square().sum(), alpha)[0]

    assert learnt(Proximal(5)) != 0
    torch.testing.assert_close(learnt(FusedProximal(5)), learnt(Proximal(5)))


@pytest.mark.parametrize("iterations", [1, 4, 5])
def test_without_a_derivative_only_two_steps_are_kept(iterations, monkeypatch):
    from sfiformer.attention.kernels import iteration as kernels

    kept, made = [], kernels.iterate

    def iterate(*given):
        found = made(*given)
        kept.append(len(found[1]))
        return found

    monkeypatch.setattr(kernels, "iterate", iterate)
    s, u, lam, mask = _problem()
    options = {"lam": lam, "alpha": 0.1, "mask": mask, "solver": FusedProximal(iterations)}
    learning = flows_from_scores(s.clone().requires_grad_(), u, **options)
    with torch.no_grad():
        quiet = flows_from_scores(s.clone().requires_grad_(), u, **options)
    assert torch.equal(flows_from_scores(s, u, **options), learning)
    assert torch.equal(quiet, learning)
    assert kept == [iterations + 1, 2, 2]


@pytest.mark.parametrize("lam", [0.0, 1e3])
def test_where_nothing_moves_the_length_is_kept(lam):
    """With friction this strong all flows vanish in the first step, and no step length can be made of the second."""
    s, u, _, mask = _problem()
    problem = s, u, torch.full_like(s[:, :1, :1, 0], lam), mask
    got, expected = (_flows_and_gradients(solver, 0.1, problem) for solver in (FusedProximal(6), Proximal(6)))
    assert (lam == 0) == bool(expected[0].any())
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_in_single_precision():
    got, expected = (
        _flows_and_gradients(solver, 0.1, _problem(torch.float32)) for solver in (FusedProximal(), Proximal())
    )
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_all_graphs_at_once_are_the_graphs_one_by_one(monkeypatch, dropout):
    monkeypatch.setattr(iteration, "usable", lambda x: True)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda z, p: z * p)
    blocks = []
    made = one_block.attention_in_one_block
    monkeypatch.setattr(
        functional, "attention_in_one_block", lambda *given: blocks.append(given) or made(*given)
    )
    torch.manual_seed(0)
    packed = torch.randn(5, 9, 2, 3, dtype=torch.float64).to(DEVICE)
    ptr = torch.tensor([0, 2, 2, 6, 7], device=DEVICE)  # an empty graph, and two nodes of none
    found = []
    for at_once in (True, False):
        inputs = [x.clone().requires_grad_() for x in packed]
        lam = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64, device=DEVICE).requires_grad_()
        if at_once:
            options = {"lam": lam, "alpha": 0.5, "solver": Proximal(5), "dropout_p": dropout, "check": False}
            out = sfi_attention(*inputs, ptr, max_nodes=4, **options)
        else:
            settings = Settings(0.5, "absolute", 3**-0.5, dropout, Proximal(5), False)
            out, _ = attention_and_flows(tuple(inputs), ptr, lam, settings)
            out = torch.cat([out, out.new_zeros(2, 2, 3)])
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=DEVICE).view_as(out)
        found.append([out, *torch.autograd.grad((out * out * weights).sum(), [*inputs, lam])])
    assert len(blocks) == 1
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def test_only_what_has_room_is_iterated_at_once():
    q, ptr, ten = torch.empty(4800, 4, 1), torch.zeros(33), FusedProximal(10)
    assert in_one_block(q, ptr, ten, 444)
    assert not in_one_block(q, ptr, FusedProximal(50), 444)  # keeps five times as much
    with torch.no_grad():
        assert in_one_block(q, ptr, FusedProximal(50), 444)
    assert not in_one_block(q[:3000], ptr, ten, 444)  # more than three quarters would be padding
    assert not in_one_block(q, ptr, ten, None)
    assert not in_one_block(q, ptr, ten, 0)
    assert not in_one_block(q, ptr[:1], ten, 444)
    assert not in_one_block(q[:0], ptr, ten, 444)


def test_scores_are_looked_at_and_a_size_too_small_reads_nothing_that_is_not_there(monkeypatch):
    monkeypatch.setattr(iteration, "usable", lambda x: True)
    torch.manual_seed(0)
    inputs = torch.randn(5, 6, 1, 3, dtype=torch.float64).to(DEVICE)
    options = {"lam": 0.1, "alpha": 0.1, "solver": "proximal", "check": False}
    ptr = torch.tensor([0, 2, 6], device=DEVICE)
    right = sfi_attention(*inputs, ptr, max_nodes=4, **options)
    cut = sfi_attention(*inputs, ptr, max_nodes=3, **options)  # the last node of the last graph has no place
    torch.testing.assert_close(cut[:2], right[:2])
    assert not cut[5].any()
    inputs[:2, 3] = 1e200  # whose product is not finite
    with pytest.raises(ValueError, match="s must be finite"):
        sfi_attention(*inputs, ptr, max_nodes=4, **options | {"check": True})


def test_attention_takes_it_where_kernels_serve_and_flows_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(iteration, "usable", lambda x: True)
    assert isinstance(fused_iteration("proximal", torch.zeros(1)), FusedProximal)
    assert fused_iteration("exact", torch.zeros(1)) == "exact"
    ends = Proximal(tolerance=1e-3)
    assert fused_iteration(ends, torch.zeros(1)) is ends

    class FromNothing(Proximal):
        def first(self, resistance, mask):
            return torch.zeros_like(resistance)

    own = FromNothing()
    assert fused_iteration(own, torch.zeros(1)) is own

    q, k, v, qf, kf = torch.randn(5, 5, 1, 4, dtype=torch.float64).to(DEVICE)
    ptr = torch.tensor([0, 2, 5], device=DEVICE)
    options = {"lam": 0.1, "alpha": 0.1, "solver": "proximal"}
    q.requires_grad_()
    fused = sfi_attention(q, k, v, qf, kf, ptr, **options)
    plain, _ = sfi_attention(q, k, v, qf, kf, ptr, return_flows=True, **options)
    torch.testing.assert_close(fused, plain)
    of_fused, of_plain = (torch.autograd.grad((x * x).sum(), q, create_graph=True)[0] for x in (fused, plain))
    torch.testing.assert_close(of_fused, of_plain)
    torch.autograd.grad(of_plain.sum(), q)
    with pytest.raises(NotImplementedError, match="return_flows"):
        torch.autograd.grad(of_fused.sum(), q)
