"""Attention on packed graphs is attention graph by graph."""

import math
from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck

from packing import RAGGED, attend, offsets, one_by_one, packed
from sfiformer import dfi_attention, sfi_attention
from sfiformer.attention import kept_flows
from sfiformer.attention.chunks import Order, chunks, laid_out

CASES = [
    {"lam": 0.1},
    {"lam": 0.1, "alpha": math.inf},
    {"lam": 0.0, "alpha": 0.3},
    {"lam": 0.7, "scaling": "potential"},
    {"lam": 0.2, "scale": 0.7},
]


@pytest.mark.parametrize("arguments", CASES)
def test_packed_equals_graph_by_graph(arguments):
    inputs = packed().leaves()
    out, expected = attend(inputs, **arguments), one_by_one(inputs, **arguments)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    weight = torch.randn_like(out)
    got, true = (torch.autograd.grad((x * weight).sum(), inputs[:5]) for x in (out, expected))
    torch.testing.assert_close(got, true, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("scaling", ["absolute", "potential"])
def test_one_lam_for_each_graph_and_its_gradient(scaling):
    inputs = packed()
    lam = torch.rand(len(RAGGED), dtype=torch.float64, requires_grad=True)
    out = attend(inputs, lam=lam, scaling=scaling)
    expected = one_by_one(inputs, lam, scaling=scaling)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    got, true = (torch.autograd.grad((x * weight).sum(), lam)[0] for x in (out, expected))
    torch.testing.assert_close(got, true)
    assert float(got[1]) == 0  # a graph without nodes
    shared = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    out = attend(inputs, lam=shared, scaling=scaling)
    torch.testing.assert_close(out, attend(inputs, lam=0.2, scaling=scaling))
    assert bool(torch.autograd.grad(out.sum(), shared)[0] != 0)


@pytest.mark.parametrize("width", [32, 40, 68, 235])
def test_any_width(width):
    inputs = packed((7, 3, 12), heads=4, width=width, dtype=torch.float32).leaves()
    out = attend(inputs, lam=0.1)
    exact = packed((7, 3, 12), heads=4, width=width).to(torch.float32).to(torch.float64).leaves()
    expected = one_by_one(exact, 0.1)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), inputs[:5])
    true = torch.autograd.grad((expected * weight).sum(), exact[:5])
    for x, y in zip(got, true, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-4, rtol=1e-3)


def test_values_of_another_width():
    inputs = packed((4, 6), value_width=3)
    out = attend(inputs, lam=0.1)
    assert out.shape == (10, 2, 3)
    torch.testing.assert_close(out, one_by_one(inputs, 0.1))


