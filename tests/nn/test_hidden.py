"""Blocks of linear layers with what is between them in one kernel, against the same layers one by one.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on few rows; its bfloat16 is wrong).
"""

import copy

import pytest
import torch
from torch import nn

GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="the kernels need Triton")

from sfiformer.attention import widths  # noqa: E402
from sfiformer.attention.dropout import Dropout  # noqa: E402
from sfiformer.nn import hidden  # noqa: E402
from sfiformer.nn.gps_layer import FeedForward  # noqa: E402
from sfiformer.nn.heads import MLP  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
MODULES = {"gelu": nn.GELU, "relu": nn.ReLU}
on_gpu = pytest.mark.skipif(not GPU, reason="no GPU")


def rounded(width):
    return -(-width // 8) * 8


def assert_close(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def gpu_like(monkeypatch):
    """Kernels and padding as on a GPU."""
    for module in (widths, hidden):
        monkeypatch.setattr(module, "usable", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr(widths, "wide", lambda width, like: rounded(width))


@pytest.fixture
def launches(monkeypatch):
    """How often the kernels are asked."""
    calls, plain = [], hidden.hidden_rows
    monkeypatch.setattr(hidden, "hidden_rows", lambda *args: calls.append(args) or plain(*args))
    return calls


def block(activation="gelu", dropout=0.0, dim=5):
    torch.manual_seed(0)
    layers = nn.Linear(dim, 2 * dim), MODULES[activation](), Dropout(dropout), nn.Linear(2 * dim, dim)
    return FeedForward(*layers).to(DEVICE)


def run(module, x):
    """What a module makes of x, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    out = module(x)
    return out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])


@pytest.mark.parametrize("activation", MODULES)
@pytest.mark.parametrize("dim", [5, 8, 1, 235])
@pytest.mark.parametrize("rows", [0, 9])
def test_feed_forward(activation, dim, rows, gpu_like, launches):
    module, x = block(activation, dim=dim), torch.randn(rows, dim, device=DEVICE)
    found = run(module, x)
    assert len(launches) == 1
    assert_close(found, run(nn.Sequential(*copy.deepcopy(module).double()), x.double()), 2e-4)


def test_dropout_of_feed_forward(gpu_like, launches):
    module, x = block(dropout=0.5), torch.randn(9, 5, device=DEVICE)
    outs = [module(x) for _ in range(2)]
    assert not torch.equal(*outs)
    assert launches[0][1] != launches[1][1]
    module.eval()
    assert_close([module(x)], [nn.Sequential(*module)(x)], 2e-5)
    assert launches[2][1] is None


class Other(nn.Dropout):
    """Dropout of another library."""


OTHERS = [(1, nn.Tanh()), (1, nn.GELU("tanh")), (2, Other(0.0)), (3, nn.Linear(10, 5, bias=False))]


@pytest.mark.parametrize(("part", "other"), OTHERS)
def test_other_parts_are_called(part, other, gpu_like, launches):
    module, x = block(), torch.randn(9, 5, device=DEVICE)
    module[part] = other.to(DEVICE)
    assert_close(run(module, x), run(nn.Sequential(*module), x), 2e-5)
    assert not launches


@pytest.mark.parametrize("part", range(4))
def test_parts_with_hooks_are_called(part, gpu_like, launches):
    module, x = block(), torch.randn(9, 5, device=DEVICE)
    module[part].register_forward_hook(lambda module, inputs, out: 2 * out)
    assert_close(run(module, x), run(nn.Sequential(*module), x), 2e-5)
    assert len(launches) == (part == 0)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_compiler_takes_it_as_one_graph(dropout, gpu_like):
    module = block(dropout=dropout)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (9, 12):
        x = torch.randn(rows, 5, device=DEVICE)
        found = run(compiled, x)
        if not dropout:
            assert_close(found, run(module, x), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_double_precision_and_other_devices_take_no_kernel(dtype, launches):
    module, x = block().cpu().to(dtype), torch.randn(9, 5, dtype=dtype)
    assert_close(run(module, x), run(nn.Sequential(*module), x), 2e-5)
    assert not launches


@pytest.mark.parametrize(
    ("l2norm", "training", "count"), [(False, False, 2), (False, True, 3), (True, True, 3)]
)
def test_head(l2norm, training, count, gpu_like, launches):
    """Three layers: what is given to the first, and what is between them."""
    torch.manual_seed(0)
    mlp = MLP(5, 3, 3, activation="gelu", dropout=0.0, l2norm=l2norm).to(DEVICE)
    x = torch.randn(9, 5, device=DEVICE)
    found = run(mlp, x)
    wanted = run(copy.deepcopy(mlp).double(), x.double())
    assert len(launches) == (0 if l2norm else 2)
    assert_close(found, wanted, 2e-4)
    mlp.dropout = 0.5
    launches.clear()
    mlp.train(training)(x)
    assert len(launches) == count
    assert [args[-1] for args in launches] == [0.5 if training else 0.0] * count


@on_gpu
@pytest.mark.parametrize("activation", MODULES)
def test_many_rows_in_autocast(activation):
    """Half precision no further from float64 than PyTorch's own is, up to twice (thrice for gradients)."""
    module, x = block(activation, dim=235), torch.randn(4800, 235, device=DEVICE)
    exact = run(nn.Sequential(*copy.deepcopy(module).double()), x.double())
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = run(module, x), run(nn.Sequential(*module), x)
    for place, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        error, allowed = (float((y.double() - c).norm() / c.norm()) for y in (a, b))
        assert error <= (3 if place else 2) * allowed, place


@on_gpu
def test_a_captured_step_replays_with_new_dropout():
    module, x = block(dropout=0.5, dim=40), torch.randn(500, 40, device=DEVICE)

    def step():
        return [value.detach() for value in run(module, x)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    first = [value.clone() for value in results]
    graph.replay()
    assert not any(map(torch.equal, results, first))
