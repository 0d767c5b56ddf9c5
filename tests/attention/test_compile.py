"""torch.compile without graph breaks, and the contract of the custom operator."""

import shutil

import pytest
import torch

from packing import offsets, packed
from sfiformer import SFiAttention, dfi_attention, sfi_attention


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_function():
    compiled = torch.compile(lambda *x: sfi_attention(*x, lam=0.1), fullgraph=True, backend="aot_eager")
    inputs = packed(dtype=torch.float32).leaves()
    expected = sfi_attention(*inputs, lam=0.1)
    out = compiled(*inputs)
    torch.testing.assert_close(out, expected)
    got, true = (torch.autograd.grad(x.square().sum(), inputs[:5]) for x in (out, expected))
    torch.testing.assert_close(got, true)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "arguments", [{"alpha": 0.3, "max_nodes": 13}, {"scaling": "potential"}, {"scale": 0.5}]
)
def test_function_over_batches_of_other_sizes(arguments, dynamic):
    def attention(*inputs):
        return sfi_attention(*inputs[:6], lam=inputs[6], **arguments)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sizes in ((5, 0, 1, 9), (4, 4), (13,), (3, 3)):
        inputs = packed(sizes)
        lam = torch.rand(len(sizes), dtype=torch.float64)
        torch.testing.assert_close(compiled(*inputs, lam), attention(*inputs, lam))


def test_function_with_another_alpha_each_time():
    compiled = torch.compile(
        lambda alpha, *x: sfi_attention(*x, lam=0.1, alpha=alpha), fullgraph=True, backend="aot_eager"
    )
    inputs = packed()
    for alpha in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(alpha, *inputs), sfi_attention(*inputs, lam=0.1, alpha=alpha))


def test_dropout():
    inputs = packed((20, 20), dtype=torch.float32)
    compiled = torch.compile(
        lambda *x: sfi_attention(*x, lam=0.02, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    first, second = compiled(*inputs), compiled(*inputs)
    assert bool(first.isfinite().all())
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dense_attention_over_batches_of_other_sizes(dtype):
    compiled = torch.compile(dfi_attention, fullgraph=True, backend="aot_eager")
    for sizes in ((5, 0, 1, 9), (4, 4), (13,), (3, 3)):
        q, k, v, *_, ptr = packed(sizes, value_width=5, dtype=dtype).leaves()
        out, expected = (attention(q, k, v, ptr) for attention in (compiled, dfi_attention))
        torch.testing.assert_close(out, expected)
        got, true = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
        torch.testing.assert_close(got, true)


def test_dense_attention_of_one_large_graph_comes_in_blocks_of_rows(monkeypatch):
    inputs = packed((7, 3, 7), dtype=torch.float64).leaves()
    q, k, v, *_, ptr = inputs
    expected = dfi_attention(q, k, v, ptr)
    monkeypatch.setattr("sfiformer.attention.chunks.CHUNK_SIZE", 40)
    out = torch.compile(dfi_attention, fullgraph=True, backend="aot_eager")(q, k, v, ptr)
    torch.testing.assert_close(out, expected)
    got, true = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(got, true)


def test_dropout_of_dense_attention():
    """The same seed, the same mask: compiled or not, forward and backward."""
    q, k, v, *_, ptr = packed((20, 20, 3)).leaves()

    def attend(q, k, v):
        return dfi_attention(q, k, v, ptr, dropout_p=0.5)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = []
    for attention in (attend, compiled):
        torch.manual_seed(1)
        out = attention(q, k, v)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    torch.testing.assert_close(*found)
    assert not torch.equal(compiled(q, k, v), out)


def test_dense_attention_still_looks():
    q, k, v, *_ = packed((5, 4))
    compiled = torch.compile(dfi_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="ptr must end at the number of nodes, 9, got 8"):
        compiled(q, k, v, torch.tensor([0, 5, 8]))


@pytest.mark.parametrize("arguments", [{}, {"friction": "tied"}, {"lam_scaling": "graph"}, {"mode": "dfi"}])
def test_layer(arguments):
    _compare_layer("aot_eager", arguments)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize("sizes", [(8, 0, 1, 11), (1,)])
def test_layer_by_inductor(sizes):
    _compare_layer("inductor", {}, sizes)


def _compare_layer(backend, arguments, sizes=(8, 0, 1, 11)):
    torch.manual_seed(0)
    layer, nodes = SFiAttention(16, 2, **arguments), sum(sizes)
    x = torch.randn(nodes, 16, requires_grad=True)
    edge_index = torch.randint(nodes, (2, 50))
    ptr = offsets(sizes)
    expected = layer(x, edge_index, ptr)
    out = torch.compile(layer, fullgraph=True, backend=backend)(x, edge_index, ptr)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    parameters = [x, *layer.parameters()]
    got, true = (
        torch.autograd.grad(y.square().sum(), parameters, allow_unused=True) for y in (out, expected)
    )
    torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("arguments", [{}, {"lam_scaling": "graph"}, {"mode": "dfi"}, {"attention": False}])
def test_export_for_batches_of_all_sizes(arguments):
    torch.manual_seed(0)
    layer = SFiAttention(16, 2, **arguments).eval()

    def batch(*sizes):
        return torch.randn(sum(sizes), 16), torch.randint(sum(sizes), (2, 3 * sum(sizes))), offsets(sizes)

    open_size = torch.export.Dim.DYNAMIC
    dynamic = ({0: open_size}, {1: open_size}, {0: open_size})
    exported = torch.export.export(layer, batch(8, 0, 1, 11), dynamic_shapes=dynamic).module()
    for sizes in ((8, 0, 1, 11), (4, 5), (2, 300)):
        inputs = batch(*sizes)
        torch.testing.assert_close(exported(*inputs), layer(*inputs))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("potential", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator(dtype, potential, dropout_p):
    inputs = packed((3, 0, 1, 4), width=4, value_width=3, dtype=dtype).leaves()
    lam = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(11)
    arguments = (*inputs, lam, seed, 0.1, potential, 0.5, dropout_p, None, True)
    torch.library.opcheck(torch.ops.sfiformer.packed_attention.default, arguments)


@pytest.mark.parametrize("name", ["packed_attention", "dense_attention"])
def test_operators_of_heads_that_lie_apart(name):
    """Whatever the strides of the inputs, the compiler is told those that the outputs have."""
    inputs = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in packed((3, 1, 4))[:5]]
    ptr, seed = offsets((3, 1, 4)), torch.tensor(11)
    lam = torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True)
    arguments = {
        "packed_attention": (*inputs, ptr, lam, seed, 0.1, False, 0.5, 0.0, None, True),
        "dense_attention": (*inputs[:3], ptr, seed, 0.5, 0.0, None, True),
    }[name]
    torch.library.opcheck(getattr(torch.ops.sfiformer, name).default, arguments)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_operator(dtype, dropout_p):
    q, k, v, *_, ptr = packed((3, 0, 1, 4), width=4, value_width=3, dtype=dtype).leaves()
    arguments = (q, k, v, ptr, torch.tensor(11), 0.5, dropout_p, None, True)
    torch.library.opcheck(torch.ops.sfiformer.dense_attention.default, arguments)
