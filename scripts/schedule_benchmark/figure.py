"""The figure: throughput over Megatron's 1F1B, one panel for each number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from schedule_benchmark.points import BASELINE, CONTROL, SYSTEMS, Point, ideal_ratio
from schedule_benchmark.report import Row

STYLES: dict[str, tuple[str, str]] = {
    BASELINE: ("#555555", "s"),
    "megatron-interleaved": ("#4878a8", "D"),
    "torch-1f1b": ("#9a9a9a", "v"),
    "torch-zbv": ("#5b9a5b", "^"),
    "2bw-async": ("#c44e52", "o"),
    "2bw-async-factor2": ("#e08a3c", "P"),
    CONTROL: ("#a05a8c", "x"),
}
"""Colour and marker of each system."""
SHIFTS = {BASELINE: -0.14, "torch-1f1b": 0.14, "2bw-async": -0.14, "2bw-async-factor2": 0.14}
"""Systems that are about as fast as each other stand side by side."""
GAP = 1.5
"""Free space between groups, in positions."""


def draw(rows: list[Row], path: Path, caption: str) -> None:
    """Write the figure.

    Args:
        rows: Of sleeping and computing stages.
        path: The PNG.
        caption: One line on how it was measured.
    """
    panels = sorted({(row.point.mode != "sleep", row.point.stages) for row in rows if row.point.mode != "overhead"})
    if not panels:
        return
    chosen = [
        [row for row in rows if (row.point.mode != "sleep", row.point.stages) == panel and row.point.mode != "overhead"]
        for panel in panels
    ]
    widths = [1.2 + 0.42 * len({row.point for row in panel}) for panel in chosen]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(sum(widths) + 0.8, 5.4), sharey=True, squeeze=False, width_ratios=widths
    )
    for axis, panel in zip(axes[0], chosen, strict=True):
        _panel(axis, panel)
    axes[0][0].set_ylabel("throughput ÷ Megatron 1F1B")
    used = [system for system in SYSTEMS if any(row.system == system for row in rows)]
    handles: list[Any] = [Line2D([], [], color="black", linewidth=1.6, label="ideal: (m+p-1)/m")]
    for system in used:
        colour, marker = STYLES[system]
        handles.append(
            Line2D([], [], color=colour, marker=marker, linestyle="", markersize=7, label=SYSTEMS[system].label)
        )
    figure.legend(handles=handles, loc="upper center", ncols=min(len(handles), 4), frameon=False, fontsize=9)
    figure.text(0.5, 0.008, caption, ha="center", fontsize=8, color="#444444")
    figure.tight_layout(rect=(0, 0.03, 1, 0.89))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axis: Any, rows: list[Row]) -> None:
    points = list(dict.fromkeys(row.point for row in rows))
    points.sort(key=lambda point: (point.microbatches, point.message_kib, point.optimizer))
    position, positions, labels = 0.0, {}, []
    groups: dict[int, list[float]] = {}
    for number, point in enumerate(points):
        if number and point.microbatches != points[number - 1].microbatches:
            position += GAP
        positions[point] = position
        labels.append(_label(point))
        groups.setdefault(point.microbatches, []).append(position)
        position += 1.0
    stages = points[0].stages
    for microbatches, xs in groups.items():
        ideal = ideal_ratio(stages, microbatches)
        axis.plot([xs[0] - 0.6, xs[-1] + 0.6], [ideal, ideal], color="black", linewidth=1.6, zorder=1)
        axis.annotate(
            f"m = {microbatches}",
            (sum(xs) / len(xs), ideal),
            xytext=(0, 11),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    for row in rows:
        colour, marker = STYLES[row.system]
        below, above = row.ratio.median - row.ratio.low, row.ratio.high - row.ratio.median
        axis.errorbar(
            positions[row.point] + SHIFTS.get(row.system, 0.0),
            row.ratio.median,
            yerr=[[below], [above]],
            color=colour,
            marker=marker,
            markersize=6.5,
            linewidth=1.0,
            zorder=3 if SYSTEMS[row.system].asynchronous else 2,
        )
    axis.set_xticks(list(positions.values()), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    kind = "sleeping stages" if points[0].mode == "sleep" else "real GPT stages"
    axis.set_title(f"p = {stages}, {kind}", fontsize=10)
    axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _label(point: Point) -> str:
    optimizer = {"adamw": "AdamW", "muon": "Muon"}[point.optimizer]
    if not point.message_kib:
        return optimizer
    whole, rest = divmod(point.message_kib, 1024)
    return f"{optimizer}, {whole} MiB" if whole and not rest else f"{optimizer}, {point.message_kib} KiB"
