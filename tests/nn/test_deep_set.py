"""LapPE's sum over eigenpairs, by kernel, against its equations under autograd in float64.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on few nodes).
"""

import pytest
import torch
from torch import nn

from packing import poisoned
from sfiformer.nn import deep_set as operators
from sfiformer.nn import encoders
from sfiformer.nn.encoders import LapPE
from sfiformer.nn.partition import Partition

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """So few programs that each walks over several tiles."""
    module = pytest.importorskip("sfiformer.nn.kernels.deep_set", reason="the kernels need Triton")
    monkeypatch.setattr(module, "ROWS", 16)
    monkeypatch.setattr(module, "PIECES", 2)
    return module


@pytest.fixture
def on_the_kernels(monkeypatch):
    monkeypatch.setattr(operators, "usable", lambda x: True)


def make_case(nodes, pairs, dim, graphs=3):
    """Eigenpairs with some that are missing, signs, the graph of each node, φ, and gradients of the sums."""
    generator = torch.Generator().manual_seed(nodes + 10 * pairs + dim)
    vectors, values = (
        torch.randn(nodes, pairs, generator=generator),
        torch.rand(graphs, pairs, generator=generator),
    )
    graph = torch.randint(graphs, (nodes,), generator=generator).sort().values
    values[1, pairs // 2 :] = vectors[graph == 1, pairs // 2 :] = torch.nan
    flips = torch.randint(2, (graphs, pairs), generator=generator).float()
    torch.manual_seed(dim)
    phi = nn.Sequential(nn.Linear(2, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim), nn.ReLU())
    grad = torch.randn(nodes, dim, generator=generator)
    return [x.to(DEVICE) for x in (vectors, values, flips, graph)], phi.to(DEVICE), grad.to(DEVICE)


def by_equations(vectors, values, flips, graph, u, b, w, c):
    """Pair by pair."""
    out = torch.zeros(len(vectors), len(c), dtype=torch.float64, device=vectors.device)
    for k in range(vectors.size(1)):
        sign = 1 if flips is None else torch.where(flips[graph, k] == 1, 1.0, -1.0)
        pair = torch.stack([sign * vectors[:, k], values[graph, k]], dim=1).double()  # [N, 2]
        there = ~pair.isnan().any(1)
        h = (pair[there] @ u.T + b).clamp(min=0)
        out = out.index_add(0, there.nonzero()[:, 0], (h @ w.T + c).clamp(min=0))
    return out


def results(call, parameters, grad):
    parameters = [x.detach().requires_grad_() for x in parameters]
    out = call(*parameters)
    return [out.detach(), *torch.autograd.grad(out, parameters, grad.to(out.dtype))]


@pytest.mark.parametrize("signs", [True, False])
@pytest.mark.parametrize(("pairs", "dim"), [(1, 1), (10, 16), (3, 20), (4, 64)])
@pytest.mark.parametrize("nodes", [1, 17, 70])
def test_the_kernels_match(nodes, pairs, dim, signs):
    (vectors, values, flips, graph), phi, grad = make_case(nodes, pairs, dim)
    data = (vectors, values, flips if signs else None, graph)
    exact = results(lambda *p: by_equations(*data, *p), [x.double() for x in phi.parameters()], grad)

    def found():
        with poisoned():
            return results(lambda *p: operators._deep_set(*data, *p), phi.parameters(), grad)

    first, again = found(), found()
    for a, b, c in zip(first, exact, again, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, c)
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5 * max(1.0, float(b.abs().max())))


def test_without_nodes_the_gradients_are_zero():
    data, phi, _ = make_case(4, 3, 5)
    vectors, values, flips, graph = data
    none = (vectors[:0], values, flips, graph[:0])
    out, *grads = results(
        lambda *p: operators._deep_set(*none, *p), phi.parameters(), torch.zeros(0, 5, device=DEVICE)
    )
    assert out.shape == (0, 5)
    assert all((x == 0).all() for x in grads)


def test_a_weight_that_is_not_a_number_is_seen():
    data, phi, _ = make_case(6, 3, 5)
    with torch.no_grad():
        phi[0].weight[1, 0] = torch.nan
    assert operators.deep_set(*data, phi).isnan().all()


@pytest.mark.parametrize("training", [True, False])
def test_the_encoder_gives_the_same_by_kernel(training, monkeypatch):
    (vectors, values, _, graph), _, grad = make_case(40, 6, 8)
    encoder = LapPE(8).to(DEVICE).train(training)
    counts = graph.bincount(minlength=3)
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    graphs = Partition(graph, ptr, 3, int(counts.max()))
    made = []
    for by_kernel in (True, False):
        monkeypatch.setattr(encoders, "fits", lambda *_, by_kernel=by_kernel: by_kernel)
        torch.manual_seed(0)
        out = encoder(vectors, values, graphs)
        made.append([out, *torch.autograd.grad(out, list(encoder.parameters()), grad)])
    for left, right in zip(*made, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_what_the_kernels_are_for(on_the_kernels):
    (vectors, values, *_), phi, _ = make_case(4, 3, 5)
    assert operators.fits(phi, vectors, values)
    assert not operators.fits(phi, vectors.clone().requires_grad_(), values)
    assert not operators.fits(make_case(1, 1, 65)[1], vectors, values)
    assert not operators.fits(make_case(1, 1, 5)[1].double(), vectors, values)
    assert not operators.fits(phi, vectors, values.double())
    others = [
        nn.Sequential(nn.Linear(2, 10), nn.GELU(), nn.Linear(10, 5), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 5), nn.ReLU()),
    ]
    assert not any(operators.fits(other.to(DEVICE), vectors, values) for other in others)
    for part in phi:
        hook = part.register_forward_hook(lambda *_: None)
        assert not operators.fits(phi, vectors, values)
        hook.remove()
    assert operators.fits(phi, vectors, values)


def test_the_operator_is_sound():
    data, phi, _ = make_case(9, 3, 5)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operators._deep_set.plain, (*data, *phi.parameters()), test_utils=checks)
