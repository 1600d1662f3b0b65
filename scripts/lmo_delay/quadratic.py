"""Heavy-ball SGD with one step of delay on f(x) = a x^2 / 2: characteristic polynomials and stability limits.

With h = lr a, m_k = beta m_{k-1} + g_k and u_k = lr m_k, the plain iterate obeys

    no delay            lambda^2 - (1 + beta - h) lambda + beta = 0
    delay 1, feedback c lambda^3 - (1 + beta) lambda^2 + (beta + (1 + c) h) lambda - c h = 0

and c = 0 is delay without feedback. docs/theory.md derives them.
"""

from __future__ import annotations

import math

import numpy as np


def characteristic_polynomial(h: float, momentum: float, *, delayed: bool, coefficient: float = 0.0) -> list[float]:
    """Coefficients of the characteristic polynomial, highest power first."""
    if not delayed:
        if coefficient:
            raise ValueError(f"error feedback corrects a delay: coefficient {coefficient} without one")
        return [1.0, -(1.0 + momentum - h), momentum]
    return [1.0, -(1.0 + momentum), momentum + (1.0 + coefficient) * h, -coefficient * h]


def spectral_radius(h: float, momentum: float, *, delayed: bool, coefficient: float = 0.0) -> float:
    """Largest modulus of a root: the factor by which a step shrinks the slowest mode."""
    roots = np.roots(characteristic_polynomial(h, momentum, delayed=delayed, coefficient=coefficient))
    return float(np.abs(roots).max())


def largest_stable(momentum: float, *, delayed: bool, coefficient: float = 0.0) -> float:
    """Supremum of the h for which the iteration is stable, in closed form.

    2 (1 + beta) without delay. With it, the condition |1 - a0^2| > |a1 - a0 a2| of Jury's test binds:
    c^2 h^2 + (1 - beta c) h - (1 - beta) < 0. Valid for 0 <= beta < 1 and 0 <= c <= 1.
    """
    if not delayed:
        return 2.0 * (1.0 + momentum)
    if coefficient == 0.0:
        return 1.0 - momentum
    linear = 1.0 - momentum * coefficient
    root = math.sqrt(linear**2 + 4.0 * coefficient**2 * (1.0 - momentum))
    return (root - linear) / (2.0 * coefficient**2)


def simulate(h: float, momentum: float, *, delayed: bool, coefficient: float = 0.0, steps: int = 4000) -> float:
    """|z| after some steps from z = 1, of the method itself rather than its polynomial (a = 1, lr = h)."""
    z, x, older, velocity = 1.0, 1.0, 1.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + (older if delayed else x)
        update = h * velocity
        z = z - update
        older, x = x, z - coefficient * update
        if abs(z) > 1e100:
            break
    return abs(z)
