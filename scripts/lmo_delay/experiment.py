"""Runs of all arms over a range of K, fits of the exponents, and what must hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from lmo_delay.bound import Bound, Constants, Settings, evaluate, prescribe
from lmo_delay.method import ARMS, Arm, Measured, run
from lmo_delay.oracles import GEOMETRIES, Geometry
from lmo_delay.problems import Problem


@dataclass(frozen=True, slots=True)
class Regime:
    """Noise and momentum of a series of runs.

    Attributes:
        name: As in tables and JSON.
        noisy: Whether gradients have noise.
        alpha: 1 - beta; None: as the guarantee prescribes for each K (1 without noise).
        exponent: Of K in the leading term of the bound.
        same_order: Whether the delay term of the bound is of the leading order too.
    """

    name: str
    noisy: bool
    alpha: float | None
    exponent: float
    same_order: bool

    @property
    def has_momentum(self) -> bool:
        """Whether alpha is below 1."""
        return self.noisy or self.alpha is not None


REGIMES = (
    Regime("noise", True, None, -0.25, False),
    Regime("deterministic", False, None, -0.5, True),
    Regime("deterministic, beta 0.9", False, 0.1, -0.5, True),
)
"""Gradient noise with the prescribed momentum, none without momentum, and none with a fixed momentum."""


@dataclass(frozen=True, slots=True)
class Point:
    """One arm at one K.

    Attributes:
        gradient_z: Mean over steps of ||grad f(z_k)||_*, one number a seed.
        gradient_x: The same at x_k.
        gap: gradient_z minus that of delay 0 without feedback, same seed, same noise.
        displacement: Mean of ||x_{k-tau} - z_k|| / t over steps and seeds.
        bound: What the guarantee promises; None where the oracle is inexact.
    """

    gradient_z: list[float]
    gradient_x: list[float]
    gap: list[float]
    displacement: float
    bound: Bound | None


@dataclass(frozen=True, slots=True)
class Series:
    """All points of one regime and geometry.

    Attributes:
        regime: Noise and momentum.
        geometry: Norm and oracle.
        constants: L, Delta (mean over seeds) and rho sigma.
        settings: One for each K, in increasing order.
        points: For each arm, one for each K.
    """

    regime: Regime
    geometry: Geometry
    constants: Constants
    settings: list[Settings]
    points: dict[Arm, list[Point]]

    def slope(self, arm: Arm) -> tuple[float, float]:
        """Exponent of K in gradient_z: mean and standard deviation over seeds."""
        values = np.array([point.gradient_z for point in self.points[arm]])
        slopes = [fit_exponent(self.steps, column) for column in values.T]
        return float(np.mean(slopes)), float(np.std(slopes, ddof=1))

    def bound_slope(self, arm: Arm) -> float | None:
        """Exponent of K in the bound over the same K, lower-order terms included."""
        bounds = [point.bound.at_z for point in self.points[arm] if point.bound is not None]
        return fit_exponent(self.steps, bounds) if bounds else None

    def gap_slope(self, arm: Arm) -> tuple[float, float] | None:
        """Exponent of K in the gap to delay 0, with its jackknife standard error over seeds.

        Only K whose mean gap is at least three standard errors count; None if fewer than four are left.
        """
        gaps = np.array([point.gap for point in self.points[arm]])
        seeds = gaps.shape[1]
        mean, error = gaps.mean(1), gaps.std(1, ddof=1) / math.sqrt(seeds)
        seen = (mean > 0.0) & (mean >= 3.0 * error)
        if seen.sum() < 4:
            return None
        gaps, steps = gaps[seen], np.array(self.steps)[seen]
        left_out = (gaps.sum(1, keepdims=True) - gaps) / (seeds - 1)
        slopes = np.array([fit_exponent(steps, column) for column in left_out.T])
        return fit_exponent(steps, gaps.mean(1)), float(math.sqrt((seeds - 1) * slopes.var()))

    @property
    def steps(self) -> list[int]:
        """Every K."""
        return [settings.steps for settings in self.settings]


def fit_exponent(steps: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> float:
    """Slope of the least-squares line through (log K, log value)."""
    return float(np.polyfit(np.log(np.asarray(steps, dtype=float)), np.log(np.asarray(values)), 1)[0])


def measure(
    problem: Problem,
    regime: Regime,
    geometry: Geometry,
    steps: Sequence[int],
    *,
    seeds: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Series:
    """Run every arm at every K.

    Args:
        problem: Its noise is dropped in a regime without noise.
        regime: Noise and momentum.
        geometry: Norm and oracle.
        steps: Every K, increasing.
        seeds: Runs of every arm, at least 2.
        seed: Of starting points and noise.
        progress: Called with every K before it runs.
    """
    problem = problem if regime.noisy else replace(problem, noise=0.0)
    constants = problem.constants(geometry, seeds, seed)
    series = Series(regime, geometry, constants, [], {arm: [] for arm in ARMS})
    for count in steps:
        progress(count)
        settings = prescribe(constants, count, regime.alpha)
        measured = run(
            problem,
            geometry,
            ARMS,
            steps=count,
            step_size=settings.step_size,
            alpha=settings.alpha,
            seeds=seeds,
            seed=seed,
        )
        series.settings.append(settings)
        for i, arm in enumerate(ARMS):
            series.points[arm].append(_point(measured, i, arm, series, settings))
    return series


def _point(measured: Measured, row: int, arm: Arm, series: Series, settings: Settings) -> Point:
    def numbers(tensor: Tensor) -> list[float]:
        return [float(value) for value in tensor]

    bound = evaluate(series.constants, settings, arm.delay, arm.coefficient) if series.geometry.exact else None
    return Point(
        gradient_z=numbers(measured.gradient_z[row]),
        gradient_x=numbers(measured.gradient_x[row]),
        gap=numbers(measured.gradient_z[row] - measured.gradient_z[0]),
        displacement=float(measured.displacement[row].mean()),
        bound=bound,
    )


def failures(series: Series) -> list[str]:
    """What the measurement shows against the guarantee; empty if it agrees with all of it."""
    found = []
    where = f"{series.geometry.name}, {series.regime.name}"
    base = series.slope(ARMS[0])[0]
    if abs(base - series.regime.exponent) > (0.1 if series.regime.same_order else 0.07):
        found.append(f"{where}: without delay the exponent of K is {base:.3f}, not {series.regime.exponent}")
    for arm, points in series.points.items():
        label = f"{where}, {arm.label}"
        slope = series.slope(arm)[0]
        if abs(slope - base) > (0.08 if series.regime.same_order else 0.02):
            found.append(f"{label}: exponent {slope:.3f}, but {base:.3f} without delay")
        for settings, point in zip(series.settings, points, strict=True):
            found += [f"{label}, K = {settings.steps}: {text}" for text in _point_failures(arm, point)]
        if series.regime.noisy:
            found += [f"{label}: {text}" for text in _gap_failures(series, arm, base)]
    return found


def _point_failures(arm: Arm, point: Point) -> list[str]:
    found = []
    if point.bound is not None:
        for name, values, bound in (
            ("z", point.gradient_z, point.bound.at_z),
            ("x", point.gradient_x, point.bound.at_x),
        ):
            mean = float(np.mean(values))
            if mean > bound:
                found.append(f"the gradient at {name} is {mean:.4g} in the mean, above the bound {bound:.4g}")
        if point.displacement > arm.delay + arm.coefficient + 1e-9:
            found.append(f"displacement of {point.displacement:.3f} steps, above tau + c")
    return found


def _gap_failures(series: Series, arm: Arm, base: float) -> list[str]:
    """With noise, a gap must be of lower order, and feedback with c = tau must close most of it."""
    if arm.delay > arm.coefficient:
        fitted = series.gap_slope(arm)
        # Halfway between the order of the gradient and what the bound allows the gap.
        limit = base - 0.25
        if fitted is not None and fitted[0] > limit:
            return [f"the gap shrinks as K^{fitted[0]:.2f} only, the gradient as K^{base:.2f}"]
    if arm.delay and arm.delay == arm.coefficient:
        plain = np.array([np.mean(point.gap) for point in series.points[Arm(arm.delay, 0.0)]])
        closed = np.array([np.mean(point.gap) for point in series.points[arm]])
        if np.abs(closed).mean() > 0.5 * np.abs(plain).mean():
            return ["error feedback leaves more than half of the gap"]
    return []


def measure_all(
    problem: Problem,
    geometries: Sequence[str],
    steps: Mapping[bool, Sequence[int]],
    *,
    seeds: int,
    seed: int,
    progress: Callable[[str], None],
) -> list[Series]:
    """Every regime in every geometry; without noise, half the seeds (at least 2).

    Args:
        problem: Function and noise.
        geometries: Names.
        steps: Every K, increasing, by whether there is momentum: it takes more steps to reach the order of the bound.
        seeds: Runs of every arm with noise.
        seed: Of starting points and noise.
        progress: Called with a line before every K.
    """
    result = []
    for name in geometries:
        for regime in REGIMES:

            def report(count: int, where: str = f"{name}, {regime.name}") -> None:
                progress(f"{where}: K = {count}")

            result.append(
                measure(
                    problem,
                    regime,
                    GEOMETRIES[name],
                    steps[regime.has_momentum],
                    seeds=seeds if regime.noisy else max(2, seeds // 2),
                    seed=seed,
                    progress=report,
                )
            )
    return result
