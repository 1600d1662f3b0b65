"""Tables, JSON and figure of the measured series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lmo_delay.experiment import Series
from lmo_delay.method import ARMS, Arm
from lmo_delay.problems import Problem
from lmo_delay.quadratic import largest_stable, spectral_radius

COLOURS = {0: "#222222", 1: "#d55e00", 2: "#0072b2"}  # Okabe and Ito, by delay
MOMENTA = (0.0, 0.9, 0.95, 0.99)
CASES: tuple[tuple[str, bool, float], ...] = (
    ("no delay", False, 0.0),
    ("delay 1", True, 0.0),
    ("delay 1, EF c=0.5", True, 0.5),
    ("delay 1, EF c=1", True, 1.0),
)
"""Columns of the table of stability limits: label, whether delayed, c."""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def rates_table(series: Sequence[Series]) -> str:
    """One row an arm of all series of a regime: exponents, share of the bound, gap to delay 0."""
    first, last = series[0].steps[0], series[0].steps[-1]
    header = ["method", "arm", "exponent of K", "of the bound", f"measured ÷ bound, K={last}"]
    header += [f"gap, K={first}", f"gap, K={last}", "exponent of the gap", "displacement ÷ t"]
    rows = [header]
    for one in series:
        for arm, points in one.points.items():
            bound, slope, fitted = points[-1].bound, one.bound_slope(arm), one.gap_slope(arm)
            gaps = ["–" if arm == ARMS[0] else _relative_gap(one, arm, i) for i in (0, -1)]
            rows.append(
                [
                    one.geometry.name,
                    arm.label,
                    "{:.3f} ± {:.3f}".format(*one.slope(arm)),
                    "–" if slope is None else f"{slope:.3f}",
                    "–" if bound is None else f"{np.mean(points[-1].gradient_z) / bound.at_z:.2f}",
                    *gaps,
                    "–" if fitted is None else "{:.2f} ± {:.2f}".format(*fitted),
                    f"{points[-1].displacement:.2f}",
                ]
            )
    return markdown(rows)


def _relative_gap(series: Series, arm: Arm, index: int) -> str:
    """Gap to delay 0 in percent of its gradient, with the standard error over seeds."""
    base = np.mean(series.points[ARMS[0]][index].gradient_z)
    gap = 100 * np.array(series.points[arm][index].gap) / base
    return f"{gap.mean():+.3f} ± {gap.std(ddof=1) / len(gap) ** 0.5:.3f} %"


def stability_table() -> str:
    """Largest stable lr times curvature of heavy-ball SGD on a quadratic."""
    rows = [["momentum β", *(label for label, _, _ in CASES)]]
    for momentum in MOMENTA:
        limits = [largest_stable(momentum, delayed=delayed, coefficient=c) for _, delayed, c in CASES]
        rows.append([f"{momentum:g}", *(f"{limit:.3f}" for limit in limits)])
    return markdown(rows)


def damping_table(momentum: float = 0.9, curvatures: Sequence[float] = (0.01, 0.02, 0.05, 0.1, 0.2)) -> str:
    """Spectral radius a step, by lr times curvature."""
    rows = [[f"lr·a, β = {momentum:g}", *(label for label, _, _ in CASES)]]
    for h in curvatures:
        radii = [spectral_radius(h, momentum, delayed=delayed, coefficient=c) for _, delayed, c in CASES]
        rows.append([f"{h:g}", *(f"{radius:.4f}" for radius in radii)])
    return markdown(rows)


def to_json(problem: Problem, series: Sequence[Series], failures: Sequence[str], arguments: dict[str, Any]) -> Any:
    """Everything that was measured, as JSON values."""
    content = [
        {
            "geometry": one.geometry.name,
            "regime": one.regime.name,
            "constants": asdict(one.constants),
            "settings": [asdict(settings) for settings in one.settings],
            "arms": [
                {
                    "delay": arm.delay,
                    "coefficient": arm.coefficient,
                    "exponent": one.slope(arm),
                    "bound_exponent": one.bound_slope(arm),
                    "gap_exponent": one.gap_slope(arm),
                    "points": [
                        asdict(p) | {"bound_at_z": p.bound and p.bound.at_z, "bound_at_x": p.bound and p.bound.at_x}
                        for p in points
                    ],
                }
                for arm, points in one.points.items()
            ],
        }
        for one in series
    ]
    whole = {"arguments": arguments, "problem": asdict(problem), "failures": list(failures), "series": content}
    return _rounded(whole)


def _rounded(value: Any) -> Any:
    """The same JSON value with floats of seven digits: more than the seeds agree on, and half the file."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def draw(series: Sequence[Series], path: Path) -> None:
    """Log-log curves: with noise the gradient and the gap to delay 0, without noise the gradient.

    Args:
        series: All series; one column for each geometry.
        path: The PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(one.geometry.name for one in series))
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with pyplot.rc_context({**style, "font.size": 9, "legend.frameon": False}):
        figure, axes = pyplot.subplots(
            3, len(names), figsize=(3.9 * len(names), 9.2), squeeze=False, layout="constrained"
        )
        for one in series:
            column = names.index(one.geometry.name)
            if one.regime.noisy:
                _gradients(axes[0][column], one)
                axes[0][column].set_title(one.geometry.label)
                _gaps(axes[1][column], one)
            elif one.regime.alpha is None:
                _gradients(axes[2][column], one)
                axes[2][column].set_xlabel("steps K")
        for row, text in enumerate(
            (
                "gradient noise: mean ‖∇f(z)‖*",
                "gradient noise: |gap| to delay 0",
                "no noise, no momentum: mean ‖∇f(z)‖*",
            )
        ):
            axes[row][0].set_ylabel(text)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _line_style(arm: Arm) -> dict[str, Any]:
    filled = arm.coefficient == 0.0
    marker = {0.0: "o", 1.0: "s", 2.0: "D"}[arm.coefficient]
    return {
        "color": COLOURS[arm.delay],
        "linestyle": "-" if filled else ":",
        "marker": marker,
        "markersize": 4,
        "markerfacecolor": COLOURS[arm.delay] if filled else "white",
        "linewidth": 1.2,
    }


def _gradients(axis: Any, series: Series) -> None:
    for arm, points in series.points.items():
        axis.loglog(series.steps, [np.mean(p.gradient_z) for p in points], label=arm.label, **_line_style(arm))
    bounds = [p.bound.at_z for p in series.points[ARMS[0]] if p.bound is not None]
    if bounds:
        axis.loglog(series.steps, bounds, color="#999999", linewidth=1.2, label="bound, delay 0")
        worst = [p.bound.at_z for p in series.points[ARMS[-1]] if p.bound is not None]
        axis.loglog(series.steps, worst, color="#999999", linewidth=1.2, ls="--", label="bound, delay 2, EF c=2")
    last = float(np.mean(series.points[ARMS[0]][-1].gradient_z))
    _guide(axis, series, 0.85 * last, series.regime.exponent)


def _gaps(axis: Any, series: Series) -> None:
    for arm, points in series.points.items():
        if arm.delay:
            gaps = [abs(float(np.mean(p.gap))) for p in points]
            axis.loglog(series.steps, gaps, label=arm.label, **_line_style(arm))
    last = float(np.mean(series.points[Arm(1, 0.0)][-1].gap))
    _guide(axis, series, 0.7 * last, -0.75)


def _guide(axis: Any, series: Series, last: float, exponent: float) -> None:
    """A straight line of the promised slope, below the curves."""
    steps = np.array(series.steps, dtype=float)
    axis.loglog(steps, last * (steps / steps[-1]) ** exponent, color="#009e73", linewidth=1)
    axis.set_xticks(series.steps[::2], [str(count) for count in series.steps[::2]])
    axis.set_xticks([], minor=True)
    axis.annotate(
        f"K^{exponent:g}", (steps[len(steps) // 2], last * (steps[len(steps) // 2] / steps[-1]) ** exponent),
        xytext=(-4, -12), textcoords="offset points", color="#009e73",
    )  # fmt: skip
