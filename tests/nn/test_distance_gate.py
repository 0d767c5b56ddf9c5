"""The gate by distances, by kernel and by the layers of the MLP, against its equations under autograd in float64.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on few edges; its bfloat16 is wrong).
"""

import math

import pytest
import torch
from torch import nn

from packing import poisoned
from sfiformer.nn import GatedGCN
from sfiformer.nn import distance_gate as operators
from sfiformer.nn.distance_gate import distance_gate

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
on_gpu = pytest.mark.skipif(not GPU, reason="no GPU")
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}
EXTREMES = [0.0, 1e-8, 1e6, 0.0, 3.0]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """So few programs that each walks over several tiles."""
    module = pytest.importorskip("sfiformer.nn.kernels.distance_gate", reason="the kernels need Triton")
    if not GPU:
        monkeypatch.setattr(module, "PIECES", 4)
    return module


@pytest.fixture
def on_the_kernels(monkeypatch):
    monkeypatch.setattr(operators, "usable", lambda x: True)


def make_mlp(width, activation, dtype=torch.float32):
    torch.manual_seed(width)
    layers = nn.Linear(1, width), ACTIVATIONS[activation](), nn.Linear(width, 1), nn.Sigmoid()
    return nn.Sequential(*layers).to(DEVICE, dtype)


def make_distances(edges, dtype=torch.float32):
    """Distances, and gradients of the gate."""
    generator = torch.Generator().manual_seed(edges)
    distance, grad = (torch.randn(edges, 1, generator=generator) for _ in range(2))
    return (3 * distance.square()).to(DEVICE, dtype), grad.to(DEVICE)


def by_equations(distance, v, b, w, c, activation):
    h = v.T * distance + b  # [E, d]
    share = torch.where(h > 0, 1.0, 0.0) if activation == "relu" else (1 + torch.erf(h / math.sqrt(2))) / 2
    return torch.sigmoid((share * h * w).sum(1, keepdim=True) + c)


def results(call, distance, parameters, grad):
    """g, and the gradients of the distance and of the parameters."""
    inputs = [x.detach().requires_grad_() for x in (distance, *parameters)]
    gate = call(*inputs)
    return [gate.detach(), *torch.autograd.grad(gate, inputs, grad.to(gate.dtype))]


def truth(distance, parameters, grad, activation):
    wide = [x.double() for x in (distance, *parameters)]
    return results(lambda *x: by_equations(*x, activation), wide[0], wide[1:], grad.double())


def by_kernel(distance, mlp, grad, activation):
    with poisoned():
        return results(
            lambda *x: operators._distance_gate(*x, activation), distance, list(mlp.parameters()), grad
        )


def assert_close(found, exact, tolerance=2e-5):
    for a, b in zip(found, exact, strict=True):
        assert a.shape == b.shape
        scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 5, 40, 235])
@pytest.mark.parametrize("edges", [0, 1, 7, 1000])
def test_the_kernels_match(edges, width, activation):
    mlp, (distance, grad) = make_mlp(width, activation), make_distances(edges)
    found = by_kernel(distance, mlp, grad, activation)
    assert_close(found, truth(distance, mlp.parameters(), grad, activation))
    again = by_kernel(distance, mlp, grad, activation)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_without_edges_the_gradients_are_zero():
    mlp, (distance, grad) = make_mlp(5, "gelu"), make_distances(0)
    gate, of_distance, *of_parameters = by_kernel(distance, mlp, grad, "gelu")
    assert gate.shape == of_distance.shape == (0, 1)
    assert all((of == 0).all() for of in of_parameters)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 40])
def test_extreme_distances(width, activation):
    mlp, grad = make_mlp(width, activation), make_distances(len(EXTREMES))[1]
    distance = torch.tensor(EXTREMES, device=DEVICE).unsqueeze(1)
    found = by_kernel(distance, mlp, grad, activation)
    assert all(x.isfinite().all() for x in found)
    assert_close(found, truth(distance, mlp.parameters(), grad, activation))


