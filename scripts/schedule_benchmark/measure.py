"""Measures the systems at a point: all of them in turn, again and again, so that drift of the machine hits all."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from schedule_benchmark.builders import Builder
from schedule_benchmark.parts import initialize_groups
from schedule_benchmark.points import SYSTEMS, Launch, Point, Settings, warm_steps
from schedule_benchmark.sleeping import BYTES_PER_SAMPLE, Work
from schedule_benchmark.systems import System


class Measurement:
    """What one rank records of one system at one point.

    Attributes:
        ends: For every repeat, the times at which the window opened and each measured step ended, monotonic clock, ns.
        processor: For every repeat, the processor time of this rank in the window, all threads, ns.
        main_thread: Likewise of its main thread alone, ns.
        late: For every repeat, the sum of the times by which sleeps ended late, ns.
        work: For every repeat, the numbers of forwards, input gradients and weight gradients; sleeping stages only.
        grad_norm: Of the last update.
    """

    def __init__(self) -> None:
        self.ends: list[list[int]] = []
        self.processor: list[int] = []
        self.main_thread: list[int] = []
        self.late: list[int] = []
        self.work: list[tuple[int, int, int]] = []
        self.grad_norm = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


class Meter:
    """Runs the windows of one rank.

    Args:
        settings: How to measure.
        work: Durations and counts of sleeping stages; None for stages that compute.
    """

    def __init__(self, settings: Settings, work: Work | None) -> None:
        self._settings, self._work = settings, work

    def point(
        self, point: Point, systems: dict[str, System], progress: Callable[[str], None]
    ) -> dict[str, Measurement]:
        """Measure all systems at a point."""
        samples = self._samples(point)
        found = {name: Measurement() for name in systems}
        for system in systems.values():
            with self._fast():
                system.start(point.microbatches, samples)
                system.step()  # fills the pipeline
        order = list(systems)
        for repeat in range(self._settings.repeats):
            # Whoever comes after a heavy system must not always be the same one.
            for name in order[repeat % len(order) :] + order[: repeat % len(order)]:
                self._window(point, name, systems[name], found[name])
            progress(f"{point.name}: repeat {repeat + 1} of {self._settings.repeats}")
        for system in systems.values():
            with self._fast():
                system.finish()
        return found

    def _window(self, point: Point, name: str, system: System, found: Measurement) -> None:
        gc.collect()
        dist.barrier()
        gc.disable()
        for _ in range(warm_steps(name)):
            system.step()
        if self._work is not None:
            self._work.reset()
        processor, main_thread = time.process_time_ns(), time.thread_time_ns()
        ends = [time.monotonic_ns()]
        for _ in range(self._settings.steps_at(point.microbatches)):
            system.step()
            ends.append(time.monotonic_ns())
        found.processor.append(time.process_time_ns() - processor)
        found.main_thread.append(time.thread_time_ns() - main_thread)
        found.ends.append(ends)
        found.grad_norm = system.grad_norm
        gc.enable()
        if self._work is not None:
            found.late.append(self._work.late)
            found.work.append(self._work.counts())
            check_work(name, point, self._settings, found.work[-1])

    def _samples(self, point: Point) -> int:
        if point.mode == "compute":
            return self._settings.micro_batch
        return max(point.message_kib * 1024 // BYTES_PER_SAMPLE, 1)

    @contextlib.contextmanager
    def _fast(self) -> Iterator[None]:
        """Steps outside of windows take no time."""
        if self._work is None:
            yield
            return
        before, self._work.is_fast = self._work.is_fast, True
        try:
            yield
        finally:
            self._work.is_fast = before


def check_work(system: str, point: Point, settings: Settings, counts: tuple[int, int, int]) -> None:
    """See to it that in a window every microbatch slept once in each of the three ways, in every chunk of a rank.

    Args:
        system: Key of :data:`~schedule_benchmark.points.SYSTEMS`.
        point: Where it was measured.
        settings: How.
        counts: Forwards, input gradients and weight gradients of this rank.

    Raises:
        RuntimeError: If not: then what was timed is not what the system is said to do.
    """
    expected = settings.steps_at(point.microbatches) * point.microbatches * SYSTEMS[system].chunks
    if set(counts) != {expected}:
        raise RuntimeError(
            f"{system} at {point.name} did {counts} forwards, input gradients and weight gradients in a window that "
            f"should have {expected} of each"
        )


def measure(launch: Launch) -> list[dict[str, Any]]:
    """Measure the points of a launch. All ranks call it.

    Returns:
        On rank 0, for every point its fields and ``systems``: {system: one entry a rank}. Elsewhere nothing.
    """
    initialize_groups(dist.get_world_size())
    is_first = dist.get_rank() == 0
    results = []
    for optimizer in dict.fromkeys(point.optimizer for point in launch.points):
        builder = Builder(launch.points[0].mode, optimizer, launch.settings)
        systems: dict[str, System] = {}
        for point in [p for p in launch.points if p.optimizer == optimizer]:
            names = launch.systems_at(point)
            for name in names:
                if name not in systems:
                    systems[name] = builder.build(name)
            meter = Meter(launch.settings, builder.work)
            found = meter.point(point, {name: systems[name] for name in names}, _say if is_first else _stay_silent)
            results.append({**point.as_dict(), "systems": _gather(found)})
        for system in systems.values():
            system.close()
    return results if is_first else []


def _gather(found: dict[str, Measurement]) -> dict[str, list[dict[str, Any]]]:
    own = {name: measurement.as_dict() for name, measurement in found.items()}
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: [rank[name] for rank in everyone] for name in own}


def _say(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


def _stay_silent(what: str) -> None:
    """Ranks other than the first report nothing."""
