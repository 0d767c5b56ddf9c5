"""Transforms of functions: reverse mode is right under them, and forward mode is refused, never 0."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch_geometric.data import Data

from packing import Packed, packed
from sfiformer import SFiAttention, SFiFormer, sfi_attention
from sfiformer.attention import EdgeOrder
from sfiformer.attention.edges import neighbour_sum, segment_sum, spread
from sfiformer.flow import flows_from_scores
from sfiformer.nn.gated_sum import gated_sum

WAYS = [{}, {"scaling": "potential"}, {"return_flows": True}]
SECOND = "differentiated once"


@pytest.fixture
def inputs() -> Packed:
    return packed((3, 0, 1, 4), width=3)


def _attend(inputs: Packed, way: dict, q: torch.Tensor) -> torch.Tensor:
    out = sfi_attention(*inputs._replace(q=q), lam=0.13, **way)
    return out if isinstance(out, torch.Tensor) else out[0]


def _dual(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


FORWARD = {
    "jvp": lambda function, x: jvp(function, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda function, x: jacfwd(function)(x),
    "hessian": lambda function, x: hessian(lambda x: function(x).square().sum())(x),
    "forward_ad": _dual,
    "forward_ad of a leaf": lambda function, x: _dual(function, x.clone().requires_grad_()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forward", FORWARD.values(), ids=FORWARD)
def test_attention_refuses_tangents(inputs, forward, way):
    with pytest.raises(NotImplementedError, match=r"forward-mode.*reverse mode"):
        forward(lambda q: _attend(inputs, way, q), inputs.q)


def test_a_level_of_forward_mode_without_tangents_changes_nothing(inputs):
    expected = _attend(inputs, {}, inputs.q)
    with forward_ad.dual_level():
        torch.testing.assert_close(_attend(inputs, {}, inputs.q), expected)


def test_the_papers_iteration_has_tangents(inputs):
    """It is plain PyTorch."""
    direction, step = torch.randn_like(inputs.q), 1e-6
    way = {"solver": "proximal"}
    _, tangent = jvp(lambda q: _attend(inputs, way, q), (inputs.q,), (direction,))
    ahead, behind = (_attend(inputs, way, inputs.q + sign * step * direction) for sign in (1, -1))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("forward", FORWARD.values(), ids=FORWARD)
@pytest.mark.parametrize("place", range(4))
def test_message_passing_refuses_tangents(forward, place):
    order = EdgeOrder.of(torch.randint(6, (2, 20)), 6)
    segments = (order.source_ptr, order.source, order.by_source)
    x, nodes, edges = torch.randn(6, 4), torch.randn(6, 16), torch.randn(20, 4)
    weight, loop = torch.rand(20), torch.rand(6)
    function, given = [
        (lambda x: neighbour_sum(x, weight, loop, *order), x),
        (lambda values: segment_sum(values, *segments), edges),
        (lambda values: spread(values, *segments), x),
        (lambda edges: gated_sum(nodes, edges, None, order)[0], edges),
    ][place]
    with pytest.raises(NotImplementedError, match=r"forward-mode.*reverse mode"):
        forward(function, given)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_attention(inputs, way):
    def loss(*tensors):
        out = sfi_attention(*tensors, inputs.ptr, lam=0.13, **way)
        return (out if isinstance(out, torch.Tensor) else out[0]).square().sum()

    leaves = inputs.leaves()[:5]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(grad(loss, argnums=tuple(range(5)))(*inputs[:5]), expected)


@pytest.mark.parametrize("way", WAYS)
def test_jacobian_of_attention(inputs, way):
    def attend(q):
        return _attend(inputs, way, q)

    expected = torch.autograd.functional.jacobian(attend, inputs.q)
    torch.testing.assert_close(jacrev(attend)(inputs.q), expected)


def test_hessian_by_reverse_mode(inputs):
    def loss(q):
        return _attend(inputs, {"return_flows": True}, q).square().sum()

    torch.testing.assert_close(
        jacrev(jacrev(loss))(inputs.q), torch.autograd.functional.hessian(loss, inputs.q)
    )


@pytest.mark.parametrize("way", [{}, {"return_flows": True, "check": False}])
def test_samples_side_by_side(inputs, way):
    samples = torch.stack([inputs.q, 2 * inputs.q])
    expected = torch.stack([_attend(inputs, way, q) for q in samples])
    torch.testing.assert_close(vmap(lambda q: _attend(inputs, way, q))(samples), expected)


def test_gradients_of_samples(inputs):
    samples = torch.stack([inputs.q, 2 * inputs.q])

    def loss(q):
        return _attend(inputs, {}, q).square().sum()

    torch.testing.assert_close(vmap(grad(loss))(samples), torch.stack([grad(loss)(q) for q in samples]))


def test_flows_side_by_side():
    s, u = torch.randn(3, 4, 6), torch.randn(4, 6)

    def solve(s):
        return flows_from_scores(s, u, lam=0.1, check=False)

    torch.testing.assert_close(vmap(solve, 1)(s.transpose(0, 1)), torch.stack([solve(each) for each in s]))


def test_second_derivatives_of_attention(inputs):
    def twice(way, q):
        return grad(lambda q: grad(lambda q: _attend(inputs, way, q).square().sum())(q).square().sum())(q)

    with pytest.raises(NotImplementedError, match=SECOND):
        twice({}, inputs.q)
    with pytest.raises(NotImplementedError, match=SECOND):
        _twice(lambda q: _attend(inputs, {}, q), inputs.q)
    kept = {"return_flows": True}
    expected = _twice(lambda q: _attend(inputs, kept, q), inputs.q)
    torch.testing.assert_close(twice(kept, inputs.q), expected)


def _twice(function, x):
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def test_layer():
    torch.manual_seed(0)
    layer, x = SFiAttention(16, 2).double(), torch.randn(8, 16, dtype=torch.float64)
    others = (torch.randint(8, (2, 20)), torch.tensor([0, 3, 3, 8]))
    parameters = dict(layer.named_parameters())

    def loss(parameters):
        return functional_call(layer, parameters, (x, *others)).square().sum()

    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    torch.testing.assert_close(tuple(grad(loss)(parameters).values()), expected)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(lambda x: layer(x, *others), (x,), (x,))


def test_model():
    torch.manual_seed(0)
    small = {"layers": 1, "dim": 12, "heads": 2, "pe": "none", "node_encoder": "linear", "node_features": 3}
    model = SFiFormer.from_preset("peptides-func", **small, edge_encoder="constant").eval()
    graph = Data(x=torch.randn(6, 3), edge_index=torch.randint(6, (2, 20)))
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}

    def loss(parameters):
        return functional_call(model, parameters, (graph,)).square().sum()

    expected = torch.autograd.grad(loss(parameters), list(parameters.values()), materialize_grads=True)
    torch.testing.assert_close(tuple(grad(loss)(parameters).values()), expected)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(loss, (parameters,), (parameters,))


def test_kernels_are_launched_on_the_device_of_the_tensors(monkeypatch):
    devices, known = [], torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: devices.append(x) or known(x))
    values = torch.ones(3)
    segment_sum(values, torch.tensor([0, 3]), torch.zeros(3, dtype=torch.int64))
    assert [x.shape for x in devices] == [values.shape]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_layer_runs_on_a_gpu_that_is_not_the_current_one():
    layer = SFiAttention(16, 2)
    x, edges, ptr = torch.randn(5, 16), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 5])
    expected = layer(x, edges, ptr)
    with torch.cuda.device(0):
        got = layer.to("cuda:1")(x.to("cuda:1"), edges.to("cuda:1"), ptr.to("cuda:1"))
        got.sum().backward()
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-4)
