"""Graphs of few nodes, attended to in one call: what spans of the same graphs, and the plain solver, make of them."""

import math

import pytest
import torch

from packing import attend, one_by_one, packed
from sfiformer import dfi_attention
from sfiformer.attention import cpu, few, few_flows

pytestmark = pytest.mark.skipif(not cpu.usable(torch.zeros(1, 1, 1)), reason="no Numba")

SIZES = (5, 1, 65, 0, 64, 7, 90, 2, 7)  # those of 65 and 90 nodes are not for one call
KINDS = [{"scaling": "potential"}, {"alpha": 0.3}, {"alpha": math.inf}]


def strength(kind):
    """At which rows are gentle."""
    return 1.0 if "scaling" in kind else 0.03


@pytest.fixture
def calls(monkeypatch):
    """The numbers of the graphs that calls of `FewFlows.attend` were done with."""
    numbers, call = [], few_flows.FewFlows.attend

    def noting(self, *arguments):
        numbers.append(sorted(call(self, *arguments)))
        return frozenset(numbers[-1])

    monkeypatch.setattr(few_flows.FewFlows, "attend", noting)
    return numbers


def results(inputs, lam, **options):
    inputs, lam = inputs.leaves(), lam.clone().requires_grad_()
    out = attend(inputs, lam=lam, **options)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    return out, *torch.autograd.grad((out.float() * weight).sum(), (*inputs[:5], lam))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 2e-4), (torch.bfloat16, 2e-2)])
def test_is_attention_graph_by_graph(calls, kind, dtype, exact, threads):
    inputs = packed(SIZES, value_width=3, dtype=dtype)
    lam = torch.linspace(0.1, 0.9, len(SIZES), dtype=torch.float64) * strength(kind)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = results(inputs, lam, **kind)
    finally:
        torch.set_num_threads(before)
    assert calls == [[0, 1, 4, 5, 7, 8]]
    true_inputs = inputs._replace(
        **{name: x.double() for name, x in inputs._asdict().items() if name != "ptr"}
    ).leaves()
    true_lam = lam.clone().requires_grad_()
    out = one_by_one(true_inputs, true_lam, **kind)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    true = (out, *torch.autograd.grad((out * weight).sum(), (*true_inputs[:5], true_lam)))
    for x, y in zip(found, true, strict=True):
        assert float((x.double() - y).norm() / y.norm()) < exact


