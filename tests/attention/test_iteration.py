"""The paper's iteration by kernels is the plain one, and so are its derivatives.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on small matrices).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sfiformer.attention import functional, iteration, sfi_attention, side_by_side
from sfiformer.attention.iteration import FusedProximal, fused_iteration
from sfiformer.attention.kept_flows import Settings, attention_and_flows
from sfiformer.attention.side_by_side import blocks_of
from sfiformer.flow import Proximal, flows_from_scores

pytest.importorskip("triton", reason="the kernels need Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (4, 3, 0)  # of matrices side by side


SCALE, ALPHA = 3**-0.5, 0.1


def _problem(dtype=torch.float64, lam=(0.2, 0.05, 0.1), size=4):
    """Scores of two heads, λ and sizes of graphs side by side."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(SIZES), 2, size, size)
    s, u = (torch.randn(shape, generator=generator, dtype=dtype) / SCALE for _ in range(2))
    return [x.to(DEVICE) for x in (s, u, torch.tensor(lam, dtype=dtype), torch.tensor(SIZES))]


def _fused(s, u, lam, sizes, **settings):
    return FusedProximal(**settings).of_scores(s, u, lam, sizes, alpha=ALPHA, scale=SCALE)


def _plain(s, u, lam, sizes, **settings):
    real = torch.arange(s.shape[-1], device=s.device) < sizes.unsqueeze(1)
    mask = (real.unsqueeze(1) & real.unsqueeze(2)).unsqueeze(1).expand_as(s)
    options = {"lam": lam.view(-1, 1, 1), "alpha": ALPHA, "mask": mask, "solver": Proximal(**settings)}
    return flows_from_scores(s * SCALE, u * SCALE, **options)


def _both(problem, rtol, atol, **settings):
    """Flows and gradients by kernels and without, which are alike; those by kernels."""
    found = []
    for solve in (_fused, _plain):
        *parts, sizes = problem
        parts = [x.clone().requires_grad_() for x in parts]
        z = solve(*parts, sizes, **settings)
        weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype, device=z.device).view_as(z)
        found.append([z, *torch.autograd.grad((z * weights).sum() + (z * z).sum(), parts)])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)
    assert torch.equal(found[0][0] == 0, found[1][0] == 0)
    return found[0]


@pytest.mark.parametrize("iterations", [1, 2, 3, 10])
@pytest.mark.parametrize("start", ["uniform", "constant", "softmax"])
def test_flows_and_derivatives_are_those_of_the_plain_iteration(iterations, start):
    _both(_problem(), 1e-9, 1e-12, iterations=iterations, start=start, seed=3 + 2**40)


def test_padding_is_not_looked_at():
    """Whatever stands there, the flows are the same and the gradients there 0."""
    s, u, lam, sizes = _problem(size=5)
    given = [x.clone().requires_grad_() for x in (s, u)]
    z = _fused(*given, lam, sizes, iterations=3)
    gradients = torch.autograd.grad((z * z).sum(), given)
    for graph, size in enumerate(SIZES):
        for x in (s, u):
            x[graph, :, size:], x[graph, :, :, size:] = torch.nan, torch.inf
    given = [x.clone().requires_grad_() for x in (s, u)]
    again = _fused(*given, lam, sizes, iterations=3)
    assert torch.equal(again, z)
    for left, right in zip(torch.autograd.grad((again * again).sum(), given), gradients, strict=True):
        assert torch.equal(left, right)
    for graph, size in enumerate(SIZES):
        assert not z[graph, :, size:].any()
        assert not z[graph, :, :, size:].any()


@pytest.mark.parametrize("iterations", [1, 4, 5])
def test_without_a_derivative_only_two_steps_are_kept(iterations, monkeypatch):
    from sfiformer.attention.kernels import iteration as kernels

    kept, made = [], kernels.iterate

    def iterate(*given):
        found = made(*given)
        kept.append(len(found[3]))
        return found

    monkeypatch.setattr(kernels, "iterate", iterate)
    s, *rest = _problem()
    learning = _fused(s.clone().requires_grad_(), *rest, iterations=iterations)
    with torch.no_grad():
        quiet = _fused(s.clone().requires_grad_(), *rest, iterations=iterations)
    assert torch.equal(_fused(s, *rest, iterations=iterations), learning)
    assert torch.equal(quiet, learning)
    assert kept == [iterations, min(iterations, 2), min(iterations, 2)]


@pytest.mark.parametrize("lam", [0.0, 1e3])
def test_where_nothing_moves_the_length_is_kept(lam):
    """With friction this strong all flows vanish in the first step, and no step length can be made of the second."""
    z, *_ = _both(_problem(lam=(lam,) * 3), 1e-9, 1e-12, iterations=6)
    assert (lam == 0) == bool(z.any())


def test_in_single_precision():
    _both(_problem(torch.float32), 1e-3, 1e-4)


