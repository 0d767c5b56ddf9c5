"""What is between two products, activation and dropout and padding, by kernel against plain PyTorch in float64.

On a machine without a GPU the kernels run in Triton's interpreter (slow, so on few rows; its bfloat16 is wrong).
"""

import pytest
import torch
from torch.nn import functional as F

GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="the kernels need Triton")

from packing import poisoned  # noqa: E402
from sfiformer.nn import hidden  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
FUNCTIONS = {"gelu": F.gelu, "relu": F.relu, None: lambda x: x}
on_gpu = pytest.mark.skipif(not GPU, reason="no GPU")


def rounded(width):
    return -(-width // 8) * 8


def make(rows, kept, own=None, dtype=torch.float32):
    """x [rows, own], whose columns behind the first ``kept`` hold anything, and the gradient of what is made of it."""
    generator = torch.Generator().manual_seed(rows + kept)
    x, grad = (
        torch.randn(rows, width, generator=generator) * 2
        for width in (own or rounded(kept), rounded(kept + 1))
    )
    return x.to(DEVICE, dtype).requires_grad_(), grad.to(DEVICE, dtype)


def seeded(number):
    return torch.tensor(number, device=DEVICE)


def by_kernel(x, grad, kept, activation, p=0.0, seed=0, dtype=torch.float32):
    """The result, and the gradient of x."""
    with poisoned():
        out = hidden.hidden_rows(
            x, seeded(seed) if p else None, rounded(kept + 1), dtype, kept, activation, p
        )
        return out, *torch.autograd.grad(out, x, grad.to(dtype))


def by_pytorch(x, grad, kept, activation, factors=1.0):
    x = x.detach().double().requires_grad_()
    behind = F.pad(x.new_ones(len(x), 1), (0, rounded(kept + 1) - kept - 1))
    out = torch.cat([factors * FUNCTIONS[activation](x[:, :kept]), behind], 1)
    return out, *torch.autograd.grad(out, x, grad.double())


def assert_close(found, wanted, tolerance=2e-6):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


# Rows and columns beside the tiles of 64 rows and 32 columns; rows as a product made them, and of any length.
SHAPES = [(5, 470, None), (65, 5, None), (64, 8, None), (3, 1, None), (70, 33, 33), (9, 31, 40), (0, 5, None)]


@pytest.mark.parametrize(("rows", "kept", "own"), SHAPES)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_without_dropout(rows, kept, own, activation):
    x, grad = make(rows, kept, own)
    assert_close(by_kernel(x, grad, kept, activation), by_pytorch(x, grad, kept, activation))


@pytest.mark.parametrize(("rows", "kept", "own"), SHAPES)
@pytest.mark.parametrize(("activation", "p"), [("gelu", 0.1), ("relu", 0.25), (None, 0.5)])
def test_dropout_is_the_same_in_the_backward(rows, kept, own, activation, p):
    x, grad = make(rows, kept, own)
    # Which entries are kept is seen where the activation is left out.
    mask = by_kernel(torch.ones_like(x).requires_grad_(), grad, kept, None, p)[0][:, :kept] != 0
    factors = mask / (1 - round(p * 65536) / 65536)
    out, of_x = by_kernel(x, grad, kept, activation, p)
    assert_close((out, of_x), by_pytorch(x, grad, kept, activation, factors))
    assert not out[:, :kept][~mask].any()
    assert not of_x[:, :kept][~mask].any()
    assert not of_x[:, kept:].any()
    if x[:, :kept].numel() > 2000:
        assert abs(float(mask.float().mean()) - (1 - p)) < 0.04


def test_another_seed_drops_others():
    x, grad = make(70, 33)
    first, again, other = (by_kernel(x, grad, 33, "gelu", 0.5, seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert 0.4 < float(((first[0] == 0) != (other[0] == 0))[:, :33].float().mean()) < 0.6


def test_dropped_entries_are_independent():
    """Rows and columns, in a tile and in others: the counts of joint keeps are those of independent coins."""
    x = torch.ones(192, 70, device=DEVICE)
    mask = hidden.hidden_rows(x, seeded(3), 72, torch.float32, 70, None, 0.5)[:, :70].ne(0).double()
    for shift, dim in ((1, 0), (8, 0), (64, 0), (1, 1), (4, 1), (32, 1)):
        assert abs(float((mask * mask.roll(shift, dim)).mean()) - 0.25) < 0.02
    assert (mask.view(3, 8, 8, 70).mean((0, 2, 3)) - 0.5).abs().max() < 0.05


def test_everything_dropped():
    x, grad = make(9, 5)
    out, of_x = by_kernel(x, grad, 5, "gelu", 1.0)
    assert out.tolist() == [[0.0] * 5 + [1.0, 0.0, 0.0]] * 9
    assert not of_x.any()


def test_dtypes_may_differ():
    """As under autocast, from float32 to half precision and back."""
    for own, made in ((torch.float32, torch.float16), (torch.float16, torch.float32)):
        x, grad = make(65, 5, dtype=own)
        out, of_x = by_kernel(x, grad, 5, "gelu", dtype=made)
        assert (out.dtype, of_x.dtype) == (made, own)
        assert_close((out, of_x), by_pytorch(x, grad, 5, "gelu"), 2e-3)


def test_tensors_that_are_not_contiguous():
    x, grad = make(9, 5)
    apart = [torch.stack([a, a], 2)[..., 0] for a in (x.detach(), grad)]
    assert_close(by_kernel(apart[0].requires_grad_(), apart[1], 5, "gelu"), by_pytorch(x, grad, 5, "gelu"))


def test_the_operators_are_sound():
    x, grad = make(9, 5)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    options = (8, torch.float32, 5, "gelu", 0.1)
    torch.library.opcheck(hidden.hidden_rows.plain, (x, seeded(3), *options), test_utils=checks)
    torch.library.opcheck(hidden.hidden_rows.plain, (x, None, *options[:-1], 0.0), test_utils=checks)
    backward = (grad, x.detach(), seeded(3), 5, "gelu", 0.1)
    torch.library.opcheck(hidden._hidden_rows_backward.plain, backward, test_utils=checks)


def test_it_can_be_differentiated_once_and_for_many_gradients_at_a_time():
    x, grad = make(9, 5)
    out = hidden.hidden_rows(x, None, 8, torch.float32, 5, "gelu", 0.0)
    many = torch.stack([grad, -2 * grad])
    (of_x,) = torch.autograd.grad(out, x, many, is_grads_batched=True, retain_graph=True)
    assert_close(of_x, [torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in many])
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        torch.autograd.grad(first.sum(), x)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [470, 470 * 4, 33])
def test_many_rows(kept, dtype):
    x, grad = make(30_000, kept, dtype=dtype)
    mask = (
        by_kernel(torch.ones_like(x).requires_grad_(), grad, kept, None, 0.1, dtype=dtype)[0][:, :kept] != 0
    )
    assert abs(float(mask.float().mean()) - 0.9) < 2e-3
    factors = mask / (1 - round(0.1 * 65536) / 65536)
    found = by_kernel(x, grad, kept, "gelu", 0.1, dtype=dtype)
    wanted = by_pytorch(x, grad, kept, "gelu", factors)
    assert_close(found, wanted, 1e-5 if dtype == torch.float32 else 2**-8)  # bfloat16 rounds by 2⁻⁹
