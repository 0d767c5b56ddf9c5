"""Other ways to the flows of least energy, and to Ã. Nothing here shares code with what it is to judge.

min_z  ½ Σ_j r_j z_j²  +  λ Σ_j f_j |z_j|  +  (α/2)(Σ_j z_j − 1)²          (α = ∞: Σ z = 1)
"""

from __future__ import annotations

import decimal
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from decimal import Decimal
from functools import cache

import mpmath
import numpy as np
import torch
from scipy import optimize


def energy(z: np.ndarray, r: np.ndarray, f: np.ndarray, lam: float, alpha: float) -> np.ndarray:
    """The energy of flows [..., n]; under the hard constraint the penalty is left out."""
    penalty = 0.0 if math.isinf(alpha) else alpha / 2 * (z.sum(-1) - 1) ** 2
    return (r * z * z).sum(-1) / 2 + lam * (f * np.abs(z)).sum(-1) + penalty


def brute_force(r: np.ndarray, f: np.ndarray, lam: float, alpha: float, signs=(0, 1)) -> np.ndarray:
    """The best stationary point over every sign pattern: signs (0, 1) are active sets, (−1, 0, 1) assume nothing."""
    r, f = (np.asarray(x, dtype=np.longdouble) for x in (r, f))
    patterns = np.array(list(itertools.product(signs, repeat=len(r))), dtype=np.longdouble)
    if math.isinf(alpha):
        patterns = patterns[patterns.any(1)]
    conductance = np.abs(patterns) / r
    leak = 0 if math.isinf(alpha) else 1 / np.longdouble(alpha)
    mu = (1 + lam * (conductance * patterns * f).sum(1)) / (conductance.sum(1) + leak)
    z = (mu[:, None] - lam * patterns * f) * conductance
    possible = (z * patterns >= 0).all(1)
    z = z[possible]
    return z[energy(z, r, f, lam, alpha).argmin()].astype(float)


def general_purpose(r: np.ndarray, f: np.ndarray, lam: float, alpha: float) -> np.ndarray:
    """By SciPy: non-negative least squares under the penalty, sequential quadratic programming under the constraint."""
    n, root = len(r), np.sqrt(r)
    if not math.isinf(alpha):
        rows = np.vstack([np.diag(root), np.full((1, n), math.sqrt(alpha))])
        return optimize.nnls(rows, np.append(-lam * f / root, math.sqrt(alpha)), maxiter=100 * n)[0]
    found = optimize.minimize(
        lambda x: n * energy(x, r, f, lam, alpha),
        np.full(n, 1 / n),
        jac=lambda x: n * (r * x + lam * f),
        bounds=[(0, None)] * n,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: np.ones((1, n))},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    return found.x


def mpmath_flows(
    s: Sequence[float], u: Sequence[float], lam: float, alpha: float, digits: int
) -> list[float]:
    """Flows for r = softmax(−s), f = softmax(u), by halving an interval around μ in mpmath's arithmetic."""
    with mpmath.workdps(digits):
        resistance = [mpmath.exp(-mpmath.mpf(x)) for x in s]
        friction = [mpmath.exp(mpmath.mpf(x)) for x in u]
        resistance = [x / mpmath.fsum(resistance) for x in resistance]
        friction = [x / mpmath.fsum(friction) for x in friction]
        low, high = mpmath.mpf(0), mpmath.mpf(1) + mpmath.mpf(lam)
        for _ in range(int(digits * 3.3)):
            mu = (low + high) / 2
            z = [max(mu - lam * f, 0) / r for r, f in zip(resistance, friction, strict=True)]
            if mpmath.fsum(z) + mu / mpmath.mpf(alpha) < 1:
                low = mu
            else:
                high = mu
        return [float(x) for x in z]


