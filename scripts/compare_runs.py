#!/usr/bin/env python3
"""Compare training runs: losses, gap to the synchronous run, throughput; a Markdown table, JSON and a picture.

Each run is a directory that holds a tensorboard event file of Megatron's somewhere below it; its name is the
directory's, or NAME in NAME=DIRECTORY. With a baseline (the synchronous run) the table also says

  gap        final validation loss minus the baseline's,
  recovery   how much of the asynchronous run's gap a run with error feedback closes,
  tokens/s   as a ratio to the baseline, from the median time of an iteration without the first log interval.

The lines of the picture are training losses, its dots validation losses.
Exit codes: 0 compared, 1 nothing to compare (or --require-complete and a run isn't), 2 bad command line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TRAINING, VALIDATION, ITERATION_TIME = "lm loss", "lm loss validation", "iteration-time"
COLOURS = ("#222222", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")  # Okabe and Ito, for all eyes

Series = list[tuple[int, float]]


@dataclass(slots=True)
class Run:
    """What was read of one run, and how it stands to the baseline.

    Attributes:
        name: Label in table and picture.
        training: (iteration, loss of its batch), each iteration once.
        validation: (iteration, loss); the mean where one iteration has several evaluations.
        iteration_times: Seconds, one for each log interval.
        status: "complete", "unfinished" or "missing".
        training_loss: Mean over the last logged iterations.
        validation_loss: At the last evaluation.
        gap: validation_loss minus the baseline's.
        recovery: Share of the asynchronous run's gap that this run closes, in percent.
        relative_throughput: Tokens per second over the baseline's.
    """

    name: str
    training: Series = field(default_factory=list)
    validation: Series = field(default_factory=list)
    iteration_times: list[float] = field(default_factory=list)
    status: str = "missing"
    iterations: int = 0
    training_loss: float | None = None
    validation_loss: float | None = None
    gap: float | None = None
    recovery: float | None = None
    relative_throughput: float | None = None


def read_run(name: str, directory: Path, last: int) -> Run:
    """Read a run's event files; later ones (a resumed run) overrule earlier ones.

    Args:
        name: Label of the run.
        directory: Searched for event files.
        last: How many logged iterations the final training loss is the mean of.
    """
    run = Run(name)
    folders = sorted({file.parent for file in directory.rglob("events.out.tfevents.*")})
    if not folders:
        return run
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: dict[str, list[Any]] = {}
    for folder in folders:
        accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: keep every point
        accumulator.Reload()
        for tag in {TRAINING, VALIDATION, ITERATION_TIME} & set(accumulator.Tags()["scalars"]):
            events.setdefault(tag, []).extend(accumulator.Scalars(tag))
    training = {event.step: event.value for event in sorted(events.get(TRAINING, []), key=lambda e: e.wall_time)}
    validation: dict[int, list[float]] = {}
    for event in events.get(VALIDATION, []):
        validation.setdefault(event.step, []).append(event.value)
    run.training = sorted(training.items())
    run.validation = [(step, statistics.fmean(losses)) for step, losses in sorted(validation.items())]
    run.iteration_times = [event.value for event in events.get(ITERATION_TIME, [])]
    if run.training:
        run.iterations = run.training[-1][0]
        run.training_loss = statistics.fmean(loss for _, loss in run.training[-last:])
    if run.validation:
        run.validation_loss = run.validation[-1][1]
    run.status = "unfinished"
    return run


def seconds_per_iteration(run: Run) -> float | None:
    """Median over the log intervals but the first, which holds the start-up; None where there is no other."""
    return statistics.median(run.iteration_times[1:]) if len(run.iteration_times) > 1 else None


def compare(runs: Sequence[Run], baseline: str, pairs: dict[str, str], iterations: int | None) -> None:
    """Fill in the status of every run and how it stands to the baseline.

    Args:
        runs: All runs; filled in place.
        baseline: Name of the synchronous run.
        pairs: Run with error feedback to the asynchronous run without.
        iterations: Length of a complete run; None: the longest run's.
    """
    by_name = {run.name: run for run in runs}
    length = iterations or max(run.iterations for run in runs)
    reference = by_name.get(baseline)
    for run in runs:
        evaluated = bool(run.validation) and run.validation[-1][0] >= length
        if run.iterations >= length and evaluated:
            run.status = "complete"
    for run in runs:
        if reference is None or run.status == "missing" or reference.status == "missing":
            continue
        # An unfinished run has a loss of another iteration: no gap.
        if run.status == reference.status == "complete":
            assert run.validation_loss is not None
            assert reference.validation_loss is not None
            run.gap = run.validation_loss - reference.validation_loss
        own, other = seconds_per_iteration(run), seconds_per_iteration(reference)
        if own and other:
            run.relative_throughput = other / own
    for corrected, plain in pairs.items():
        gap, full = by_name[corrected].gap, by_name[plain].gap
        # Where the delay costs nothing there is nothing to recover.
        if gap is not None and full is not None and full > 0:
            by_name[corrected].recovery = 100 * (1 - gap / full)


def table(runs: Sequence[Run], baseline: str) -> str:
    """The comparison as a Markdown table."""
    header = ["run", "iterations", "training loss", "validation loss", f"gap to {baseline}"]
    header += ["gap recovered", f"tokens/s vs {baseline}"]

    def cell(value: float | None, form: str) -> str:
        return "–" if value is None else form.format(value)

    rows = [header]
    for run in runs:
        iterations = str(run.iterations) if run.status == "complete" else f"{run.iterations} ({run.status})"
        rows.append(
            [
                run.name,
                iterations if run.status != "missing" else "missing",
                cell(run.training_loss, "{:.4f}"),
                cell(run.validation_loss, "{:.4f}"),
                "–" if run.name == baseline else cell(run.gap, "{:+.4f}"),
                cell(run.recovery, "{:.0f} %"),
                cell(run.relative_throughput, "{:.2f}"),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def smooth(series: Series, window: int) -> Series:
    """Trailing mean over the last `window` points, fewer at the start."""
    values = [value for _, value in series]
    return [(step, statistics.fmean(values[max(0, i + 1 - window) : i + 1])) for i, (step, _) in enumerate(series)]


def difference(series: Series, reference: Series) -> Series:
    """Series minus reference at the iterations that both have."""
    theirs = dict(reference)
    return [(step, loss - theirs[step]) for step, loss in series if step in theirs]


def draw(runs: Sequence[Run], baseline: str, path: Path, *, title: str, window: int | None = None) -> None:
    """Draw the loss curves (above) and the gap to the baseline (below).

    Args:
        runs: Runs to draw; those without data are left out.
        baseline: Name of the synchronous run.
        path: PNG to write.
        title: Above the picture.
        window: Iterations of the trailing mean; None: a fortieth of the longest run.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [run for run in runs if run.training]
    reference = next((run for run in runs if run.name == baseline), None)
    others = [run for run in runs if run is not reference]
    window = window or max(1, max(len(run.training) for run in runs) // 40)
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with pyplot.rc_context({**style, "font.size": 10, "legend.frameon": False}):
        panels = 2 if reference is not None and others else 1
        figure, axes = pyplot.subplots(
            panels, 1, sharex=True, squeeze=False, figsize=(8, 3.9 + 2.2 * (panels - 1)),
            height_ratios=[2.2, 1][:panels], layout="constrained",
        )  # fmt: skip
        losses = axes[0][0]
        colours = {run.name: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs)}
        for run in runs:
            _plot(losses, smooth(run.training, window), run.validation, colours[run.name], run.name)
        _set_limits(losses)
        losses.plot([], [], "o", color="#777777", ms=5, label="validation")
        losses.set_ylabel("loss (nats per token)")
        losses.legend()
        losses.set_title(title, loc="left", fontsize=11)
        if panels == 2:
            assert reference is not None
            gaps = axes[1][0]
            gaps.axhline(0, color=colours[baseline], lw=1)
            for run in others:
                curve = smooth(difference(run.training, reference.training), window)
                points = difference(run.validation, reference.validation)
                _plot(gaps, curve, points, colours[run.name])
            _set_limits(gaps)
            gaps.set_ylabel(f"gap to {baseline}")
        axes[-1][0].set_xlabel(f"iteration (training losses: mean of {window})")
        axes[-1][0].set_xlim(left=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _plot(axes: Any, curve: Series, points: Series, colour: str, label: str | None = None) -> None:
    """Training as a line, validation as dots."""
    if curve:
        axes.plot(*zip(*curve, strict=True), color=colour, lw=1.6, label=label)
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=colour, ms=5, mec="white", mew=0.8)


