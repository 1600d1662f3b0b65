"""A smooth non-convex function of a matrix whose constants are known in every norm.

    f(X) = sum_ij h_ij phi(X_ij),   h = a b^T > 0,
    phi(y) = (y^2/2 + kappa (1 - cos(omega y)) / omega^2) / (1 + kappa)

phi'' = (1 + kappa cos(omega y)) / (1 + kappa) lies in [(1-kappa)/(1+kappa), 1] and is 1 at the minimizer 0: kappa = 0
is a quadratic, kappa > 1 makes f non-convex. f* = 0.

Smoothness ||grad f(X) - grad f(Y)||_* <= L ||X - Y||: a difference of gradients is h * s * (X - Y), entrywise, with
|s_ij| <= 1, so that L = max over ||D|| <= 1 of sum h_ij D_ij^2, attained at the minimizer. That is max h for the
Frobenius norm and sum h for l_inf. In the unit ball of the spectral norm the matrices D_ij^2 are doubly substochastic,
whose extreme points are partial permutations: L = max over permutations of sum h_{i,pi(i)}, and for h = a b^T the
sorted pairing sum a_i b_i (rearrangement inequality). All three are tight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmo_delay.bound import Constants
from lmo_delay.oracles import Geometry


@dataclass(frozen=True, slots=True)
class Problem:
    """The function and the noise of its gradients.

    Attributes:
        size: n of the n x n matrices.
        spread: a and b fall geometrically from 1 to 1/spread.
        ripple: kappa.
        frequency: omega.
        noise: sigma; a stochastic gradient has E||noise||_F^2 = sigma^2, Gaussian with equal entries.
        start: Entries of the starting point are uniform in +-[start/2, 3 start/2].
    """

    size: int = 5
    spread: float = 2.0
    ripple: float = 1.5
    frequency: float = 3.0
    noise: float = 1.0
    start: float = 1.0

    def curvature(self) -> Tensor:
        """h, (n, n), fp64."""
        side = torch.logspace(0.0, -1.0, self.size, base=self.spread, dtype=torch.float64)
        return torch.outer(side, side)

    def smoothness(self, geometry: Geometry) -> float:
        """L in the norm of a geometry."""
        curvature = self.curvature()
        if geometry.name == "sign":
            return float(curvature.sum())
        return float(curvature.max() if geometry.name == "normalized" else curvature.diagonal().sum())

    def constants(self, geometry: Geometry, seeds: int, seed: int) -> Constants:
        """L, Delta and rho sigma; Delta is the mean over the starting points that a run with this seed draws."""
        start = self.starting_points(seeds, torch.Generator().manual_seed(seed))
        noise = geometry.dual_over_frobenius(self.size, self.size) * self.noise
        return Constants(self.smoothness(geometry), float(self.value(start).mean()), noise)

    def value(self, weights: Tensor) -> Tensor:
        """f, (..., n, n) to (...)."""
        waves = (1.0 - torch.cos(self.frequency * weights)) / self.frequency**2
        phi = (0.5 * weights**2 + self.ripple * waves) / (1.0 + self.ripple)
        return (self.curvature() * phi).sum((-2, -1))

    def gradient(self, weights: Tensor, curvature: Tensor) -> Tensor:
        """The exact gradient, (..., n, n); ``curvature`` is h."""
        slope = weights + self.ripple / self.frequency * torch.sin(self.frequency * weights)
        return slope.mul_(curvature).div_(1.0 + self.ripple)

    def starting_points(self, seeds: int, generator: torch.Generator) -> Tensor:
        """(seeds, n, n), fp64."""
        shape = (seeds, self.size, self.size)
        uniform = 2.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1.0
        return self.start * (uniform + 0.5 * uniform.sign())

    def draw_noise(self, seeds: int, generator: torch.Generator) -> Tensor:
        """(seeds, n, n) with E||.||_F^2 = sigma^2 each."""
        shape = (seeds, self.size, self.size)
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(self.noise / self.size)