class PreciseRow:
    """One row of scores in as many decimal digits as their range asks for: flows and gradients from the plain formulas.

    s.d. 60 needs about 400 digits, s.d. 200 over 1,000. What does not depend on λ and α is worked out once.
    """

    def __init__(self, s: Sequence[float], u: Sequence[float]) -> None:
        self.count = len(s)
        ranges = 2 * (max(s) - min(s)) + max(u) - min(u)
        self.digits = 100 * (1 + int((ranges / math.log(10) + 50) / 100))
        with self._arithmetic():
            weights, frictions = ([_exp(x, self.digits) for x in row] for row in (s, u))
            inverse = [1 / x for x in weights]
            total, inverse_total, friction_total = sum(weights), sum(inverse), sum(frictions)
            self.log_range = total * inverse_total  # C = Σ e^s · Σ e^−s
            self.softmax = [x / total for x in weights]
            self.resistance = [x / inverse_total for x in inverse]
            self.conductance = [x * inverse_total for x in weights]
            self.friction = [x / friction_total for x in frictions]
            self.order = sorted(range(self.count), key=lambda j: u[j])
            self._accumulate()

    def _accumulate(self) -> None:
        """Sums over the keys of less friction, and at which 1/λ each key begins to carry flow under the hard constraint."""
        conductance = carried = Decimal(0)
        self.conductances, self.carried, self.onset = [], [], []
        for j in self.order:
            self.onset.append(self.friction[j] * conductance - carried)
            conductance += self.conductance[j]
            carried += self.conductance[j] * self.friction[j]
            self.conductances.append(conductance)
            self.carried.append(carried)

    def flows(self, lam: float | Decimal, alpha: float) -> list[float]:
        with self._arithmetic():
            flows = self._flows(Decimal(lam), _inverse(alpha))[0]
            return [_float(x) for x in flows]

    def potential_lam(self, lam: float) -> Decimal:
        """λ = λ* n / C."""
        with self._arithmetic():
            return Decimal(lam) * self.count / self.log_range

    def gradients(
        self, lam: float, alpha: float, weight: Sequence[float], potential: bool = False
    ) -> tuple[list[float], list[float], float]:
        """Derivatives of Σ_j weight_j z_j by s, by u and by lam."""
        with self._arithmetic():
            strength = self.potential_lam(lam) if potential else Decimal(lam)
            leak = Decimal(0) if potential else _inverse(alpha)
            z, _mu, active = self._flows(strength, leak)
            g = [Decimal(x) for x in weight]
            if not active:
                return [0.0] * self.count, [0.0] * self.count, 0.0
            mean = sum(g[j] * self.conductance[j] for j in active) / (
                sum(self.conductance[j] for j in active) + leak
            )
            moved = [Decimal(0)] * self.count  # (g_j − ḡ)/r_j on the active set
            for j in active:
                moved[j] = (g[j] - mean) * self.conductance[j]
            by_lam = -sum(x * f for x, f in zip(moved, self.friction, strict=True))
            through = [(g[j] - mean) * z[j] for j in range(self.count)]
            total = sum(through)
            by_s = [x - r * total for x, r in zip(through, self.resistance, strict=True)]
            by_u = [
                f * (-strength * x - strength * by_lam) for x, f in zip(moved, self.friction, strict=True)
            ]
            if potential:
                by_s = [
                    x - by_lam * strength * (p - r)
                    for x, p, r in zip(by_s, self.softmax, self.resistance, strict=True)
                ]
                by_lam = by_lam * self.count / self.log_range
            return [_float(x) for x in by_s], [_float(x) for x in by_u], _float(by_lam)

    def _flows(self, lam: Decimal, leak: Decimal) -> tuple[list[Decimal], Decimal, list[int]]:
        def carries(place: int) -> bool:
            return lam * (self.onset[place] + self.friction[self.order[place]] * leak) < 1

        count = bisect_left(range(self.count), True, key=lambda place: not carries(place))
        flows = [Decimal(0)] * self.count
        if count == 0:
            return flows, Decimal(0), []
        mu = (1 + lam * self.carried[count - 1]) / (self.conductances[count - 1] + leak)
        active = self.order[:count]
        for j in active:
            flows[j] = (mu - lam * self.friction[j]) * self.conductance[j]
        return flows, mu, active

    def _arithmetic(self):
        return decimal.localcontext(
            prec=self.digits, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, rounding=decimal.ROUND_HALF_EVEN
        )


def _inverse(alpha: float) -> Decimal:
    return Decimal(0) if math.isinf(alpha) else 1 / Decimal(alpha)


def _float(x: Decimal) -> float:
    with decimal.localcontext(prec=25):
        return float(+x)


@cache
def _exp_of_power_of_two(exponent: int, digits: int) -> Decimal:
    with decimal.localcontext(prec=digits + 20):
        return (Decimal(2) ** exponent).exp()


def _exp(x: float, digits: int) -> Decimal:
    """e^x of a binary number: one factor for each bit that is set."""
    numerator, denominator = abs(float(x)).as_integer_ratio()
    shift = 1 - denominator.bit_length()
    result = Decimal(1)
    while numerator:
        low = numerator & -numerator
        result *= _exp_of_power_of_two(low.bit_length() - 1 + shift, digits)
        numerator ^= low
    return 1 / result if x < 0 else result


def dense_adjacency(edge_index: torch.Tensor, nodes: int) -> torch.Tensor:
    """Ã_ij = (A + I)_ij / √(d_i d_j) over edges j → i, in-degrees of A + I, by loops."""
    linked = torch.eye(nodes, dtype=torch.float64)
    for source, target in edge_index.T.tolist():
        linked[target, source] = 1
    degree = linked.sum(1)
    return linked / (degree[:, None] * degree).sqrt()
