"""The fused batch normalisation against PyTorch's in float64, on the real rows alone.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on few rows; its bfloat16 is wrong).
"""

import pytest
import torch
from torch.nn import functional as F

GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="the kernels need Triton")

from sfiformer.nn.kernels import batch_norm as kernels  # noqa: E402
from sfiformer.nn.norms import BatchNorm  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
ACTIVATIONS = {None: lambda x: x, "relu": F.relu, "gelu": F.gelu}
on_gpu = pytest.mark.skipif(not GPU, reason="no GPU")


class Case:
    """Inputs of one call: x, update and residual [size, width] of which ``count`` rows are real, and the gradient."""

    def __init__(self, size, width, count=None, *, mean=0.5, dtype=torch.float32, add=False, residual=False):
        generator = torch.Generator().manual_seed(size + width)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(DEVICE)

        def rows(there):
            return normal(size, width).to(dtype).requires_grad_() if there else None

        self.count = size if count is None else count
        self.rows = None if count is None else torch.tensor(count, device=DEVICE)
        self.x = (normal(size, width) * 2 + mean).to(dtype).requires_grad_()
        self.update, self.residual = rows(add), rows(residual)
        self.weight, self.bias = normal(width).requires_grad_(), normal(width).requires_grad_()
        self.running = [normal(width), normal(width).exp(), torch.tensor(5, device=DEVICE)]
        self.grad = normal(size, width).to(dtype)

    @property
    def inputs(self):
        return [x for x in (self.x, self.update, self.residual, self.weight, self.bias) if x is not None]

    def fused(self, activation=None, dropout=0.0, seed=0, backward=True):
        """Output, gradients of the inputs, running statistics."""
        torch.manual_seed(seed)
        running = [value.clone() for value in self.running]
        out = kernels.fused_batch_norm(
            self.x, self.weight, self.bias, *running, rows=self.rows, update=self.update, residual=self.residual,
            activation=activation, dropout=dropout,
        )  # fmt: skip
        if not backward:
            return [out, *running]
        return [out, *torch.autograd.grad(out, self.inputs, self.grad.to(out.dtype)), *running]

    def truth(self, activation=None, kept=None):
        """The same from the real rows, in float64; ``kept`` are dropout's factors."""
        inputs = [value.detach().double().requires_grad_() for value in self.inputs]
        *states, weight, bias = inputs
        states = [value[: self.count] for value in states]
        running = [value.clone().double() for value in self.running[:2]]
        x = states.pop(0)
        if self.update is not None:
            x = x + states.pop(0) * (1 if kept is None else kept)
        enough = self.count >= 2
        y = ACTIVATIONS[activation](F.batch_norm(x, *running, weight, bias, enough))
        if self.update is None and kept is not None:
            y = y * kept
        if self.residual is not None:
            y = y + states.pop(0)
        grads = torch.autograd.grad(y, inputs, self.grad[: self.count].double())
        return [y, *grads, *running, self.running[2] + int(enough)]


def assert_close(found, wanted, case, rtol=2e-5):
    out, *others = found
    true_out, *true_others = wanted
    padding = slice(case.count, None)
    expected = torch.zeros_like(out) if case.residual is None else case.residual.to(out.dtype)
    assert torch.equal(out[padding], expected[padding])
    for index, (a, b) in enumerate(zip([out[: case.count], *others], [true_out, *true_others], strict=True)):
        a, b = a.double(), b.double()
        if case.residual is not None and index == (3 if case.update is not None else 2):
            a, b = (
                a[: case.count],
                b[: case.count],
            )  # the residual's gradient is what comes in, padding or not
        error = (a - b).norm() / b.norm().clamp(min=1)
        assert error < rtol, (index, float(error))


# Widths and counts beside the tiles of 128 rows and 32 channels.
SHAPES = [(129, 5, None), (140, 33, 128), (7, 68, 3), (20, 4, 2)]