@pytest.mark.parametrize("arguments", CASES)
def test_a_graph_does_not_feel_its_batch_mates(arguments):
    inputs = packed(RAGGED + RAGGED[:3])
    out = attend(inputs, **arguments)
    for place in range(len(RAGGED) + 3):
        alone = attend(inputs.graph(place), **arguments)
        start, end = inputs.ptr[place], inputs.ptr[place + 1]
        torch.testing.assert_close(out[start:end], alone, atol=1e-13, rtol=1e-12)
    mates = packed((9, 4, 9), seed=1, spread=30.0)
    other = [torch.cat([x[:9], y[9:]]) for x, y in zip(packed((9, 4, 9))[:5], mates[:5], strict=True)]
    first = sfi_attention(*other, mates.ptr, **arguments)[:9]
    torch.testing.assert_close(first, attend(packed((9, 4, 9)).graph(0), **arguments), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("arguments", CASES)
def test_permuted_nodes_give_permuted_outputs(arguments):
    inputs = packed((6, 9))
    order = torch.cat([torch.randperm(6), 6 + torch.randperm(9)])
    permuted = inputs._replace(**{name: x[order] for name, x in list(inputs._asdict().items())[:5]})
    torch.testing.assert_close(attend(permuted, **arguments), attend(inputs, **arguments)[order])


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (1,), (0, 1, 0), (1, 1, 1)])
@pytest.mark.parametrize("solver", ["exact", "proximal"])
def test_empty_and_one_node_graphs(sizes, solver):
    inputs = packed(sizes).leaves()
    out = attend(inputs, lam=0.03, alpha=0.1, solver=solver)
    assert out.shape == inputs.v.shape
    if solver == "exact":
        torch.testing.assert_close(out, inputs.v * (0.1 - 0.03) / 1.1)
        hard = attend(inputs, lam=0.03, alpha=math.inf)
        torch.testing.assert_close(hard, inputs.v)
    out.sum().backward()
    assert all(x.grad is None or bool(x.grad.isfinite().all()) for x in inputs[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "strengths",
    [
        {"lam": 1e300, "alpha": math.inf},
        {"lam": 1e300, "alpha": 0.1},
        {"lam": 1e40, "scaling": "potential"},
        {"lam": 0.05, "alpha": 5e-324},
        {"lam": 0.0, "alpha": 1e-40},
        {"lam": 0.05, "alpha": 1e300},
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_strengths_beyond_float32(strengths, dtype):
    inputs = packed((4, 1, 6), dtype=dtype).leaves()
    out = attend(inputs, **strengths)
    expected, _ = attend(inputs, return_flows=True, **strengths)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs[:5]))


def test_no_flow_pays():
    inputs = packed((4, 6)).leaves()
    out = attend(inputs, lam=100.0, alpha=1e-4)
    assert not out.any()
    for gradient in torch.autograd.grad(out.sum(), inputs[:5]):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_flow_pays_where_scores_range_beyond_the_type(dtype):
    """All that is left of a row is its leak, and that is too small for a number."""
    q = torch.tensor([[[800.0]], [[800.0]]], dtype=dtype, requires_grad=True)
    k = torch.tensor([[[1.0]], [[-1.0]]], dtype=dtype)
    u = torch.zeros(2, 1, 1, dtype=dtype, requires_grad=True)
    lam = torch.tensor([0.5], dtype=dtype, requires_grad=True)
    out = sfi_attention(q, k, torch.ones_like(k), u, u, offsets([2]), lam=lam, alpha=0.1, scale=1.0)
    assert not out.any()
    for gradient in torch.autograd.grad(out.sum(), (q, u, lam)):
        assert not gradient.any()


def test_softmax_as_a_limit():
    inputs = packed()
    dense = dfi_attention(inputs.q, inputs.k, inputs.v, inputs.ptr)
    torch.testing.assert_close(attend(inputs, lam=0.0, alpha=math.inf), dense)
    uniform = inputs._replace(q_friction=torch.zeros_like(inputs.q))
    torch.testing.assert_close(attend(uniform, lam=3.0, alpha=math.inf), dense)
    torch.testing.assert_close(attend(uniform, lam=3.0, scaling="potential"), dense)


def test_hard_constraint_sums_to_one():
    inputs = packed((5, 8), value_width=1)._replace(v=torch.ones(13, 2, 1, dtype=torch.float64))
    for arguments in ({"alpha": math.inf}, {"scaling": "potential"}):
        out = attend(inputs, lam=0.5, **arguments)
        torch.testing.assert_close(out, torch.ones_like(out))


def test_flows_are_returned():
    inputs = packed()
    out, flows = attend(inputs, lam=0.1, return_flows=True)
    torch.testing.assert_close(out, attend(inputs, lam=0.1))
    assert [tuple(z.shape) for z in flows] == [(2, n, n) for n in RAGGED]
    for place, z in enumerate(flows):
        start, end = inputs.ptr[place], inputs.ptr[place + 1]
        torch.testing.assert_close(torch.einsum("hij,jhd->ihd", z, inputs.v[start:end]), out[start:end])
    assert bool(torch.cat([z.flatten() for z in flows]).eq(0).any())


def test_flows_before_dropout():
    inputs = packed()
    _, flows = attend(inputs, lam=0.1, return_flows=True)
    _, with_dropout = attend(inputs, lam=0.1, return_flows=True, dropout_p=0.5)
    torch.testing.assert_close(flows, with_dropout)


@pytest.mark.parametrize("arguments", CASES)
def test_gradcheck(arguments):
    inputs = packed((3, 0, 1, 4), width=3).leaves()
    lam = torch.full((4,), arguments["lam"] + 0.05, dtype=torch.float64, requires_grad=True)
    rest = {name: value for name, value in arguments.items() if name != "lam"}
    assert gradcheck(lambda *x: sfi_attention(*x[:5], inputs.ptr, lam=x[5], **rest), (*inputs[:5], lam))


def test_second_derivatives_are_right_or_refused():
    inputs = packed((4,), heads=1, width=3).leaves()

    def slope(out):
        (first,) = torch.autograd.grad((out**2).sum(), inputs.q, create_graph=True)
        return torch.autograd.grad((first**2).sum(), inputs.k)[0]

    expected = slope(one_by_one(inputs, 0.1))
    out = attend(inputs, lam=0.1)
    try:
        got = slope(out)
    except RuntimeError:
        return
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("needs", range(5))
def test_gradient_of_one_input_alone(needs):
    inputs = packed((4, 6))
    expected = packed((4, 6)).leaves()
    inputs[needs].requires_grad_()
    attend(inputs, lam=0.1).square().sum().backward()
    attend(expected, lam=0.1).square().sum().backward()
    torch.testing.assert_close(inputs[needs].grad, expected[needs].grad)


def test_strided_inputs():
    """Views of one projection, as a layer makes them."""
    wide = torch.randn(10, 2, 5 * 8, dtype=torch.float64)
    views = wide.split(8, dim=-1)
    ptr = offsets((4, 6))
    out = sfi_attention(*views, ptr, lam=0.1)
    torch.testing.assert_close(out, sfi_attention(*(x.contiguous() for x in views), ptr, lam=0.1))


@pytest.mark.parametrize(
    ("laid", "copied"),
    [
        (lambda x: x, False),
        (lambda x: torch.stack([x, x], dim=1)[:, 1], False),  # one of several parts side by side
        (lambda x: x[:, :1], False),
        (lambda x: x[::2], False),
        (lambda x: x.sum().expand(x.shape), False),
        (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), True),  # heads first
        (lambda x: x[..., ::2], False),
    ],
)
def test_what_is_gathered_span_by_span_is_copied_whole_once_at_most(laid, copied):
    x = laid(torch.randn(6, 2, 4))
    (found,) = laid_out(x)
    assert (found is not x) == copied
    order, every = Order.of(list(chunks(offsets([len(x)]), x.shape[1])), x.shape[1], x.device), x.shape[2]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gathered = order.gather(found)
    assert torch.equal(gathered, x.transpose(0, 1).reshape(-1, every))
    assert not {"aten::clone", "aten::contiguous"} & {event.key for event in profile.key_averages()}


