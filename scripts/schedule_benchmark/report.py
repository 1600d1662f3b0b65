"""From raw times to figures and a table. Pure Python."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schedule_benchmark.points import BASELINE, CONTROL, SYSTEMS, Point, Settings, ideal_ratio, is_possible

Raw = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one point.

    Attributes:
        point: The point.
        system: Key of :data:`~schedule_benchmark.points.SYSTEMS`.
        seconds: Time per training step.
        ratio: Throughput over that of Megatron's 1F1B in the same repeat.
        bubble: Share of a step in which a stage neither runs forwards nor backwards: 1 - m (tf + tb) / T; None where
            tf and tb are not set.
        processor: Largest processor time of a rank per step, in seconds, all threads.
    """

    point: Point
    system: str
    seconds: Spread
    ratio: Spread
    bubble: float | None
    processor: float

    @property
    def of_ideal(self) -> float:
        """The ratio over the ideal one."""
        return self.ratio.median / ideal_ratio(self.point.stages, self.point.microbatches)


def step_times(ranks: list[Raw]) -> list[float]:
    """Seconds per step of each repeat, on the slowest rank: from the opening of the window to the end of its last step.

    Args:
        ranks: What each rank recorded of one system at one point.
    """
    windows = zip(*(rank["ends"] for rank in ranks), strict=True)
    return [max((ends[-1] - ends[0]) / (len(ends) - 1) for ends in of_ranks) / 1e9 for of_ranks in windows]


def rows_of(result: Raw, settings: Settings) -> list[Row]:
    """The rows of one point, as measure.py gives it."""
    point = Point(**{key: result[key] for key in Point.__dataclass_fields__})
    times = {system: step_times(ranks) for system, ranks in result["systems"].items()}
    base = times.get(BASELINE)
    rows = []
    for system, seconds in times.items():
        spread = Spread.of(seconds)
        ratios = [b / t for b, t in zip(base, seconds, strict=True)] if base else [float("nan")]
        steps = settings.steps_at(point.microbatches)
        processor = max(statistics.median(rank["processor"]) / steps / 1e9 for rank in result["systems"][system])
        bubble = None
        if point.mode == "sleep":
            bubble = 1.0 - point.microbatches * settings.slot_seconds / spread.median
        rows.append(Row(point, system, spread, Spread.of(ratios), bubble, processor))
    return rows


def table(rows: list[Row]) -> Iterator[str]:
    """The lines of a table; a block a point."""
    for point in dict.fromkeys(row.point for row in rows):
        ideal = ideal_ratio(point.stages, point.microbatches)
        kind = {"sleep": "sleeping stages", "compute": "real GPT stages", "overhead": "stage without duration"}
        yield f"{point.name} ({kind[point.mode]}); ideal ratio {ideal:.3f}"
        yield (
            f"  {'system':32} {'ms/step':>9} {'quartiles':>17} {'ratio':>6} {'quartiles':>13} {'of ideal':>8} "
            f"{'bubble':>7}"
        )
        here = [row for row in rows if row.point == point]
        for row in here:
            ms, ratio = row.seconds, row.ratio
            bubble = "" if row.bubble is None else f"{100 * row.bubble:6.1f}%"
            yield (
                f"  {SYSTEMS[row.system].label:32} {1e3 * ms.median:9.1f} {1e3 * ms.low:8.1f}-{1e3 * ms.high:8.1f} "
                f"{ratio.median:6.3f} {ratio.low:6.3f}-{ratio.high:6.3f} {row.of_ideal:8.3f} {bubble:>7}"
            )
        for system in dict.fromkeys(row.system for row in rows if row.point.stages == point.stages):
            if not is_possible(system, point.stages, point.microbatches):
                yield f"  {SYSTEMS[system].label:32} {'-':>9} {'-':>17} {'-':>6} {'-':>13} {'-':>8} {'-':>7}"
        yield ""


def conclusions(rows: list[Row], settings: dict[int, Settings]) -> Iterator[str]:
    """Two things beside what theory says of them: what a blocking step costs, and what the Python of a step costs.

    The first one shows that the measurement sees a bubble.

    Args:
        rows: All rows.
        settings: Settings of the sleeping stages by p.
    """
    by_key = {(row.point, row.system): row for row in rows}
    for (point, system), row in by_key.items():
        ours = by_key.get((point, "2bw-async"))
        if point.mode == "sleep" and system == CONTROL and ours is not None:
            added = 1e3 * (row.seconds.median - ours.seconds.median)
            expected = (point.stages - 1) * settings[point.stages].backward_ms
            yield f"{point.name}: a blocking step adds {added:.0f} ms a batch; (p-1)·tb = {expected:.0f} ms"
        if point.mode == "overhead" and system == "2bw-async":
            cost = row.ratio
            yield (
                f"{point.name}: a step of 2bw-async without compute takes {1 / cost.median:.2f} times as long as "
                f"Megatron's (quartiles {1 / cost.high:.2f}-{1 / cost.low:.2f})"
            )
