"""The method: momentum, a linear minimization oracle, a delay and error feedback, many runs in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmo_delay.oracles import Geometry
from lmo_delay.problems import Problem
from megatron_async.optimizer.error_feedback import calculate_error_feedback

WriteWeights = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Arm:
    """One variant.

    Attributes:
        delay: tau; update k uses a gradient at x_{max(k - tau, 0)}.
        coefficient: c of the error feedback.
    """

    delay: int
    coefficient: float

    @property
    def label(self) -> str:
        """As in the tables."""
        return f"delay {self.delay}" + (f", EF c={self.coefficient:g}" if self.coefficient else "")


ARMS = (Arm(0, 0.0), Arm(0, 1.0), Arm(1, 0.0), Arm(1, 1.0), Arm(2, 0.0), Arm(2, 1.0), Arm(2, 2.0))
"""Delay 0, 1 and 2 without and with the published coefficient, and delay 2 with c = tau."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over all steps of each run; every tensor has shape (arms, seeds) unless said.

    Attributes:
        gradient_z: ||grad f(z_k)||_*.
        gradient_x: ||grad f(x_k)||_*.
        displacement: ||x_{k-tau} - z_k|| / t: how far the gradient is taken from where its update starts, in steps.
        initial_value: f(x_0), which has f* = 0 as its lower bound; (seeds,).
    """

    gradient_z: Tensor
    gradient_x: Tensor
    displacement: Tensor
    initial_value: Tensor


def run(
    problem: Problem,
    geometry: Geometry,
    arms: Sequence[Arm],
    *,
    steps: int,
    step_size: float,
    alpha: float,
    seeds: int,
    seed: int = 0,
    write_weights: WriteWeights = calculate_error_feedback,
) -> Measured:
    """Run all arms on all seeds; arms of one seed share starting point and noise.

    z_{k+1} = z_k - t D_k with D_k the oracle of m_k = (1 - alpha) m_{k-1} + alpha g_k, m_0 = g_0, and x_{k+1} from
    ``write_weights``, for k = 0 ... steps - 1.

    Args:
        problem: Function and noise.
        geometry: Norm and oracle.
        arms: Variants.
        steps: K.
        step_size: t, the norm of every update.
        alpha: 1 - beta, weight of the newest gradient in the momentum.
        seeds: Independent runs of every arm.
        seed: Of starting points and noise.
        write_weights: Makes x_{k+1} of (z_k, z_{k+1}, c, out=).
    """
    generator = torch.Generator().manual_seed(seed)
    curvature = problem.curvature()
    start = problem.starting_points(seeds, generator)
    z = start.expand(len(arms), -1, -1, -1).clone()
    history = [z.clone()]
    momentum = torch.zeros_like(z)
    depth = max(arm.delay for arm in arms)
    sums = torch.zeros(3, len(arms), seeds, dtype=torch.float64)
    for k in range(steps):
        read = torch.stack([history[min(arm.delay, len(history) - 1)][i] for i, arm in enumerate(arms)])
        gradient = problem.gradient(read, curvature)
        if problem.noise:
            gradient += problem.draw_noise(seeds, generator)
        momentum.lerp_(gradient, alpha if k else 1.0)
        sums[0] += geometry.dual(problem.gradient(z, curvature))
        sums[1] += geometry.dual(problem.gradient(history[0], curvature))
        sums[2] += geometry.norm(read - z) / step_size
        after = z - step_size * geometry.oracle(momentum)
        x = torch.empty_like(z)
        for i, arm in enumerate(arms):
            write_weights(z[i], after[i], arm.coefficient, out=x[i])
        history = [x, *history[:depth]]
        z = after
    return Measured(*(sums / steps), problem.value(start))