def test_the_slope_of_relu_at_zero_is_zero():
    mlp, grad = make_mlp(3, "relu"), torch.ones(2, 1, device=DEVICE)
    nn.init.zeros_(mlp[0].bias)
    of_distance, of_weight, of_bias = by_kernel(torch.zeros(2, 1, device=DEVICE), mlp, grad, "relu")[1:4]
    assert not of_distance.any()
    assert not of_weight.any()
    assert not of_bias.any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_distance_that_is_not_a_number_gives_no_gate(activation):
    mlp, (distance, grad) = make_mlp(5, activation), make_distances(3)
    distance[1] = math.nan
    gate, of_distance, *of_parameters = by_kernel(distance, mlp, grad, activation)
    assert gate.isnan().flatten().tolist() == [False, True, False]
    assert of_distance.isnan().flatten().tolist() == [False, True, False]
    assert all(of.isnan().all() for of in of_parameters)


def test_tensors_that_are_not_contiguous():
    mlp, (distance, grad) = make_mlp(20, "gelu"), make_distances(50)
    exact = truth(distance, mlp.parameters(), grad, "gelu")
    distance, grad = (torch.cat([x, x], dim=1)[:, :1] for x in (distance, grad))
    assert not distance.is_contiguous()
    assert_close(by_kernel(distance, mlp, grad, "gelu"), exact)
    grad = torch.ones(1, 1, device=DEVICE).expand(50, 1)
    exact = truth(distance, mlp.parameters(), grad, "gelu")
    assert_close(by_kernel(distance, mlp, grad, "gelu"), exact)


def test_a_distance_without_a_gradient(on_the_kernels):
    mlp, (distance, grad) = make_mlp(12, "relu"), make_distances(30)
    exact = truth(distance, mlp.parameters(), grad, "relu")
    found = torch.autograd.grad(distance_gate(distance, mlp, "relu"), list(mlp.parameters()), grad)
    assert_close(found, exact[2:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_the_layers(activation):
    mlp = make_mlp(4, activation, torch.float64)
    distance = make_distances(6, torch.float64)[0].requires_grad_()
    names = [name for name, _ in mlp.named_parameters()]

    def op(distance, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(
            _Gate(mlp, activation), {f"mlp.{n}": p for n, p in given.items()}, distance
        )

    assert torch.autograd.gradcheck(op, [distance, *mlp.parameters()])
    assert_close(
        [op(distance, *mlp.parameters())], [by_equations(distance, *mlp.parameters(), activation)], 1e-12
    )


class _Gate(nn.Module):
    def __init__(self, mlp, activation):
        super().__init__()
        self.mlp, self.activation = mlp, activation

    def forward(self, distance):
        return distance_gate(distance, self.mlp, self.activation)


def test_the_operator_is_sound():
    mlp, distance = make_mlp(5, "gelu"), make_distances(9)[0].requires_grad_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        operators._distance_gate.plain, (distance, *mlp.parameters(), "gelu"), test_utils=checks
    )


def test_one_compiled_graph_serves_all_numbers_of_edges(on_the_kernels):
    mlp = make_mlp(6, "relu")
    compiled = torch.compile(_Gate(mlp, "relu"), fullgraph=True, dynamic=True, backend="aot_eager")
    for edges in (5, 30):
        distance, grad = make_distances(edges)
        distance.requires_grad_()
        given = [distance, *mlp.parameters()]
        found, expected = (
            torch.autograd.grad(call(distance), given, grad) for call in (compiled, _Gate(mlp, "relu"))
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def gradients(layer, inputs, edge_index, grads, **rows):
    """New x and e of a layer, and the gradients of its inputs (x, e and the distance) and parameters."""
    x, e, distance = inputs = [z.detach().requires_grad_() for z in inputs]
    out = layer(x, e, edge_index, distance, **rows)
    return [*out, *torch.autograd.grad(out, [*inputs, *layer.parameters()], grads)]


def make_layer(activation, nodes, edges):
    """A layer, its inputs, and gradients of what it returns."""
    torch.manual_seed(0)
    layer = GatedGCN(6, activation=activation, pe_gate=True).to(DEVICE)
    shapes = [(nodes, 6), (edges, 6), (edges, 1), (nodes, 6), (edges, 6)]
    x, e, distance, *grads = (torch.randn(shape).to(DEVICE) for shape in shapes)
    return layer, [x, e, distance.square()], grads


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_layer_with_the_kernels_is_that_with_the_mlp(monkeypatch, activation):
    layer, inputs, grads = make_layer(activation, 4, 6)
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 1], [1, 2, 1, 1, 2, 1]], device=DEVICE)
    monkeypatch.setattr(operators, "usable", lambda x: False)
    expected = gradients(layer, inputs, edge_index, grads)
    monkeypatch.setattr(operators, "usable", lambda x: True)
    for a, b in zip(gradients(layer, inputs, edge_index, grads), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", ["plain", "kernels"])
def test_padding_changes_nothing_of_the_layer(monkeypatch, version):
    """Whatever nodes and edges of padding hold, and whatever gradient reaches them."""
    for place in ("distance_gate", "gated_sum", "norms"):
        monkeypatch.setattr(f"sfiformer.nn.{place}.usable", lambda x: version == "kernels")
    nodes, edges = 4, 6
    layer, padded, grads = make_layer("gelu", nodes + 3, edges + 5)
    loops = torch.arange(5, device=DEVICE) % 3 + nodes
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 1], [1, 2, 1, 1, 2, 1]], device=DEVICE)
    real = {
        "real_nodes": torch.tensor(nodes, device=DEVICE),
        "real_edges": torch.tensor(edges, device=DEVICE),
    }
    with_loops = torch.cat([edge_index, loops.expand(2, -1)], dim=1)
    found = gradients(layer, padded, with_loops, grads, **real)
    sizes = (nodes, edges, edges)
    inputs = [z[:size] for z, size in zip(padded, sizes, strict=True)]
    expected = gradients(layer, inputs, edge_index, [grads[0][:nodes], grads[1][:edges]])
    assert not found[4][edges:].any()  # the distances of padding
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a[: len(b)], b, rtol=1e-4, atol=1e-5)


