"""Loops for a CPU, against flows and gradients in float64, and against the plain operators."""

import math
import multiprocessing
import sys

import numpy as np
import pytest
import torch

from packing import attend, packed
from sfiformer.attention import cpu
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
    from sfiformer.attention.cpu import loops

    x = -np.logspace(-8, math.log10(120), 5000).astype(np.float32)
    e = np.array([loops.exp(number) for number in x])
    inside, outside = x > -87, x < -87  # of which there is none
    np.testing.assert_allclose(e[inside], np.exp(x[inside].astype(np.float64)), rtol=2.4e-7)
    assert (e[outside] == 0).all()
    assert loops.exp(np.float32(0)) == 1
    assert loops.exp(np.float32(-math.inf)) == 0
    assert math.isnan(loops.exp(np.float32(math.nan)))


@pytest.mark.parametrize("length", [1, 3, 64, 71])
def test_the_largest_of_a_row(length):
    from sfiformer.attention.cpu import loops

    rng = np.random.default_rng(length)
    for shift in (-5, 0, 5):
        row = (rng.standard_normal(length) + shift).astype(np.float32)
        assert loops.largest(row) == row.max()
    assert loops.largest(np.full(length, -math.inf, np.float32)) == -math.inf
    row[-1] = math.inf
    assert loops.largest(row) == math.inf
    row[0] = math.nan  # a negative NaN may be passed over: what is made of it is NaN all the same
    assert math.isnan(loops.largest(row))
    assert loops.largest(np.array([-0.0, 0.0], np.float32)) == 0


def test_exponentials_are_as_exact_inside_a_loop():
    s = -torch.linspace(0, 86, 1000).view(1, 1, -1)
    z, _ = cpu.solve(s, torch.zeros_like(s), torch.tensor([1e-30]), math.inf, True, None)
    expected = s.double().exp()
    torch.testing.assert_close((z / z[..., :1]).double()[..., :800], expected[..., :800], rtol=5e-7, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("alpha", [0.1, math.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_flows(shape, alpha, scaling):
    s, u, lam = scores(shape)
    z, eta = cpu.solve(s, u, lam, alpha, scaling == "potential", None)
    expected = exact(s, u, lam, alpha, scaling)
    torch.testing.assert_close(z.double(), expected, rtol=1e-4, atol=1e-6)
    assert eta.shape == (*shape[:2], 1)
    apart = (z == 0) != (expected == 0)  # at most at ties of a friction with the potential
    assert (expected[apart] < 1e-6).all()
    assert apart.double().mean() < 1e-3


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_long_rows_are_as_exact_as_the_readme_says(spread, scaling):
    solved = 0
    for seed in range(6):
        s, u, lam = scores((1, 8, cpu.MOST), spread, seed)
        found = cpu.solve(
            s, u, lam / (cpu.MOST if scaling == "absolute" else 1), 0.1, scaling == "potential", None
        )
        if found is not None:
            expected = exact(s, u, lam / (cpu.MOST if scaling == "absolute" else 1), 0.1, scaling)
            assert (found[0] - expected).abs().sum(-1).max() < 2e-5
            solved += 1
    assert solved or spread > 1


def test_limits_are_those_of_the_plain_solver():
    from sfiformer.attention.cpu import loops
    from sfiformer.flow import rows

    assert (float(loops.GENTLE), float(loops.RANGE)) == (rows._GENTLE, pytest.approx(rows._RANGE))
    assert not cpu.usable(torch.zeros(1, 1, cpu.MOST + 1))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("alpha", [0.1, math.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, alpha, scaling):
    s, u, lam = scores(shape, seed=1)
    g = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    leaves = [x.double().requires_grad_() for x in (s, u, lam)]
    true = torch.autograd.grad((exact(*leaves, alpha, scaling) * g).sum(), leaves)
    _, eta = cpu.solve(s, u, lam, alpha, scaling == "potential", None)
    flows = exact(s, u, lam, alpha, scaling)
    of_log_kappa = cpu.gradients(s, u, lam, alpha, scaling == "potential", None, eta, g)
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
    assert (cpu.solve(s, u, lam, 0.1, False, None) is None) != wide


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("lam", [0.5, 0.0])
@pytest.mark.parametrize("spread", [1.0, 12.0])  # gentle rows, and many that are not
def test_attention_is_what_it_is_without(monkeypatch, spread, lam, scaling, dropout_p):
    monkeypatch.setattr("sfiformer.attention.few.MOST", 0)  # which draws a mask of its own
    results = []
    for with_loops in (True, False):
        if not with_loops:
            monkeypatch.setattr(cpu, "compiled", lambda: None)
        inputs = packed((7, 3, 12, 1, 40), heads=2, width=8, dtype=torch.float32)
        inputs = inputs._replace(q=inputs.q * spread).leaves()
        strength = torch.full((5,), lam, requires_grad=True)
        torch.manual_seed(0)
        out = attend(inputs, lam=strength, scaling=scaling, dropout_p=dropout_p)
        weight = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), (*inputs[:5], strength))))
    for got, expected in zip(*results, strict=True):
        size = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(got / size, expected / size, rtol=1e-3, atol=2e-4)


def test_dropout_leaves_what_it_keeps():
    s, u, lam = scores((2, 40, 71))
    keep = kept_entries(s.numel(), 0.4, 5)
    z, _ = cpu.solve(s, u, lam, 0.1, False, None)
    dropped, _ = cpu.solve(s, u, lam, 0.1, False, keep)
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
        z, eta = cpu.solve(s, u, lam, 0.1, False, None)
        grads = s.clone(), u.clone(), torch.linspace(-1, 1, s.numel()).view_as(s).clone()
        cpu.gradients(*grads[:2], lam, 0.1, False, None, eta, grads[2])
        found.append((z, eta, *grads))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def _total(_):
    s, u, lam = scores((5, 71, 71))
    return float(cpu.solve(s, u, lam, 0.1, False, None)[0].sum())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
def test_threads_of_a_forked_process_are_its_own(threads):
    threads(2)
    here = _total(0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map_async(_total, [0]).get(timeout=300) == [here]


def test_float64_and_other_devices_are_not_for_the_loops():
    assert cpu.usable(torch.zeros(1, 1, 1))
    assert not cpu.usable(torch.zeros(1, 1, 1, dtype=torch.float64))
    assert not cpu.usable(torch.zeros(1, 1, 1, device="meta"))


def test_a_numba_that_does_not_import_is_said_once_and_done_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "sfiformer.attention.cpu.loops", None)
    cpu.compiled.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Numba is not used"):
            assert not cpu.usable(torch.zeros(1, 1, 1))
        assert not cpu.usable(torch.zeros(1, 1, 1))
    finally:
        cpu.compiled.cache_clear()


def test_a_row_that_the_loops_decline_is_not_theirs_in_the_backward():
    """Scores that range over 87 and friction that is next to nothing: gentle to the plain solver alone."""
    inputs = packed((6,), heads=1, width=2, dtype=torch.float32)
    inputs = inputs._replace(q=inputs.q * 0 + 1, k=inputs.k * 0)
    inputs.k[0] = -88.0 / 2**0.5
    inputs = inputs.leaves()
    out = attend(inputs, lam=1e-38)
    for grad in torch.autograd.grad(out.sum(), inputs[:5]):
        assert grad.isfinite().all()