@pytest.mark.parametrize(("size", "width", "count"), SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_pytorch_on_the_real_rows(size, width, count, activation):
    case = Case(size, width, count, residual=activation == "gelu")
    assert_close(case.fused(activation), case.truth(activation), case)


@pytest.mark.parametrize(("size", "width", "count"), SHAPES)
def test_of_a_sum(size, width, count):
    case = Case(size, width, count, add=True, residual=width == 5)
    assert_close(case.fused(), case.truth(), case)


@pytest.mark.parametrize(("size", "count"), [(0, None), (1, None), (6, 0), (6, 1)])
def test_without_a_variance_the_running_statistics_serve(size, count):
    case = Case(size, 3, count)
    assert_close(case.fused("gelu"), case.truth("gelu"), case)


@pytest.mark.parametrize("mean", [1e4, -1e5])
def test_a_large_mean_beside_a_small_deviation(mean):
    """No worse than PyTorch's own float32: what is lost is lost in rounding the mean."""
    case = Case(140, 3, mean=mean)
    truth = case.truth()[:1] + case.truth()[-3:-1]
    found = case.fused(backward=False)[:3]
    running = [value.clone() for value in case.running[:2]]
    plain = [F.batch_norm(case.x, *running, case.weight, case.bias, True), *running]
    with torch.no_grad():
        errors = [
            [float((a - b).norm() / b.norm()) for a, b in zip(run, truth, strict=True)]
            for run in (found, plain)
        ]
    assert all(ours <= 2 * theirs + 1e-6 for ours, theirs in zip(*errors, strict=True)), errors


def test_an_outlier_in_the_first_row():
    case = Case(140, 3)
    with torch.no_grad():
        case.x[0] = 1e4
    assert_close(case.fused(), case.truth(), case)


@pytest.mark.parametrize("garbage", [1e30, float("nan")])
@pytest.mark.parametrize("add", [False, True])
def test_padding_changes_no_bit(add, garbage):
    """Whatever it holds, and however much of it there is."""
    results = []
    for size in (30, 40, 140):
        case, whole = Case(30, 6, add=add), Case(140, 6, add=add)
        for name in ("x", "update", "grad"):
            value = getattr(case, name)
            if value is not None:
                padded = getattr(whole, name).detach()[:size].clone()
                padded[:30], padded[30:] = value.detach(), garbage
                setattr(case, name, padded.requires_grad_())
        case.rows = torch.tensor(30, device=DEVICE) if results else None
        out, *others = case.fused("relu", dropout=0.3)
        of_states = others[: 1 + add]
        assert not out[30:].any()
        assert not any(grad[30:].any() for grad in of_states)
        results.append([out[:30], *(grad[:30] for grad in of_states), *others[1 + add :]])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("add", [False, True])
def test_dropout_is_the_same_in_the_backward(add):
    case = Case(140, 20, 135, add=add)
    first = case.fused(dropout=0.4)
    mask = first[2 if add else 0][:135] != 0  # of the update, its gradient is dropped as it was itself
    assert abs(float(mask.float().mean()) - 0.6) < 0.03
    kept = mask.double() / (1 - round(0.4 * 65536) / 65536)
    assert_close(case.fused("gelu", 0.4), case.truth("gelu", kept), case)
    assert not torch.equal(first[0], case.fused(dropout=0.4, seed=1, backward=False)[0])


def test_dropped_entries_are_independent():
    """All eight parts of a tile, rows and channels: the counts of joint keeps are those of independent coins."""
    case = Case(256, 40)
    mask = (case.fused(dropout=0.5, backward=False)[0] != 0).double()
    for shifted in (mask.roll(1, 0), mask.roll(16, 0), mask.roll(128, 0), mask.roll(1, 1), mask.roll(32, 1)):
        assert abs(float((mask * shifted).mean()) - 0.25) < 0.02
    assert (mask.mean(0) - 0.5).abs().max() < 0.15
    assert (mask.view(2, 8, 16, 40).mean((0, 2, 3)) - 0.5).abs().max() < 0.05


@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_nothing_and_everything_dropped(dropout):
    case = Case(9, 4, residual=True)
    out = case.fused("relu", dropout, backward=False)[0]
    assert torch.equal(out, case.residual) == (dropout == 1.0)


def test_dtypes_may_differ():
    """As under autocast: a half-precision update of a float32 state."""
    case = Case(50, 6, 45, residual=True, add=True)
    case.update = case.update.detach().half().requires_grad_()
    case.residual = case.residual.detach().half().requires_grad_()
    out, of_x, of_update, of_residual, *_ = case.fused("relu", 0.2)
    assert [t.dtype for t in (out, of_x, of_update, of_residual)] == [torch.float32] * 2 + [torch.float16] * 2
    assert_close(case.fused("relu"), case.truth("relu"), case, rtol=1e-3)


def test_two_runs_agree_to_the_bit():
    case = Case(140, 20, 133)
    runs = [case.fused("gelu", 0.1) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_operators_declare_what_they_do():
    """Shapes and dtypes without running, and which arguments they change: what torch.compile goes by."""
    case = Case(9, 4, 7, add=True)
    x, update, weight, bias = (value.detach() for value in case.inputs)
    seed, checks = torch.tensor(3, device=DEVICE), ("test_schema", "test_faketensor")
    inputs = (x, update, None, weight, bias, *case.running, case.rows, seed, "relu", 0.1, 0.1, 1e-5)
    torch.library.opcheck(kernels.batch_norm, inputs, test_utils=checks)
    _, added, mean, scale = kernels.batch_norm(*inputs)
    inputs = (case.grad, added, weight, bias, mean, scale, case.rows, seed, "relu", 0.1)
    options = (torch.float32, torch.float16, True)
    torch.library.opcheck(kernels.batch_norm_backward, (*inputs, *options), test_utils=checks)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [32, 40, 56, 68, 88, 235])
@pytest.mark.parametrize("size", [30_000, 200_000])
def test_many_rows(size, width, dtype):
    rtol = 1e-4 if dtype == torch.float32 else 2e-2
    for add, activation in ((False, "gelu"), (True, None)):
        case = Case(size, width, size - 777, dtype=dtype, residual=True, add=add)
        assert_close(case.fused(activation), case.truth(activation), case, rtol=rtol)


@on_gpu
def test_a_captured_step_replays_with_new_rows_and_new_dropout():
    torch.manual_seed(0)
    norm = BatchNorm(40).cuda()
    x, rows = torch.randn(500, 40, device="cuda", requires_grad=True), torch.tensor(400, device="cuda")

    def step():
        out = norm(x, rows=rows, activation="relu", dropout=0.5, residual=x)
        x.grad = None
        norm.zero_grad()
        out.square().sum().backward()
        return out.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    first = out.clone()
    rows.fill_(123)
    graph.replay()
    assert torch.equal(out[123:], x[123:])
    assert not torch.equal(out[:123], first[:123])
    assert int(norm.num_batches_tracked) == 3


@on_gpu
def test_the_module_uses_the_kernels_and_agrees_with_its_plain_twin():
    torch.manual_seed(0)
    x, update, residual = (torch.randn(500, 40, requires_grad=True) for _ in range(3))
    rows = torch.tensor(450)
    results = []
    for device in ("cpu", "cuda"):
        norm = BatchNorm(40).to(device)
        inputs = [value.detach().to(device).requires_grad_() for value in (x, update, residual)]
        out = norm(inputs[0], rows=rows.to(device), update=inputs[1], activation="gelu", residual=inputs[2])
        assert ("Fused" in str(out.grad_fn)) == (device == "cuda")
        out.pow(3).sum().backward()
        results.append(
            [out, *(v.grad for v in inputs), norm.weight.grad, norm.bias.grad, *norm.state_dict().values()]
        )
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused.cpu(), plain, rtol=1e-4, atol=1e-3)