def test_a_learnt_penalty_is_the_plain_iterations(monkeypatch):
    monkeypatch.setattr(iteration, "usable", lambda x: True)
    inputs = torch.randn(5, 5, 1, 4, dtype=torch.float64).to(DEVICE)
    ptr = torch.tensor([0, 2, 5], device=DEVICE)
    found = []
    for asked in (False, True):
        alpha = torch.tensor(ALPHA, dtype=torch.float64, device=DEVICE, requires_grad=True)
        options = {"lam": 0.1, "alpha": alpha, "solver": Proximal(3), "check": False, "return_flows": asked}
        out = sfi_attention(*inputs, ptr, max_nodes=3, **options)
        found.append(torch.autograd.grad((out[0] if asked else out).square().sum(), alpha)[0])
    assert found[0] != 0
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("worth", [side_by_side.WORTH, 0])
def test_all_graphs_at_once_are_the_graphs_one_by_one(monkeypatch, dropout, worth):
    monkeypatch.setattr(iteration, "usable", lambda x: True)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda z, p: z * p)
    monkeypatch.setattr(side_by_side, "WORTH", worth)
    blocks = []
    made = side_by_side.attention_side_by_side
    monkeypatch.setattr(
        functional, "attention_side_by_side", lambda *given: blocks.append(given[-1]) or made(*given)
    )
    torch.manual_seed(0)
    packed = torch.randn(5, 19, 2, 3, dtype=torch.float64).to(DEVICE)
    sizes = torch.tensor([0, 2, 0, 4, 1, 1, 1, 4, 1, 1, 0, 1, 1], device=DEVICE)
    ptr = sizes.cumsum(0)  # two nodes of no graph
    found = []
    for at_once in (True, False):
        inputs = [x.clone().requires_grad_() for x in packed]
        lam = torch.linspace(0.1, 0.7, 12, dtype=torch.float64, device=DEVICE).requires_grad_()
        if at_once:
            options = {"lam": lam, "alpha": 0.5, "solver": Proximal(5), "dropout_p": dropout, "check": False}
            out = sfi_attention(*inputs, ptr, max_nodes=4, **options)
        else:
            options = Settings(0.5, "absolute", 3**-0.5, dropout, Proximal(5), False)
            out, _ = attention_and_flows(tuple(inputs), ptr, lam, options)
            out = torch.cat([out, out.new_zeros(2, 2, 3)])
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=DEVICE).view_as(out)
        found.append([out, *torch.autograd.grad((out * out * weights).sum(), [*inputs, lam])])
    assert [len(found) for found in blocks] == [1 if worth else 2]
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=80), st.integers(0, 5), st.integers(0, 9))
def test_blocks_hold_all_graphs_whatever_their_sizes(sizes, more, worth):
    """The r-th largest has a place in the block of r, for any sizes that sum to no more than the nodes."""
    nodes = sum(sizes) + more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "WORTH", 10**worth)
        blocks = blocks_of(nodes, len(sizes), max(sizes) + more, 2)
    assert [block.first for block in blocks[1:]] == [block.end for block in blocks[:-1]]
    largest = sorted(sizes, reverse=True)
    for rank, size in enumerate(largest):
        own = [block for block in blocks if block.first <= rank < block.end]
        assert (own[0].size if own else 0) >= size


def test_few_large_graphs_do_not_pad_many_small_ones():
    """A batch of peptides, padded with 190 graphs of 8 nodes: three blocks, of a fifth of what one would be."""
    blocks = blocks_of(4928, 222, 444, 4)
    assert [(block.first, block.end, block.size) for block in blocks] == [
        (0, 22, 444),
        (22, 46, 214),
        (46, 222, 104),
    ]
    assert 5 * sum(block.flows for block in blocks) < 222 * 444**2
    assert blocks_of(4850, 32, 348, 4) == [(0, 32, 348)]  # not worth it


def test_only_what_has_room_is_iterated_at_once():
    q, ptr, ten = torch.empty(4800, 4, 1), torch.zeros(33), FusedProximal(10)
    assert len(side_by_side.side_by_side(q, ptr, ten, 444)) == 1
    hundred = FusedProximal(100)  # keeps ten times as much
    assert not side_by_side.side_by_side(q, ptr, hundred, 444)
    with torch.no_grad():
        assert side_by_side.side_by_side(q, ptr, hundred, 444)
    for nodes, offsets, largest in ((q, ptr, None), (q, ptr, 0), (q, ptr[:1], 444), (q[:0], ptr, 444)):
        assert not side_by_side.side_by_side(nodes, offsets, ten, largest)


def test_nothing_waits_for_the_device_where_the_largest_graph_is_known(monkeypatch):
    """On tensors without values: whatever asks for one is an error."""
    monkeypatch.setattr(iteration, "usable", lambda x: True)
    options = {"lam": 0.1, "alpha": 0.1, "solver": "proximal", "dropout_p": 0.5, "check": False}
    with FakeTensorMode():
        inputs = [torch.randn(9, 2, 8, requires_grad=True) for _ in range(5)]
        ptr = torch.empty(4, dtype=torch.int64)
        out = sfi_attention(*inputs, ptr, max_nodes=5, **options)
        assert all(x.shape == (9, 2, 8) for x in (out, *torch.autograd.grad(out.sum(), inputs)))
        with pytest.raises(DataDependentOutputException):
            sfi_attention(*inputs, ptr, **options)


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
    assert type(fused_iteration(Proximal(0), torch.zeros(1))) is Proximal

    q, k, v, qf, kf = torch.randn(5, 5, 1, 4, dtype=torch.float64).to(DEVICE)
    ptr = torch.tensor([0, 2, 5], device=DEVICE)
    options = {"lam": 0.1, "alpha": 0.1, "solver": "proximal", "check": False}
    q.requires_grad_()
    fused = sfi_attention(q, k, v, qf, kf, ptr, **options)
    plain, _ = sfi_attention(q, k, v, qf, kf, ptr, return_flows=True, **options)
    torch.testing.assert_close(fused, plain)
    of_fused, of_plain = (torch.autograd.grad((x * x).sum(), q, create_graph=True)[0] for x in (fused, plain))
    torch.testing.assert_close(of_fused, of_plain)
    torch.autograd.grad(of_plain.sum(), q)
    with pytest.raises(NotImplementedError, match="return_flows"):
        torch.autograd.grad(of_fused.sum(), q)
