"""The guarantee of docs/theory.md in numbers: step size, momentum, and every term of the bound.

Setting: ||grad f(x) - grad f(y)||_* <= L ||x - y||, f >= f*, Delta = f(x_0) - f*, gradients with independent noise of
E||.||_F^2 <= sigma^2, ||.||_* <= rho ||.||_F. Method: m_0 = g_0, m_k = (1 - alpha) m_{k-1} + alpha g_k with g_k taken
at x_{max(k - tau, 0)}; z_{k+1} = z_k - t D_k with D_k the exact oracle of m_k; x_{k+1} = z_{k+1} - c (z_k - z_{k+1}).
Then the mean over k = 0 ... K-1 of E||grad f(z_k)||_* is at most the sum of :class:`Bound`'s terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """What the guarantee depends on.

    Attributes:
        smoothness: L, in the norm of the oracle.
        initial_gap: Delta.
        noise: rho sigma, the noise in the dual norm.
    """

    smoothness: float
    initial_gap: float
    noise: float


@dataclass(frozen=True, slots=True)
class Settings:
    """t and alpha for a number of steps K."""

    steps: int
    step_size: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Bound:
    """The terms of the bound, in units of the dual norm of a gradient.

    Attributes:
        initial: Delta / (t K).
        curvature: L t / 2, from the descent lemma.
        momentum: 2 L t beta / alpha: the gradients in the momentum are beta / alpha steps old in the mean.
        noise: 2 rho sigma (1 / (alpha K) + sqrt(alpha / (1 + beta))).
        delay: 2 L t (tau + c).
        feedback: L c t, the difference between x and z; only for the gradient at x.
    """

    initial: float
    curvature: float
    momentum: float
    noise: float
    delay: float
    feedback: float

    @property
    def at_z(self) -> float:
        """Bound on the mean of E||grad f(z_k)||_*."""
        return self.initial + self.curvature + self.momentum + self.noise + self.delay

    @property
    def at_x(self) -> float:
        """Bound on the mean of E||grad f(x_k)||_*."""
        return self.at_z + self.feedback


def prescribe(constants: Constants, steps: int, alpha: float | None = None) -> Settings:
    """t and alpha that balance the bound without delay.

    alpha = min(1, 2 sqrt(L Delta) / (rho sigma sqrt(K))), t = sqrt(Delta / (K L (1/2 + 2 beta / alpha))). Delayed
    arms use the same values: nothing is tuned for the delay.

    Args:
        constants: L, Delta and rho sigma.
        steps: K.
        alpha: Fixes the momentum instead.
    """
    energy = constants.smoothness * constants.initial_gap
    if alpha is None:
        alpha = min(1.0, 2.0 * math.sqrt(energy / steps) / constants.noise) if constants.noise else 1.0
    lag = 0.5 + 2.0 * (1.0 - alpha) / alpha
    return Settings(steps, math.sqrt(constants.initial_gap / (steps * constants.smoothness * lag)), alpha)


def evaluate(constants: Constants, settings: Settings, delay: int, coefficient: float) -> Bound:
    """All terms for t, alpha and K, a delay tau and the coefficient c of the error feedback."""
    smooth, t, alpha = constants.smoothness, settings.step_size, settings.alpha
    beta = 1.0 - alpha
    return Bound(
        initial=constants.initial_gap / (t * settings.steps),
        curvature=smooth * t / 2.0,
        momentum=2.0 * smooth * t * beta / alpha,
        noise=2.0 * constants.noise * (1.0 / (alpha * settings.steps) + math.sqrt(alpha / (1.0 + beta))),
        delay=2.0 * smooth * t * (delay + coefficient),
        feedback=smooth * coefficient * t,
    )


def corollary(constants: Constants, steps: int, delay: int, coefficient: float) -> float:
    """Closed form of the bound at z for the prescribed t and alpha <= 1/2; its leading term is of order K^(-1/4).

    (2 + 2 sqrt 2) E^(1/4) N^(1/2) K^(-1/4) + N^2 E^(-1/2) K^(-1/2) + 2 sqrt 2 (tau + c) E^(3/4) N^(-1/2) K^(-3/4)
    with E = L Delta and N = rho sigma.

    Raises:
        ValueError: If K < 16 E / N^2, where alpha would exceed 1/2.
    """
    energy, noise = constants.smoothness * constants.initial_gap, constants.noise
    if steps * noise**2 < 16.0 * energy:
        raise ValueError(f"the corollary needs K >= 16 L Delta / (rho sigma)^2, but K is {steps}")
    leading = (2.0 + 2.0 * math.sqrt(2.0)) * energy**0.25 * math.sqrt(noise) * steps**-0.25
    middle = noise**2 / math.sqrt(energy * steps)
    lag = 2.0 * math.sqrt(2.0) * (delay + coefficient) * energy**0.75 / math.sqrt(noise) * steps**-0.75
    return leading + middle + lag