def test_checkpoints_keep_their_names():
    names = [name for name, _ in GatedGCN(4, pe_gate=True).named_parameters() if "pe_gate" in name]
    assert names == ["pe_gate.0.weight", "pe_gate.0.bias", "pe_gate.2.weight", "pe_gate.2.bias"]


def test_a_layer_without_distances_says_so():
    layer = GatedGCN(4, pe_gate=True)
    with pytest.raises(ValueError, match="distances"):
        layer(torch.randn(3, 4), torch.randn(2, 4), torch.tensor([[0, 1], [1, 2]]))


def test_the_mlp_under_autocast_on_a_cpu():
    mlp, distance = make_mlp(8, "relu").cpu(), make_distances(9)[0].cpu()
    with torch.autocast("cpu", torch.bfloat16):
        gate = distance_gate(distance, mlp, "relu")
        assert gate.dtype == torch.bfloat16
        assert torch.equal(gate, mlp(distance))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [8, 68, 235, 512])
def test_many_edges_under_autocast(width, activation, dtype):
    """In float32 whatever autocast says: as close to float64 as the MLP in float32."""
    mlp, (distance, grad) = make_mlp(width, activation), make_distances(200_003, dtype)
    parameters = list(mlp.parameters())
    exact = truth(distance, parameters, grad, activation)
    twin = results(lambda *x: by_equations(*x, activation), distance.float(), parameters, grad)
    with torch.autocast("cuda", torch.bfloat16):
        leaf = distance.detach().requires_grad_()
        gate = distance_gate(leaf, mlp, activation)
    assert gate.dtype == torch.float32
    found = [gate, *torch.autograd.grad(gate, [leaf, *parameters], grad)]
    assert found[1].dtype == dtype
    for place, (a, b, c) in enumerate(zip(found, twin, exact, strict=True)):
        error, allowed = ((x.double() - c).norm() / c.norm() for x in (a, b))
        assert error <= 3 * allowed + (4e-3 if place == 1 and dtype == torch.bfloat16 else 1e-6)


@on_gpu
def test_in_a_cuda_graph():
    mlp, (distance, grad) = make_mlp(40, "gelu"), make_distances(5000)
    given = [distance.requires_grad_(), *mlp.parameters()]

    def step():
        return torch.autograd.grad(distance_gate(distance, mlp, "gelu"), given, grad)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))
