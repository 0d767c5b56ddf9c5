"""The oracles agree with each other."""

import math

import numpy as np
import pytest

import oracles


def _softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


@pytest.mark.parametrize("alpha", [0.1, math.inf])
def test_plain_oracles_agree(alpha):
    rng = np.random.default_rng(0)
    for _ in range(5):
        s, u = rng.normal(size=(2, 6))
        r, f = _softmax(-s), _softmax(u)
        z = oracles.brute_force(r, f, 0.3, alpha)
        np.testing.assert_allclose(oracles.brute_force(r, f, 0.3, alpha, signs=(-1, 0, 1)), z, atol=1e-9)
        np.testing.assert_allclose(oracles.general_purpose(r, f, 0.3, alpha), z, atol=1e-6)
        np.testing.assert_allclose(oracles.PreciseRow(s, u).flows(0.3, alpha), z, atol=1e-9)


@pytest.mark.parametrize(("spread", "digits"), [(5, 120), (60, 420)])
def test_decimal_and_mpmath_agree(spread, digits):
    s, u = np.random.default_rng(1).normal(size=(2, 12)) * spread
    z = oracles.PreciseRow(s, u).flows(1 / 12, 0.1)
    np.testing.assert_allclose(z, oracles.mpmath_flows(s, u, 1 / 12, 0.1, digits), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("potential", [False, True])
def test_precise_gradients_are_slopes_of_the_precise_flows(potential):
    s, u, weight = np.random.default_rng(2).normal(size=(3, 7))

    def loss(s, u, lam):
        row = oracles.PreciseRow(s, u)
        flows = row.flows(row.potential_lam(lam), math.inf) if potential else row.flows(lam, 0.1)
        return float(np.dot(weight, flows))

    by_s, by_u, by_lam = oracles.PreciseRow(s, u).gradients(0.6, 0.1, weight, potential)
    step = 1e-6 * np.eye(7)
    slopes_s = [(loss(s + d, u, 0.6) - loss(s - d, u, 0.6)) / 2e-6 for d in step]
    slopes_u = [(loss(s, u + d, 0.6) - loss(s, u - d, 0.6)) / 2e-6 for d in step]
    np.testing.assert_allclose(by_s, slopes_s, atol=1e-8)
    np.testing.assert_allclose(by_u, slopes_u, atol=1e-8)
    assert by_lam == pytest.approx((loss(s, u, 0.6 + 1e-6) - loss(s, u, 0.6 - 1e-6)) / 2e-6, abs=1e-8)
