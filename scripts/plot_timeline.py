#!/usr/bin/env python3
"""Draw what every pipeline stage did over time, from the traces of real runs, and print where the time went.

Give the folders that `--async-trace DIR` has filled, for example of a synchronous and of an asynchronous run: they
are drawn one above the other, on the same time scale. One row is one stage. A batch has one colour, its forwards are
lighter than its backwards, numbers are microbatches; what is not coloured is not work, what is white was not traced.

The table is about the steady state: from the end of one batch to the end of another, on every stage. Where spans
contain one another (the wait for the gradient norm inside a step), only the inner one counts. busy is forward, backward
and the optimizer's own work; bubble is all the rest, and the columns after it say what it is made of.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from draw_schedule import COLOURS, dress
from matplotlib.patches import Patch

from megatron_async.observe.timeline import (
    KINDS,
    RECEIVE,
    SEND,
    UPDATE,
    Fractions,
    Span,
    StageTrace,
    UnreadableTrace,
    account,
    read_traces,
    steady_window,
    whole_batches,
)

STEP_COLOUR, IDLE = "#303030", "#f0f0f0"
WAITS: dict[str, dict[str, Any]] = {
    RECEIVE: {"facecolor": "#e4e4e4", "edgecolor": "#9a9a9a", "hatch": "////", "linewidth": 0},
    UPDATE: {"facecolor": "#c9c9c9", "edgecolor": "#707070", "hatch": "xxxx", "linewidth": 0},
    SEND: {"facecolor": "#b0b0b0", "edgecolor": "#b0b0b0", "linewidth": 0},
}
LEGEND = {
    "receive wait": Patch(**WAITS[RECEIVE]),
    "wait for norm, reduction or weights": Patch(**WAITS[UPDATE]),
    "send": Patch(**WAITS[SEND]),
    "optimizer step": Patch(facecolor=STEP_COLOUR),
    "other, idle": Patch(facecolor=IDLE),
}
WIDTH = 12.0  # of the picture, in inches
DIGIT = 0.075  # width of a digit of the smallest legible size, in inches


@dataclass(frozen=True)
class Run:
    """One folder of traces, and what of it is looked at: the batches first to last, the times start to end."""

    title: str
    stages: list[StageTrace]
    first: int
    last: int
    start: float
    end: float

    def windows(self) -> list[tuple[float, float]]:
        """The steady state of every stage."""
        return [steady_window(trace, self.first, self.last) for trace in self.stages]

    def seconds_per_batch(self) -> float:
        """Mean time of a batch, over stages and batches."""
        lengths = [end - start for start, end in self.windows()]
        return sum(lengths) / len(lengths) / (self.last - self.first)

    def fractions(self) -> list[Fractions]:
        """Where the time of every stage went."""
        return [account(trace, *window) for trace, window in zip(self.stages, self.windows(), strict=True)]


def load(directory: Path, title: str, replica: int, batches: tuple[int, int] | None) -> Run:
    """Read a folder and find its steady state.

    Raises:
        UnreadableTrace: If there is none.
    """
    stages = read_traces(directory, replica)
    whole = whole_batches(stages)
    if len(whole) < 2:
        raise UnreadableTrace(
            f"{directory} holds {len(whole)} whole batch(es), and the time from one end to another is wanted; "
            "trace with --async-trace-steps 2 or more"
        )
    times = [time for trace in stages for span in trace.spans for time in (span.start, span.end)]
    if batches is None:
        return Run(title, stages, whole[0], whole[-1], min(times), max(times))
    first, last = batches
    if not first < last or first not in whole or last not in whole:
        raise UnreadableTrace(
            f"--batches {first} {last}: {directory} holds the whole batches {whole[0]} to {whole[-1]}; choose two of "
            "them, the earlier one first"
        )
    windows = [steady_window(trace, first, last) for trace in stages]
    return Run(title, stages, first, last, min(w[0] for w in windows), max(w[1] for w in windows))


def print_table(run: Run, directory: Path) -> None:
    """Print where the time of every stage went."""
    print(
        f"{run.title} ({directory}): from the end of batch {run.first} to the end of batch {run.last}, "
        f"{1000 * run.seconds_per_batch():.2f} ms a batch"
    )
    names = ("busy", "bubble", "receive wait", "norm/reduction wait", "send", "other")
    print("  " + " ".join(["stage", *(f"{name:>{max(len(name), 8)}}" for name in names)]))
    rows = [(str(trace.stage), found) for trace, found in zip(run.stages, run.fractions(), strict=True)]
    mean = [
        sum(getattr(found, name) for _, found in rows) / len(rows)
        for name in ("busy", "receive", "update", "send", "other")
    ]
    for label, f in [*rows, ("mean", Fractions(*mean))]:
        values = (f.busy, f.bubble, f.receive, f.update, f.send, f.other)
        cells = [f"{100 * v:.2f} %".rjust(max(len(n), 8)) for n, v in zip(names, values, strict=True)]
        print("  " + " ".join([f"{label:>5}", *cells]))
    missing = set(range(run.stages[-1].stage)) - {trace.stage for trace in run.stages}
    if missing:
        print(f"  no trace of stage {', '.join(map(str, sorted(missing)))}")


def style(kind: str, batch: int, inches: float) -> dict[str, Any]:
    """How spans of one kind are filled: forward, backward, or what their time counts as; ``inches`` is their width."""
    if kind in ("forward", "backward"):
        # An edge would leave nothing of a narrow span.
        edge = {"edgecolor": "white", "linewidth": 0.4} if inches > 0.04 else {"linewidth": 0}
        return {"facecolor": COLOURS[batch % len(COLOURS)], "alpha": 0.45 if kind == "forward" else 1.0} | edge
    return WAITS.get(kind, {"facecolor": STEP_COLOUR, "linewidth": 0})


def layers(spans: list[Span], start: float, end: float) -> dict[tuple[int, str, int], list[Span]]:
    """What is seen between two times, by depth of nesting, kind, and batch where that has a colour."""
    found: dict[tuple[int, str, int], list[Span]] = defaultdict(list)
    around: list[float] = []
    for span in spans:
        while around and around[-1] <= span.start:
            around.pop()
        depth = len(around)
        around.append(span.end)
        if span.end > start and span.start < end:
            computes = span.name in ("forward", "backward")
            kind = span.name if computes else KINDS[span.name]
            found[depth, kind, span.batch or 0 if computes else 0].append(span)
    return found


def draw(axis: plt.Axes, run: Run, start: float, end: float, scale: float) -> None:
    """Draw the rows of one run.

    Args:
        axis: Where.
        run: What.
        start: Time at the left edge, in seconds after the start of the run's view.
        end: Time at the right edge.
        scale: What a second is on the time axis.
    """
    inches_per_second = 0.9 * WIDTH / (end - start)

    def bar(span: Span) -> tuple[float, float]:
        return scale * (span.start - run.start), scale * (span.end - span.start)

    for row, trace in enumerate(run.stages):
        height = (row - 0.45, 0.9)
        traced = Span("", trace.spans[0].start, max(span.end for span in trace.spans))
        axis.broken_barh([bar(traced)], height, facecolor=IDLE)
        for (depth, kind, batch), spans in layers(trace.spans, run.start + start, run.start + end).items():
            inches = inches_per_second * sum(span.end - span.start for span in spans) / len(spans)
            looks = style(kind, batch, inches)
            # Inner spans are drawn over outer ones.
            axis.broken_barh([bar(span) for span in spans], height, zorder=2 + 0.1 * depth, **looks)
            if kind in ("forward", "backward"):
                number(axis, run, row, spans, start, end, scale)
    axis.set_xlim(scale * start, scale * end)
    dress(axis, [trace.stage for trace in run.stages], run.title)
    axis.spines["bottom"].set_color("#808080")


def number(axis: plt.Axes, run: Run, row: int, spans: list[Span], start: float, end: float, scale: float) -> None:
    """Write the microbatch into every span that has room for it."""
    inches_per_second = 0.9 * WIDTH / (end - start)
    for span in spans:
        left, right = max(span.start - run.start, start), min(span.end - run.start, end)
        label = "" if span.microbatch is None else str(span.microbatch)
        if label and inches_per_second * (right - left) >= DIGIT * (len(label) + 0.5):
            colour = "black" if span.name == "forward" else "white"
            middle = scale * (left + right) / 2
            axis.text(middle, row, label, ha="center", va="center", fontsize=7, color=colour, zorder=4)


def draw_all(runs: list[Run], start: float, end: float, output: Path) -> None:
    """Draw the runs one above the other, on one time scale, and write the picture."""
    rows = sum(len(run.stages) for run in runs)
    figure, axes = plt.subplots(
        len(runs),
        1,
        figsize=(WIDTH, 0.45 * rows + 0.5 * len(runs) + 0.8),
        layout="constrained",
        squeeze=False,
        height_ratios=[len(run.stages) for run in runs],
    )
    scale, unit = (1.0, "s") if end - start >= 2 else (1000.0, "ms")
    for (axis,), run in zip(axes, runs, strict=True):
        draw(axis, run, start, end, scale)
    axes[-1][0].set_xlabel(f"time, in {unit} (light: forward, full: backward, colour: batch)")
    figure.legend(
        LEGEND.values(), LEGEND.keys(), loc="outside lower center", ncols=len(LEGEND), fontsize=8, frameon=False
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    plt.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="a folder that --async-trace filled")
    parser.add_argument("--output", type=Path, help="PNG or SVG file to write (default: timeline.png in the last DIR)")
    parser.add_argument("--titles", nargs="+", metavar="TITLE", help="one for each DIR (default: the folder's name)")
    parser.add_argument(
        "--batches",
        nargs=2,
        type=int,
        metavar=("A", "B"),
        help="look at the time from the end of batch A to the end of batch B (default: first and last whole batch for "
        "the table, everything for the picture)",
    )
    parser.add_argument("--start", type=float, metavar="S", help="left edge of the picture, in seconds after its start")
    parser.add_argument("--end", type=float, metavar="S", help="right edge of the picture (default: the longest run)")
    parser.add_argument(
        "--replica", type=int, default=0, metavar="N", help="which rank of every stage to take (default: 0, the first)"
    )
    parsed = parser.parse_args(arguments)
    if parsed.titles is not None and len(parsed.titles) != len(parsed.directories):
        parser.error(f"--titles needs {len(parsed.directories)} titles, one for each DIR, got {len(parsed.titles)}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and write the picture.

    Returns:
        The exit status: 2 if a folder cannot be read.
    """
    parsed = parse(arguments)
    titles = parsed.titles or [directory.resolve().name for directory in parsed.directories]
    try:
        runs = [load(d, t, parsed.replica, parsed.batches) for d, t in zip(parsed.directories, titles, strict=True)]
    except UnreadableTrace as error:
        print(f"plot_timeline.py: error: {error}", file=sys.stderr)
        return 2
    start = parsed.start or 0.0
    end = max(run.end - run.start for run in runs) if parsed.end is None else parsed.end
    if end <= start:
        print(f"plot_timeline.py: error: --end {end} must be after --start {start}", file=sys.stderr)
        return 2
    for run, directory in zip(runs, parsed.directories, strict=True):
        print_table(run, directory)
    output = parsed.output or parsed.directories[-1] / "timeline.png"
    try:
        draw_all(runs, start, end, output)
    except (OSError, ValueError) as error:
        print(f"plot_timeline.py: error: --output {output} cannot be written: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