def test_max_nodes_changes_nothing():
    inputs = packed()
    assert torch.equal(attend(inputs, lam=0.1, max_nodes=13), attend(inputs, lam=0.1))


def test_repeats_bitwise():
    results = []
    for _ in range(2):
        inputs = packed(dtype=torch.float32).leaves()
        out = attend(inputs, lam=0.1, deterministic=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs[:5])))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_proximal_equals_graph_by_graph_and_tends_to_the_exact():
    from sfiformer.flow import Proximal

    inputs = packed((5, 1, 0, 7))
    solver = Proximal(iterations=1500, start="constant")
    out = attend(inputs, lam=0.05, alpha=0.3, solver=solver)
    torch.testing.assert_close(out, attend(inputs, lam=0.05, alpha=0.3), atol=1e-6, rtol=0)
    few = attend(inputs, lam=0.05, alpha=0.3, solver="proximal")
    for place in (0, 1, 3):
        alone = attend(inputs.graph(place), lam=0.05, alpha=0.3, solver="proximal")
        torch.testing.assert_close(few[inputs.ptr[place] : inputs.ptr[place + 1]], alone)


@pytest.mark.parametrize("ratio", [0.0, 1.0, 1.5, 100.0])
def test_graphs_iterated_side_by_side_are_as_if_alone(ratio, monkeypatch):
    monkeypatch.setitem(kept_flows.RATIOS, "cpu", ratio)
    inputs = packed((5, 1, 0, 7, 5, 6, 12, 8)).leaves()
    lam = torch.rand(8, dtype=torch.float64, requires_grad=True)
    out, flows = attend(inputs, lam=lam, alpha=0.3, solver="proximal", return_flows=True)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), (*inputs[:5], lam))
    for place, (start, end) in enumerate(pairwise(inputs.ptr.tolist())):
        own = inputs.graph(place).leaves()
        own_lam = lam[place].detach().requires_grad_()
        alone, its_flows = attend(own, lam=own_lam, alpha=0.3, solver="proximal", return_flows=True)
        torch.testing.assert_close(out[start:end], alone, atol=1e-13, rtol=1e-11)
        torch.testing.assert_close(flows[place], its_flows[0], atol=1e-13, rtol=1e-11)
        if start < end:
            loss = (alone * weight[start:end]).sum()
            expected = torch.autograd.grad(loss, (*own[:5], own_lam))
            for all_graphs, one in zip(grads[:5], expected, strict=False):
                torch.testing.assert_close(all_graphs[start:end], one, atol=1e-11, rtol=1e-9)
            torch.testing.assert_close(grads[5][place], expected[5], atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("arguments", [{"alpha": 0.1}, {"alpha": math.inf}, {"scaling": "potential"}])
def test_lam_has_a_gradient_at_zero(arguments):
    inputs = packed((5, 1, 7))
    lam = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    out = attend(inputs, lam=lam, **arguments)
    weight = torch.randn_like(out)
    (got,) = torch.autograd.grad((out * weight).sum(), lam)
    step = 1e-7
    for graph in range(3):
        moved = torch.zeros(3, dtype=torch.float64)
        moved[graph] = step
        slope = ((attend(inputs, lam=moved, **arguments) - out) * weight).sum() / step
        assert float(got[graph]) == pytest.approx(slope.item(), abs=1e-5)
