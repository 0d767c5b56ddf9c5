"""All graphs of a batch at once, by their sizes: as one by one, whatever the sizes, and without waiting for a device.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sfiformer.attention import functional, iteration, sfi_attention, side_by_side
from sfiformer.attention.iteration import FusedProximal
from sfiformer.attention.kept_flows import Settings, attention_and_flows
from sfiformer.attention.side_by_side import blocks_of
from sfiformer.flow import Proximal

pytest.importorskip("triton", reason="the kernels need Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    monkeypatch.setattr(iteration, "usable", lambda x: True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("worth", [side_by_side.WORTH, 0])
def test_all_graphs_at_once_are_the_graphs_one_by_one(monkeypatch, dropout, worth):
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
    options = {"lam": 0.1, "alpha": 0.1, "solver": "proximal", "dropout_p": 0.5, "check": False}
    with FakeTensorMode():
        inputs = [torch.randn(9, 2, 8, requires_grad=True) for _ in range(5)]
        ptr = torch.empty(4, dtype=torch.int64)
        out = sfi_attention(*inputs, ptr, max_nodes=5, **options)
        assert all(x.shape == (9, 2, 8) for x in (out, *torch.autograd.grad(out.sum(), inputs)))
        with pytest.raises(DataDependentOutputException):
            sfi_attention(*inputs, ptr, **options)


def test_scores_are_looked_at_and_a_size_too_small_reads_nothing_that_is_not_there(monkeypatch):
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


@pytest.mark.parametrize("ptr", [[2, 6, 9], [2, 3, 9]])
def test_nodes_before_the_first_graph_are_of_none(ptr):
    """(Values of offsets are not looked at on a GPU.)"""
    inputs, ptr = torch.randn(5, 9, 2, 3, dtype=torch.float64).to(DEVICE), torch.tensor(ptr, device=DEVICE)
    options = {"lam": 0.1, "alpha": 0.5, "solver": Proximal(3), "max_nodes": 6, "check": False}
    out = sfi_attention(*inputs, ptr, **options)
    assert not out[:2].any()
    torch.testing.assert_close(out[2:], sfi_attention(*inputs[:, 2:], ptr - 2, **options))


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_nothing_is_read_that_was_not_written(monkeypatch, steps, learning):
    """Graphs without nodes, padding, first and last steps: with NaN in all memory that is not initialised."""
    like, new = torch.empty_like, torch.Tensor.new_empty

    def spoilt(x):
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: spoilt(like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: spoilt(new(*a, **k)))
    monkeypatch.setattr(side_by_side, "WORTH", 0)
    ptr, found = torch.tensor([0, 0, 2, 2, 6, 7, 8, 12], device=DEVICE), []
    packed = torch.randn(5, 12, 3, 3, dtype=torch.float64).to(DEVICE)
    for at_once in (True, False):
        inputs = [x.clone().requires_grad_(learning) for x in packed]
        lam = torch.linspace(0.05, 0.7, 7, dtype=torch.float64, device=DEVICE).requires_grad_(learning)
        if at_once:
            options = {"lam": lam, "alpha": 0.5, "solver": Proximal(steps), "check": False}
            out = sfi_attention(*inputs, ptr, max_nodes=4, **options)
        else:
            options = Settings(0.5, "absolute", 3**-0.5, 0.0, Proximal(steps), False)
            out, _ = attention_and_flows(tuple(inputs), ptr, lam, options)
        found.append([out])
        if learning:
            found[-1] += torch.autograd.grad((out * out).sum() + out[:, 0].sum(), [*inputs, lam])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_sizes_on_both_sides_of_powers_of_two(size):
    ptr = torch.tensor([0, size, size, 2 * size, 2 * size + 1], device=DEVICE)
    inputs = torch.randn(5, 2 * size + 1, 2, 3, dtype=torch.float64).to(DEVICE)
    options = {"lam": 0.1, "alpha": 0.5, "solver": Proximal(3), "check": False}
    plain, _ = sfi_attention(*inputs, ptr, return_flows=True, **options)
    at_once = sfi_attention(*inputs, ptr, max_nodes=size, **options)
    torch.testing.assert_close(at_once, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype):
    """As of the same numbers in float64."""
    ptr, packed = torch.tensor([0, 5, 12], device=DEVICE), torch.randn(5, 12, 2, 8, device=DEVICE).to(dtype)
    options = {"lam": 0.1, "alpha": 0.5, "solver": Proximal(3), "max_nodes": 7, "check": False}
    found = []
    for wanted in (dtype, torch.float64):
        inputs = [x.to(wanted).requires_grad_() for x in packed]
        out = sfi_attention(*inputs, ptr, **options)
        found.append([out, *torch.autograd.grad(out.sum(), inputs)])
    assert torch.get_float32_matmul_precision() == "highest"
    for left, right in zip(*found, strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(left.double(), right, rtol=5e-2, atol=2e-2)


class _NoHost(TorchDispatchMode):
    """Whatever takes part that does not lie where all else does is an error: it would be a copy from the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, made)):
            assert not isinstance(x, torch.Tensor) or x.device.type == "meta", function
        return made


def test_nothing_comes_from_the_host(monkeypatch):
    """A copy to the device cannot be captured. (Fake tensors do not tell it from others.)"""
    monkeypatch.setattr(torch, "autocast", lambda *a, **k: nullcontext())  # there is none of that device
    monkeypatch.setattr(side_by_side, "WORTH", 0)
    ptr = torch.empty(13, dtype=torch.int64, device="meta")
    options = {"alpha": 0.5, "solver": Proximal(3), "max_nodes": 5, "dropout_p": 0.5, "check": False}
    for lam in (0.1, torch.empty(12, device="meta", requires_grad=True)):
        inputs = [torch.empty(19, 2, 8, device="meta", requires_grad=True) for _ in range(5)]
        with _NoHost():
            sfi_attention(*inputs, ptr, lam=lam, **options).sum().backward()
