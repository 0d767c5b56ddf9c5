"""Compiled loops for a CPU, against flows and gradients in float64, and against the plain operators."""

import math
import multiprocessing

import numpy as np
import pytest
import torch

from packing import attend, packed
from sfiformer.attention import compiled
from sfiformer.attention.dropout import kept_entries
from sfiformer.flow import flows_from_scores

pytest.importorskip("numba")

SCALINGS = ["absolute", "potential"]
SHAPES = [(3, 1, 1), (2, 5, 2), (4, 7, 7), (2, 40, 71), (1, 130, 300)]  # b, rows, n


def scores(shape, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    s, u = (spread * torch.randn(shape, generator=generator) for _ in range(2))
    return s, u, 0.2 + torch.rand(shape[0], generator=generator)


def exact(s, u, lam, alpha, scaling):
    return flows_from_scores(
        s.double(), u.double(), lam=lam.double().view(-1, 1), alpha=alpha, scaling=scaling
    )


def test_exponentials():
    from sfiformer.attention import loops

    x = -np.logspace(-8, math.log10(120), 5000).astype(np.float32)
    e = np.array([loops.exp(number) for number in x])
    inside, outside = x > -87, x < -87
    np.testing.assert_allclose(e[inside], np.exp(x[inside].astype(np.float64)), rtol=2.4e-7)
    assert (e[outside] == 0).all()
    assert loops.exp(np.float32(0)) == 1
    assert loops.exp(np.float32(-math.inf)) == 0
    assert math.isnan(loops.exp(np.float32(math.nan)))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("alpha", [0.1, math.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_flows(shape, alpha, scaling):
    s, u, lam = scores(shape)
    z, eta = compiled.solve(s, u, lam, alpha, scaling == "potential", None)
    expected = exact(s, u, lam, alpha, scaling)
    torch.testing.assert_close(z.double(), expected, rtol=1e-4, atol=1e-6)
    assert eta.shape == (*shape[:2], 1)
    apart = (z == 0) != (expected == 0)  # at most at ties of a friction with the potential
    assert (expected[apart] < 1e-6).all()
    assert apart.double().mean() < 1e-3


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("alpha", [0.1, math.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, alpha, scaling):
    s, u, lam = scores(shape, seed=1)
    g = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    leaves = [x.double().requires_grad_() for x in (s, u, lam)]
    true = torch.autograd.grad((exact(*leaves, alpha, scaling) * g).sum(), leaves)
    _, eta = compiled.solve(s, u, lam, alpha, scaling == "potential", None)
    flows = exact(s, u, lam, alpha, scaling)
    of_log_kappa = compiled.gradients(s, u, lam, alpha, scaling == "potential", None, eta, g)
    torch.testing.assert_close(g.double(), flows, rtol=1e-4, atol=1e-6)
    of_lam = of_log_kappa.sum((1, 2)) / lam
    for got, expected in zip((s, u, of_lam), true, strict=True):
        size = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(got.double() / size, expected / size, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("place", ["s", "u"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 200.0])
def test_rows_that_need_a_pivot_are_left_to_the_plain_operators(place, value):
    s, u, lam = scores((2, 4, 9))
    {"s": s, "u": u}[place][1, 2, 3] = value
    wide = (
        place == "u" and value == 200.0
    )  # friction of one key beyond all others: none of it flows, and all is well
    assert (compiled.solve(s, u, lam, 0.1, False, None) is None) != wide


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("lam", [0.5, 0.0])
@pytest.mark.parametrize("spread", [1.0, 12.0])  # gentle rows, and many that are not
def test_attention_is_what_it_is_without(monkeypatch, spread, lam, scaling, dropout_p):
    results = []
    for with_loops in (True, False):
        monkeypatch.setattr(compiled, "HAS_NUMBA", with_loops)
        inputs = packed((7, 3, 12, 1, 40), heads=2, width=8, dtype=torch.float32)
        inputs = inputs._replace(q=inputs.q * spread).leaves()
        torch.manual_seed(0)
        out = attend(inputs, lam=lam, scaling=scaling, dropout_p=dropout_p)
        weight = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs[:5])))
    for got, expected in zip(*results, strict=True):
        size = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(got / size, expected / size, rtol=1e-3, atol=2e-4)


def test_dropout_leaves_what_it_keeps():
    s, u, lam = scores((2, 40, 71))
    keep = kept_entries(s.numel(), 0.4, 5)
    z, _ = compiled.solve(s, u, lam, 0.1, False, None)
    dropped, _ = compiled.solve(s, u, lam, 0.1, False, keep)
    assert torch.equal(dropped, z * torch.from_numpy(keep).view_as(z))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_any_number_of_threads_finds_the_same(threads):
    s, u, lam = scores((5, 71, 71))
    found = []
    for number in (1, 2, 3):
        threads(number)
        z, eta = compiled.solve(s, u, lam, 0.1, False, None)
        grads = s.clone(), u.clone(), torch.linspace(-1, 1, s.numel()).view_as(s).clone()
        compiled.gradients(*grads[:2], lam, 0.1, False, None, eta, grads[2])
        found.append((z, eta, *grads))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def _total(_):
    s, u, lam = scores((5, 71, 71))
    return float(compiled.solve(s, u, lam, 0.1, False, None)[0].sum())


def test_threads_of_a_forked_process_are_its_own(threads):
    threads(2)
    here = _total(0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map_async(_total, [0]).get(timeout=60) == [here]


def test_float64_and_other_devices_are_not_for_the_loops():
    assert compiled.usable(torch.zeros(1))
    assert not compiled.usable(torch.zeros(1, dtype=torch.float64))
    assert not compiled.usable(torch.zeros(1, device="meta"))