def _set_limits(axes: Any) -> None:
    """Limits that show the differences: the steep start (the first tenth of a line) may leave the picture."""
    values = [value for line in axes.lines for value in list(line.get_ydata())[len(line.get_ydata()) // 10 :]]
    values = [value for value in values if math.isfinite(value)]
    if values:
        margin = 0.06 * (max(values) - min(values)) or 0.5
        axes.set_ylim(min(values) - margin, max(values) + margin)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="[NAME=]DIRECTORY", help="runs, in the order of the table")
    add("--baseline", metavar="NAME", help="the synchronous run (default: the first)")
    add("--recovery", nargs="+", default=[], metavar="EF:ASYNC", help="how much of ASYNC's gap the run EF closes")
    add("--iterations", type=int, metavar="N", help="length of a complete run (default: the longest run's)")
    add("--last", type=int, default=20, metavar="N", help="final training loss: mean of so many (default: 20)")
    add("--json", type=Path, metavar="FILE", help="write the comparison as JSON")
    add("--png", type=Path, metavar="FILE", help="draw the loss curves")
    add("--title", default="Training and validation loss", help="title of the picture")
    add("--require-complete", action="store_true", help="exit 1 unless every run is complete")
    args = parser.parse_args(arguments)
    named = [text.partition("=") if "=" in text else (Path(text).name, "=", text) for text in args.runs]
    args.directories = {name: Path(directory) for name, _, directory in named}
    args.baseline = args.baseline or named[0][0]
    args.pairs = dict(pair.partition(":")[::2] for pair in args.recovery)
    if len(args.directories) < len(named):
        parser.error("two runs have the same name: give NAME=DIRECTORY")
    for name in (args.baseline, *args.pairs, *args.pairs.values()):
        if name not in args.directories:
            parser.error(f"--baseline or --recovery: no run named {name!r} among {', '.join(args.directories)}")
    if args.last < 1:
        parser.error(f"--last {args.last}: at least 1")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    args = parse_args(arguments)
    runs = [read_run(name, directory, args.last) for name, directory in args.directories.items()]
    if not any(run.training for run in runs):
        looked = ", ".join(map(str, args.directories.values()))
        print(
            f"compare_runs.py: error: no training loss in {looked}; train with --tensorboard-dir below the "
            "run's directory",
            file=sys.stderr,
        )
        return 1
    compare(runs, args.baseline, args.pairs, args.iterations)
    print(table(runs, args.baseline))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"baseline": args.baseline, "runs": [asdict(run) for run in runs]}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.png:
        draw(runs, args.baseline, args.png, title=args.title)
    incomplete = [run.name for run in runs if run.status != "complete"]
    if incomplete and args.require_complete:
        print(f"compare_runs.py: error: not complete: {', '.join(incomplete)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