def test_a_graph_whose_rows_need_a_pivot_is_left_to_the_spans(calls, monkeypatch):
    inputs = packed((6, 6, 6, 6), dtype=torch.float32)
    inputs.q[6:12] *= 60
    inputs.q[18:] *= 60
    lam = torch.full((4,), 0.03)
    found = results(inputs, lam, alpha=math.inf)
    assert calls == [[0, 2]]
    monkeypatch.setattr(few, "MOST", 0)
    for x, y in zip(found, results(inputs, lam, alpha=math.inf), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def test_without_friction_a_graph_is_left_to_the_spans(calls):
    lam = torch.tensor([0.5, 0.0, 0.5])
    *_, of_lam = results(packed((4, 4, 4), dtype=torch.float32), lam, scaling="potential")
    assert calls == [[0, 2]]
    assert of_lam[1] != 0


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_a_mask_of_flows_that_keeps_the_mean(calls, kind):
    """Its gradients are those of the same mask."""
    p, size = 0.4, 30
    inputs = packed((size, 4), heads=1, width=4, dtype=torch.float32).leaves()
    of_node = torch.eye(size + 4)[:, None]  # [nodes, 1, nodes]: the output is the flows themselves
    z = one_by_one(inputs._replace(v=of_node), 0.2 * strength(kind), **kind)

    def drop(values):
        torch.manual_seed(3)
        return attend(inputs._replace(v=values), lam=0.2 * strength(kind), dropout_p=p, **kind)

    left, flows = drop(of_node), z > 1e-6
    on = left != 0
    torch.testing.assert_close(left[on], (z / (1 - p))[on], rtol=1e-4, atol=1e-5)
    share = float(on[flows].sum()) / int(flows.sum())
    assert share == pytest.approx(1 - p, abs=4 * (p * (1 - p) / int(flows.sum())) ** 0.5)
    weight = torch.linspace(-1, 1, inputs.v.numel()).view_as(inputs.v)
    of_inputs = inputs.q, inputs.k, inputs.v, inputs.q_friction, inputs.k_friction
    got = torch.autograd.grad((drop(inputs.v) * weight).sum(), of_inputs)
    masked = (z * (on | ~flows) / (1 - p)).squeeze(1) @ inputs.v.squeeze(1)
    true = torch.autograd.grad((masked[:, None] * weight).sum(), of_inputs)
    for found, right in zip(got, true, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)
    assert calls == [[0, 1], [0, 1]]


def test_repeats_to_the_bit_on_any_number_of_threads():
    inputs, lam = packed((9, 20, 4, 31, 12) * 8, dtype=torch.float32), torch.full((40,), 0.4)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4, 4):
            torch.set_num_threads(threads)
            found.append(results(inputs, lam, scaling="potential"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_nodes_of_no_graph_have_nothing():
    inputs = packed((4, 6), dtype=torch.bfloat16).leaves()
    out = attend(inputs._replace(ptr=torch.tensor([0, 4])), lam=0.3, scaling="potential", check=False)
    of_inputs = torch.autograd.grad(out.sum(), inputs[:5])
    assert not any(bool(x[4:].any()) for x in (out, *of_inputs))
    assert bool(out[:4].any())


def test_lam_is_left_as_it_is():
    inputs, lam = packed((3, 5, 4), dtype=torch.float32), torch.full((3,), 0.3)
    q = inputs.q.clone().requires_grad_()
    for one in (lam, torch.tensor(0.3), torch.zeros(3, requires_grad=True).exp()):
        version = one._version
        again = attend(inputs._replace(q=attend(inputs._replace(q=q), lam=one)), lam=one)
        again.sum().backward()
        assert one._version == version
    beyond = torch.tensor([math.inf, 0.3, 0.3])
    attend(inputs, lam=beyond, check=False)
    assert beyond[0] == math.inf


@pytest.mark.parametrize("ptr", [[0, 4, 8, 12, 30], [-4, 3, 8, 12]])
def test_offsets_that_nobody_looked_at_reach_no_other_memory(ptr):
    inputs = packed((12,), dtype=torch.float32)
    with pytest.raises(IndexError):
        attend(inputs._replace(ptr=torch.tensor(ptr)), lam=0.4, scaling="potential", check=False)


def test_few_among_large_ones_are_left_to_the_spans(calls):
    for sizes, expected in (
        ((30,) * 64 + (7,) * 60, [list(range(124))]),
        ((3, 300), []),
        ((3, 20), [[0, 1]]),
    ):
        calls.clear()
        inputs = packed(sizes, width=8, dtype=torch.float32)
        results(inputs, torch.full((len(sizes),), 0.2), scaling="potential")
        assert calls == expected, sizes


def softmax(inputs, **options):
    q, k, v, *_, ptr = inputs.leaves()
    out = dfi_attention(q, k, v, ptr, **options)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    return out, *torch.autograd.grad((out.float() * weight).sum(), (q, k, v))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_dense_attention_likewise(monkeypatch, dtype, exact, dropout_p):
    """What is dropped is no other flow for the number of threads; without dropout it is what spans make of the same."""
    inputs, sizes, before, found = packed(SIZES, value_width=3, dtype=dtype), [], torch.get_num_threads(), []
    loop = few.Few.loop
    monkeypatch.setattr(
        few.Few, "loop", lambda own, *given: sizes.append(len(own.graphs)) or loop(own, *given)
    )
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(5)
            found.append(softmax(inputs, dropout_p=dropout_p))
    finally:
        torch.set_num_threads(before)
    assert sizes == [6, 6] * 2
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    if not dropout_p:
        monkeypatch.setattr(few, "MOST", 0)
        for x, y in zip(found[0], softmax(inputs), strict=True):
            assert float((x.double() - y.double()).norm() / y.double().norm()) < exact
        assert sizes == [6, 6] * 2


def test_on_other_devices_there_are_none():
    ptr, lam, q = (torch.ones(size, device="meta") for size in ((3,), (2,), (9, 1, 4)))
    assert few_flows.FewFlows.of(ptr, lam, q, 0.5, math.inf, True, 0.0, 0) is None
