"""The gated mean over edges, by plain PyTorch and by kernel, against its equations under autograd in float64.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on small graphs; its bfloat16 is wrong).
"""

import pytest
import torch

from sfiformer.attention import EdgeOrder
from sfiformer.nn import gated_sum as plain
from sfiformer.nn.gated_sum import gated_sum

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
on_gpu = pytest.mark.skipif(not GPU, reason="no GPU")
# In-degrees. Sources are random: parallel edges and self-loops are among them.
DEGREES = {"ragged": [0, 3, 1, 0, 9, 2], "one of 300": [2, 300, 0, 1], "no edges": [0, 0], "no nodes": []}


def kernel():
    return pytest.importorskip("sfiformer.nn.kernels.gated", reason="the kernels need Triton")


def make(degrees, width, with_gate, dtype=torch.float32, shuffled=False):
    """Inputs, gradients of the outputs, and edges."""
    generator = torch.Generator().manual_seed(width + sum(degrees))
    nodes, edges = len(degrees), sum(degrees)
    target = torch.repeat_interleave(torch.arange(nodes), torch.tensor(degrees, dtype=torch.long))
    source = torch.randint(max(nodes, 1), (edges,), generator=generator)
    edge_index = torch.stack([source, target])
    if shuffled:
        edge_index = edge_index[:, torch.randperm(edges, generator=generator)]
    shapes = [(nodes, 4 * width), (edges, width), (edges, 1), (nodes, width), (edges, width)]
    tensors = [torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    tensors[2] = tensors[2].sigmoid() if with_gate else None
    return tensors[:3], tensors[3:], edge_index.to(DEVICE)


def by_equations(nodes, edges, pe_gate, edge_index):
    source, target = edge_index
    A, D, B, E = nodes.chunk(4, dim=1)
    e_hat = D[target] + E[source] + edges
    gate = e_hat.sigmoid() * (1 if pe_gate is None else pe_gate)
    flow = torch.zeros_like(A).index_add(0, target, gate * B[source])
    return A + flow / (torch.zeros_like(A).index_add(0, target, gate) + 1e-6), e_hat


def truth(inputs, grads, edge_index):
    """x̂, ê and the gradients of the inputs in float64."""
    wide = [x if x is None else x.double().requires_grad_() for x in inputs]
    out = by_equations(*wide, edge_index)
    given = [x for x in wide if x is not None]
    return [*out, *torch.autograd.grad(out, given, [g.double() for g in grads])]


def by(module, inputs, grads, order):
    """The same from `forward` and `backward` of the plain version or of the kernels."""
    x_hat, e_hat, stats = module.forward(*inputs, order)
    of = module.backward(*grads, inputs[0], inputs[2], e_hat, stats, order)
    return [x_hat, e_hat, *(g for g in of if g is not None)]


def assert_close(results, exact, tolerance=2e-5):
    assert len(results) == len(exact)
    for a, b in zip(results, exact, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize(
    ("width", "degrees"),
    [*((width, "ragged") for width in (1, 32, 40, 68, 235)), *((12, d) for d in DEGREES)],
)
def test_the_kernels_match(width, degrees, with_gate):
    inputs, grads, edge_index = make(DEGREES[degrees], width, with_gate)
    order = EdgeOrder.of(edge_index, len(DEGREES[degrees]), by_target=True)
    results = by(kernel(), inputs, grads, order)
    assert_close(results, truth(inputs, grads, edge_index))
    assert all(torch.equal(a, b) for a, b in zip(results, by(kernel(), inputs, grads, order), strict=True))


@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("degrees", DEGREES)
def test_the_plain_version_matches(degrees, with_gate):
    inputs, grads, edge_index = make(DEGREES[degrees], 20, with_gate, torch.float64)
    order = EdgeOrder.of(edge_index, len(DEGREES[degrees]), by_target=True)
    assert_close(by(plain, inputs, grads, order), truth(inputs, grads, edge_index), 1e-10)


@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("edges_at_a_time", [1, 2, 7])
def test_many_edges_go_in_blocks_on_a_cpu(monkeypatch, edges_at_a_time, with_gate):
    degrees = [0, 3, 1, 0, 9, 2] * 6 + [50, 0]
    inputs, grads, edge_index = (
        [x if x is None else x.cpu() for x in some] for some in make(degrees, 20, with_gate, torch.float64)
    )
    edge_index = torch.stack(edge_index)
    order = EdgeOrder.of(edge_index, len(degrees), by_target=True)
    monkeypatch.setattr(plain, "_BLOCK", 20 * edges_at_a_time)
    assert len(list(plain._blocks(order, inputs[1]))) > 7
    assert_close(by(plain, inputs, grads, order), truth(inputs, grads, edge_index), 1e-10)


@pytest.mark.parametrize("version", ["plain", "kernel"])
def test_edges_in_any_order(version):
    module = plain if version == "plain" else kernel()
    inputs, grads, edge_index = make(DEGREES["ragged"], 20, True, shuffled=True)
    order = EdgeOrder.of(edge_index, 6)
    assert_close(by(module, inputs, grads, order), truth(inputs, grads, edge_index))


@pytest.mark.parametrize("version", ["plain", "kernel"])
def test_tensors_that_are_not_contiguous(version):
    module = plain if version == "plain" else kernel()
    inputs, grads, edge_index = make(DEGREES["ragged"], 20, True)
    order, exact = EdgeOrder.of(edge_index, 6), truth(inputs, grads, edge_index)
    inputs, grads = ([torch.cat([x, x], dim=1)[:, : x.size(1)] for x in some] for some in (inputs, grads))
    assert_close(by(module, inputs, grads, order), exact)


@pytest.mark.parametrize("version", ["plain", "kernel"])
def test_edges_that_nothing_reads(version):
    module = plain if version == "plain" else kernel()
    inputs, (of_x_hat, of_e_hat), edge_index = make(DEGREES["ragged"], 12, True)
    order = EdgeOrder.of(edge_index, 6)
    exact = truth(inputs, [of_x_hat, torch.zeros_like(of_e_hat)], edge_index)
    assert_close(by(module, inputs, [of_x_hat, None], order), exact)


@pytest.mark.parametrize("with_gate", [False, True])
def test_gradcheck(with_gate):
    inputs, _, edge_index = make(DEGREES["ragged"], 3, with_gate, torch.float64)
    order = EdgeOrder.of(edge_index, 6)
    given = [x.requires_grad_() for x in inputs if x is not None]

    def op(nodes, edges, pe_gate=None):
        return gated_sum(nodes, edges, pe_gate, order)

    assert torch.autograd.gradcheck(op, given)
    assert torch.autograd.gradcheck(lambda *x: op(*x)[0], given)  # ê without a gradient
    assert torch.autograd.gradcheck(lambda *x: op(*x)[1], given)  # x̂ without one


def test_the_operator_is_sound():
    inputs, _, edge_index = make(DEGREES["ragged"], 5, True)
    order = EdgeOrder.of(edge_index, 6)
    given = [x.requires_grad_() for x in inputs]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(plain._gated_sum.plain, (*given, *order), test_utils=checks)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 68, 235])
def test_many_edges(width, dtype):
    degrees = torch.randint(80, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    inputs, grads, edge_index = make(degrees, width, True, dtype)
    order = EdgeOrder.of(edge_index, 700)
    exact = truth(inputs, grads, edge_index)
    results, twin = (by(module, inputs, grads, order) for module in (kernel(), plain))
    for a, b, c in zip(results, twin, exact, strict=True):
        error, allowed = ((x.double() - c).norm() / c.norm() for x in (a, b))
        assert error <= 3 * allowed + 1e-6


@on_gpu
def test_in_a_cuda_graph():
    inputs, grads, edge_index = make([5, 0, 40, 3] * 50, 40, True)

    def step():
        order = EdgeOrder.of(edge_index, 200)
        given = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(gated_sum(*given, order), given, grads)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
