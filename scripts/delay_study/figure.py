"""Pictures of a study: the gaps with their spread, and the loss curves."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import compare_runs

from delay_study.plan import Study
from delay_study.results import Arm, Row

STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.axisbelow": True, "font.size": 10, "legend.frameon": False,
}  # fmt: skip


def draw_gaps(study: Study, found: list[Row], path: Path) -> None:
    """Gap of every arm: bars for optimizers, lines over the points of a sweep; dots are seeds.

    Args:
        study: The study.
        found: Its rows; without any gap nothing is drawn.
        path: PNG to write.
    """
    rows = [row for row in found if _compared(study, [row])]
    if not rows:
        return
    pyplot = _pyplot()
    with pyplot.rc_context(STYLE):
        draw = _lines if study.axis or not study.tune else _bars
        figure = draw(pyplot, study, rows)
        figure.suptitle(study.title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def draw_losses(study: Study, found: list[Row], path: Path) -> None:
    """Loss curves, a panel for every row: training losses as lines, validation losses as dots, means over seeds.

    Args:
        study: The study.
        found: Its rows; those without runs are left out.
        path: PNG to write.
    """
    rows = [row for row in found if any(arm.outcomes for arm in row.arms)]
    if not rows:
        return
    pyplot = _pyplot()
    columns = min(4, len(rows))
    with pyplot.rc_context(STYLE):
        height = 2.9 * math.ceil(len(rows) / columns) + 0.5
        figure, axes = pyplot.subplots(
            math.ceil(len(rows) / columns), columns, squeeze=False, figsize=(3.3 * columns + 0.6, height),
            sharex=True, layout="constrained",
        )  # fmt: skip
        for panel, row in zip(axes.flat, rows, strict=False):
            for name in study.arms:
                _curve(panel, row.arm(name), _colour(study, name))
            compare_runs._set_limits(panel)
            panel.set_title(f"{row.group.name}, lr {row.learning_rate:g}", loc="left", fontsize=9)
        for panel in axes.flat[len(rows) :]:
            panel.set_visible(False)
        for panel in axes[:, 0]:
            panel.set_ylabel("loss (nats per token)")
        figure.supxlabel("update (training losses smoothed; dots: validation)", fontsize=9)
        handles = [pyplot.Line2D([], [], color=_colour(study, name), label=name) for name in study.arms]
        axes.flat[0].legend(handles=handles)
        figure.suptitle(study.title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _bars(pyplot: Any, study: Study, rows: list[Row]) -> Any:
    """Bars side by side for each optimizer."""
    arms = _compared(study, rows)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.35 * len(rows) + 1.5), 4.2), layout="constrained")
    width = 0.8 / len(arms)
    for i, name in enumerate(arms):
        first = True
        for place, row in enumerate(rows):
            arm = row.arm(name)
            if arm is None or arm.gap is None:
                continue
            x = place + (i - (len(arms) - 1) / 2) * width
            colour = _colour(study, name)
            axes.bar(x, arm.gap.mean, 0.9 * width, color=colour, alpha=0.75, label=name if first else None)
            axes.errorbar(x, arm.gap.mean, arm.gap.deviation or 0.0, color="#222222", capsize=3, lw=1)
            _dots(axes, x, arm, width)
            first = False
    axes.axhline(0, color="#222222", lw=1)
    axes.set_xticks(range(len(rows)), [row.group.name for row in rows])
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(f"validation loss minus {study.baseline}'s\n(nats per token, dots: seeds)")
    axes.legend()
    return figure


def _lines(pyplot: Any, study: Study, rows: list[Row]) -> Any:
    """A panel for each optimizer, a line for each arm over the points."""
    arms = _compared(study, rows)
    optimizers = list(dict.fromkeys(row.group.optimizer for row in rows))
    figure, axes = pyplot.subplots(
        1, len(optimizers), squeeze=False, figsize=(3.8 * len(optimizers) + 1, 3.8), layout="constrained"
    )
    for panel, optimizer in zip(axes.flat, optimizers, strict=True):
        own = [row for row in rows if row.group.optimizer == optimizer]
        for name in arms:
            points = [(i, arm) for i, row in enumerate(own) if (arm := row.arm(name)) and arm.gap]
            colour = _colour(study, name)
            means = [arm.gap.mean for _, arm in points if arm.gap]
            errors = [arm.gap.deviation or 0.0 for _, arm in points if arm.gap]
            panel.errorbar([i for i, _ in points], means, errors, color=colour, marker="o", capsize=3, label=name)
            for i, arm in points:
                _dots(panel, i, arm, 0.1)
        panel.axhline(0, color="#222222", lw=1)
        panel.set_xticks(range(len(own)), [row.group.point for row in own], rotation=30, ha="right")
        panel.set_xlabel(study.axis or "learning rate")
        panel.set_title(optimizer, loc="left", fontsize=10)
    axes[0][0].set_ylabel(f"validation loss minus {study.baseline}'s\n(nats per token, dots: seeds)")
    axes[0][0].legend()
    return figure


def _dots(axes: Any, x: float, arm: Arm, width: float) -> None:
    assert arm.gap is not None
    values = list(arm.gap.values.values())
    places = [x + 0.25 * width * (i - (len(values) - 1) / 2) for i in range(len(values))]
    axes.plot(places, values, "o", color="#222222", ms=3, mec="white", mew=0.5)


def _compared(study: Study, rows: list[Row]) -> list[str]:
    """Arms with a gap, without the plain iterates, which the table has."""
    return [name for name in study.arms if any((arm := row.arm(name)) and arm.gap for row in rows)]


def _curve(axes: Any, arm: Arm | None, colour: str) -> None:
    """Mean over seeds at the iterations that all of them have."""
    if arm is None or not arm.outcomes:
        return
    training = _mean([o.training for o in arm.outcomes.values()])
    window = max(1, len(training) // 25)
    compare_runs._plot(
        axes, compare_runs.smooth(training, window), _mean([o.validation for o in arm.outcomes.values()]), colour
    )


def _mean(series: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    maps = [dict(points) for points in series]
    steps = sorted(set.intersection(*(set(points) for points in maps))) if maps else []
    return [(step, statistics.fmean(points[step] for points in maps)) for step in steps]


def _colour(study: Study, arm: str) -> str:
    return compare_runs.COLOURS[list(study.arms).index(arm) % len(compare_runs.COLOURS)]
