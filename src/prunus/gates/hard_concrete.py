"""The hard concrete gate: a random number in [0, 1] that is exactly 0, or exactly 1, with positive probability.

Louizos, Welling and Kingma, "Learning Sparse Neural Networks through L0 Regularization" (seed 001, section 2.2 and
appendix B). In its letters: log alpha is the location, learned; beta is the temperature; the binary concrete variable s
on (0, 1) is stretched to s-bar on (gamma, zeta), and clamping s-bar to [0, 1] gives the gate z.

Two slips of the seeds are corrected here. 001 says that values of s above (1 - gamma) / (zeta - gamma) are rounded "to
zero": they become one, those below -gamma / (zeta - gamma) become zero. 002 writes step(L - log alpha) and
P(z != 0) = 1 - Q(z >= 0): the mathematics, and 001, say step(L + log alpha) and 1 - Q(s-bar <= 0).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from prunus.errors import PrunusError

Estimator = Literal["median", "noiseless"]


@dataclass(frozen=True)
class HardConcrete:
    """A hard concrete distribution, all but its location log alpha, which every method takes as a tensor.

    The methods are elementwise, broadcast, differentiable, and answer in the dtype they are asked in.

    Args:
        beta: temperature; below 1 the density is heaped up at the ends.
        gamma: where the stretched interval begins, below 0.
        zeta: where it ends, above 1.
        low: the least log alpha that `clamp_` leaves.
        high: the greatest.

    >>> gate = HardConcrete()
    >>> gate.median(torch.tensor([-3.0, 0.0, 3.0]))
    tensor([0.0000, 0.5000, 1.0000])
    >>> gate.p_active(torch.tensor([-3.0, 0.0, 3.0]))
    tensor([0.1976, 0.8318, 0.9900])
    """

    beta: float = 2 / 3
    gamma: float = -0.1
    zeta: float = 1.1
    low: float = math.log(1e-2)
    high: float = math.log(1e2)

    def __post_init__(self) -> None:
        if not (0 < self.beta < math.inf):
            raise PrunusError(f"The temperature beta must be positive and finite, not {self.beta}.")
        if not (-math.inf < self.gamma < 0):
            raise PrunusError(f"The stretched interval must begin below 0: gamma is {self.gamma}.")
        if not (1 < self.zeta < math.inf):
            raise PrunusError(f"The stretched interval must end above 1: zeta is {self.zeta}.")
        if not self.low < self.high:
            raise PrunusError(f"The bounds on log alpha must be in order: low is {self.low}, high is {self.high}.")
        _ = self._quadrature  # made now, so that no numpy is left to trace or to run in a captured step

    def pdf(self, x: Tensor, log_alpha: Tensor) -> Tensor:
        """Density of s-bar at `x`, 0 outside (gamma, zeta) (001, eq. 23 and 25).

        With Q the CDF, the density of eq. 23 is beta Q (1 - Q) / (s (1 - s)), which is how it is computed, in logs.

        >>> HardConcrete().pdf(torch.tensor([-0.2, 0.5, 1.2]), torch.tensor(0.0))
        tensor([0.0000, 0.5556, 0.0000])
        """
        x, outside = self._inside(x)
        below, above = x - self.gamma, self.zeta - x
        t = self.beta * (below.log() - above.log()) - log_alpha
        log_pdf = (
            torch.nn.functional.logsigmoid(t)
            + torch.nn.functional.logsigmoid(-t)
            - below.log()
            - above.log()
            + math.log(self.beta * (self.zeta - self.gamma))
        )
        return torch.where(outside, torch.zeros_like(log_pdf), log_pdf.exp())

    def cdf(self, x: Tensor, log_alpha: Tensor) -> Tensor:
        """P(s-bar <= x), 0 below the support and 1 above it (001, eq. 24 and 25).

        >>> HardConcrete().cdf(torch.tensor([-0.2, 0.0, 0.5, 1.0, 1.2]), torch.tensor(0.0))
        tensor([0.0000, 0.1682, 0.5000, 0.8318, 1.0000])
        """
        inner, outside = self._inside(x)
        t = self.beta * ((inner - self.gamma).log() - (self.zeta - inner).log()) - log_alpha
        return torch.where(outside, (x >= self.zeta).to(t.dtype), torch.sigmoid(t))

    def quantile(self, u: Tensor, log_alpha: Tensor) -> Tensor:
        """The x with `cdf(x, log_alpha) == u`: the inverse transform (001, eq. 29; it is s-bar of eq. 10).

        >>> gate, log_alpha = HardConcrete(), torch.tensor(1.0)
        >>> gate.cdf(gate.quantile(torch.tensor([0.1, 0.5, 0.9]), log_alpha), log_alpha)
        tensor([0.1000, 0.5000, 0.9000])
        """
        return self._stretch(torch.logit(u) + log_alpha, 1 / self.beta)

    def sample(self, log_alpha: Tensor, noise: Tensor) -> Tensor:
        """One gate z per element, from `noise` uniform on (0, 1) (001, eq. 10 and 11).

        The caller draws the noise, once a step for all gates of a model. A drawn 0 or 1 is harmless: the gate is then
        closed or open, with gradient zero.

        >>> HardConcrete().sample(torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.1, 0.4, 0.9]))
        tensor([0.0000, 0.3230, 1.0000])
        """
        return self.quantile(noise, log_alpha).clamp(0, 1)

    def draw(self, log_alpha: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The same sample as `sample` without a graph, for the hot path: z, and s, from which `slope` continues.

        `noise` is used up: it becomes its own logit, from which `drawn` draws the same again.
        """
        s = torch.add(noise.logit_(), log_alpha).mul_(1 / self.beta).sigmoid_()
        return s.mul(self.zeta - self.gamma).add_(self.gamma).clamp_(0, 1), s

    def drawn(self, log_alpha: Tensor, logit: Tensor) -> Tensor:
        """The same sample from the noise's logit, for autograd to record."""
        return self._stretch(logit + log_alpha, 1 / self.beta).clamp(0, 1)

    def slope(self, grad: Tensor, z: Tensor, s: Tensor) -> Tensor:
        """grad times dz / d log alpha: (zeta - gamma) s (1 - s) / beta where 0 < z < 1, zero at its ends.

        >>> gate, x = HardConcrete(), torch.tensor([0.0, 0.0])
        >>> z, s = gate.draw(x, torch.tensor([0.1, 0.5]))
        >>> z.tolist(), [round(v, 4) for v in gate.slope(torch.ones(2), z, s).tolist()]
        ([0.0, 0.5], [0.0, 0.45])
        """
        inside = torch.ops.aten.hardtanh_backward(grad, z, 0.0, 1.0)
        return torch.ops.aten.sigmoid_backward(inside, s) * ((self.zeta - self.gamma) / self.beta)

    def p_active(self, log_alpha: Tensor) -> Tensor:
        """P(z != 0) = sigmoid(log alpha - beta log(-gamma / zeta)) (001, eq. 12; 004, eq. 4).

        >>> HardConcrete().p_active(torch.tensor([-1.5986, 0.0]))
        tensor([0.5000, 0.8318])
        """
        return torch.sigmoid(log_alpha - self._location_at_zero)

    def p_one(self, log_alpha: Tensor) -> Tensor:
        """P(z = 1) = 1 - Q(1) = sigmoid(log alpha - beta log((1 - gamma) / (zeta - 1))) (001, eq. 26).

        >>> HardConcrete().p_one(torch.tensor([0.0, 1.5986]))
        tensor([0.1682, 0.5000])
        """
        return torch.sigmoid(log_alpha - self._location_at_one)

    def expectation(self, log_alpha: Tensor) -> Tensor:
        """E[z], the integral of P(s-bar > x) over x from 0 to 1 (figure 2b of 001; no equation there).

        With x - gamma = t^3 (zeta - x) the integrand is rational in t at beta = 2/3, so a closed form in logarithms
        and arctangents exists there. It cancels badly at large |log alpha|, so it serves as the tests' reference, and
        what runs is Gauss-Legendre quadrature over y = logit(s), for every beta. Its terms are all positive and the
        integrand's nearest poles, at +-i pi and (log alpha +- i pi) / beta, set the number of nodes (17 by default):
        relative error about 1e-14 in float64. The loop is over nodes, so memory stays that of log alpha.

        >>> HardConcrete().expectation(torch.tensor([-20.0, 0.0, 20.0], dtype=torch.float64))
        tensor([2.7615e-09, 5.0000e-01, 1.0000e+00], dtype=torch.float64)
        """
        total = torch.zeros_like(log_alpha)
        for location, weight in self._quadrature:
            total = torch.add(total, torch.sigmoid(log_alpha - location), alpha=weight)
        return total.clamp(max=1)

    def median(self, log_alpha: Tensor) -> Tensor:
        """The median of z: clamp(sigmoid(log alpha / beta)(zeta - gamma) + gamma, 0, 1).

        It is the test-time gate of the authors' later code, and non-zero exactly where P(z != 0) > 1/2.

        >>> HardConcrete().median(torch.tensor([-2.0, -1.0, 0.0]))
        tensor([0.0000, 0.1189, 0.5000])
        """
        return self._stretch(log_alpha, 1 / self.beta).clamp(0, 1)

    def noiseless(self, log_alpha: Tensor) -> Tensor:
        """The test-time gate as published: clamp(sigmoid(log alpha)(zeta - gamma) + gamma, 0, 1) (001, eq. 13).

        Eq. 13 leaves out the temperature of eq. 10, so this is not the median unless beta is 1.

        >>> HardConcrete().noiseless(torch.tensor([-2.0, -1.0, 0.0]))
        tensor([0.0430, 0.2227, 0.5000])
        """
        return self._stretch(log_alpha, 1.0).clamp(0, 1)

    def estimate(self, log_alpha: Tensor, how: Estimator = "median") -> Tensor:
        """The test-time gate: `median` or `noiseless`, by name.

        >>> HardConcrete().estimate(torch.tensor([-2.0]), "noiseless")
        tensor([0.0430])
        """
        return self.median(log_alpha) if _known(how) == "median" else self.noiseless(log_alpha)

    def threshold(self, how: Estimator = "median") -> float:
        """The log alpha above which the test-time gate is non-zero.

        sigmoid(t)(zeta - gamma) + gamma > 0 where t > log(-gamma / zeta); t is log alpha / beta for the median, and
        log alpha for the noiseless gate.

        >>> gate = HardConcrete()
        >>> f"{gate.threshold():.4f} {gate.threshold('noiseless'):.4f}"
        '-1.5986 -2.3979'
        """
        return self._location_at_zero if _known(how) == "median" else self._location_at_zero / self.beta

    def clamp_(self, log_alpha: Tensor) -> Tensor:
        """Put `log_alpha` into [low, high] in place, unseen by autograd, and return it; to call after each step.

        >>> HardConcrete().clamp_(torch.tensor([-9.0, 1.0, 9.0]))
        tensor([-4.6052,  1.0000,  4.6052])
        """
        log_alpha.data.clamp_(self.low, self.high)
        return log_alpha

    def locate(self, keep: float) -> float:
        """The papers' initial location for an initial keep probability: log(keep / (1 - keep)).

        `keep` is the probability that the unstretched s exceeds 1/2. The stretching and rounding open more gates than
        that: `p_active` at this location is larger than `keep`, at the defaults 0.83 for 0.5.

        >>> gate = HardConcrete()
        >>> round(gate.locate(0.8), 4), round(gate.p_active(torch.tensor(gate.locate(0.5))).item(), 4)
        (1.3863, 0.8318)
        """
        if not 0 < keep < 1:
            raise PrunusError(f"An initial keep probability lies strictly between 0 and 1: {keep} does not.")
        return math.log(keep) - math.log1p(-keep)

    @cached_property
    def _location_at_zero(self) -> float:
        """The log alpha at which s-bar = 0 is the median."""
        return self.beta * math.log(-self.gamma / self.zeta)

    @cached_property
    def _location_at_one(self) -> float:
        """The log alpha at which s-bar = 1 is the median."""
        return self.beta * math.log((1 - self.gamma) / (self.zeta - 1))

    @cached_property
    def _quadrature(self) -> tuple[tuple[float, float], ...]:
        """Pairs (l, w) with E[z] = sum of w sigmoid(log alpha - l): Gauss-Legendre over y = logit(s), l = beta y."""
        start, end = self._location_at_zero / self.beta, self._location_at_one / self.beta
        half = (end - start) / 2
        nearest = math.pi * min(1.0, 1 / self.beta) / half  # the nearest pole's height over [-1, 1]
        # The error falls as rho^(-2n), rho = p + sqrt(1 + p^2) for a pole at height p; asinh(p) is log rho.
        count = math.ceil(-math.log(1e-16) / (2 * math.asinh(nearest)))
        nodes, weights = np.polynomial.legendre.leggauss(count)
        y = start + half * (nodes + 1)
        s = 1 / (1 + np.exp(-y))
        weights = weights * half * (self.zeta - self.gamma) * s * (1 - s)
        weights /= weights.sum()  # the integral of dx over [0, 1] is 1
        return tuple(zip((self.beta * y).tolist(), weights.tolist(), strict=True))

    def _stretch(self, location: Tensor, slope: float) -> Tensor:
        return torch.sigmoid(location * slope) * (self.zeta - self.gamma) + self.gamma

    def _inside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` with what lies outside the support moved to its middle, so that no gradient is nan; and the mask."""
        outside = (x <= self.gamma) | (x >= self.zeta)
        return torch.where(outside, torch.full_like(x, (self.gamma + self.zeta) / 2), x), outside


def _known(how: str) -> str:
    if how not in get_args(Estimator):
        raise PrunusError(f"A test-time gate is 'median' or 'noiseless', not {how!r}.")
    return how
