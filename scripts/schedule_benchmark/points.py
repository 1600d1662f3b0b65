"""What is measured: systems, points of the grid, and what theory says of them. Pure Python."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

BASELINE = "megatron-1f1b"


@dataclass(frozen=True, slots=True)
class SystemInfo:
    """A system under measurement.

    Attributes:
        label: As it is called in tables and figures.
        chunks: Model chunks a rank holds, each with an equal share of the stage's time.
        asynchronous: Whether weights are one update old and batches run without a flush between them.
    """

    label: str
    chunks: int
    asynchronous: bool


SYSTEMS: dict[str, SystemInfo] = {
    BASELINE: SystemInfo("Megatron 1F1B", 1, False),
    "megatron-interleaved": SystemInfo("Megatron interleaved, 2 chunks", 2, False),
    "torch-1f1b": SystemInfo("PyTorch Schedule1F1B", 1, False),
    "torch-zbv": SystemInfo("PyTorch ScheduleZBVZeroBubble", 2, False),
    "2bw-async": SystemInfo("2bw-async", 1, True),
    "2bw-async-factor2": SystemInfo("2bw-async, warm-up factor 2", 1, True),
    "2bw-async-blocking": SystemInfo("2bw-async, blocking step", 1, True),
}
"""All systems. ``2bw-async-blocking`` completes every update at once: a control that must show a bubble."""

COMPUTE_SYSTEMS = (BASELINE, "2bw-async", "2bw-async-factor2")
"""Those that real models are measured with."""

OPTIMIZERS = ("adamw", "muon")
MODES = ("sleep", "compute", "overhead")
CONTROL = "2bw-async-blocking"
WINDOW = 16
"""Microbatches that a window has at least, unless the number of steps is set."""
START_SECONDS = 12.0
"""Rough time in which two ranks import Megatron and build their systems on two cores."""
GUESSED_COMPUTE_SLOT = 0.25
"""Seconds; stands in the estimate for a slot of real compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the grid.

    Attributes:
        mode: ``sleep`` (stages that sleep), ``compute`` (a real GPT) or ``overhead`` (one stage of no duration).
        stages: Pipeline stages p, one process each.
        microbatches: m of every batch.
        message_kib: Size of one stage-to-stage message, KiB; 0 in other modes than ``sleep``.
        optimizer: ``adamw`` or ``muon``.
    """

    mode: str
    stages: int
    microbatches: int
    message_kib: int
    optimizer: str

    @property
    def name(self) -> str:
        """For tables."""
        size = f", {self.message_kib} KiB" if self.message_kib else ""
        return f"p={self.stages}, m={self.microbatches}{size}, {self.optimizer}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def is_possible(system: str, stages: int, microbatches: int) -> bool:
    """Whether the schedule exists for p stages and m microbatches."""
    if system == "megatron-interleaved":
        return stages > 1 and microbatches % stages == 0
    if system == "2bw-async-factor2":
        return stages > 1 and microbatches >= 2 * stages - 1
    return stages == 1 or microbatches >= stages


def ideal_ratio(stages: int, microbatches: int) -> float:
    """(m+p-1)/m: throughput of a pipeline without bubbles over that of 1F1B, with messages free."""
    return (microbatches + stages - 1) / microbatches


def expected_slots(system: str, stages: int, microbatches: int) -> float:
    """Duration of a step in slots (one forward and one backward of a stage), roughly, for the estimate of a run."""
    bubble = {
        BASELINE: 1.0,
        "torch-1f1b": 1.0,
        "megatron-interleaved": 0.5,
        "torch-zbv": 0.25,
        CONTROL: 2 / 3,
    }
    return microbatches + (stages - 1) * bubble.get(system, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the points of one launch are measured.

    Attributes:
        forward_ms: Duration of a stage's forward, all of its chunks, in milliseconds.
        backward_ms: Duration of its backward, half of it for the input gradient, half for the weight gradient.
        steps: Measured training steps of a system in one repeat; 0 for as many as make :data:`WINDOW` microbatches.
        repeats: How often every system is measured at a point, in turn with the others.
        systems: Keys of :data:`SYSTEMS`.
        layers: Transformer layers of a stage (``compute``).
        hidden: Hidden size (``compute``).
        sequence: Tokens of a sequence (``compute``).
        micro_batch: Sequences of a microbatch (``compute``).
    """

    forward_ms: float
    backward_ms: float
    steps: int = 0
    repeats: int
    systems: tuple[str, ...]
    layers: int = 4
    hidden: int = 256
    sequence: int = 256
    micro_batch: int = 8

    @property
    def slot_seconds(self) -> float:
        """tf + tb."""
        return (self.forward_ms + self.backward_ms) / 1e3

    def steps_at(self, microbatches: int) -> int:
        """Measured steps in a window for batches of m microbatches."""
        return self.steps or math.ceil(WINDOW / microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Points that are measured by one start of p processes.

    Attributes:
        settings: How.
        points: All with the same number of stages and the same mode.
        control: Points at which the blocking step is measured too.
    """

    settings: Settings
    points: list[Point]
    control: list[Point] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.points[0].stages

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Launch:
        """What :meth:`as_dict` made."""
        settings = Settings(**{**content["settings"], "systems": tuple(content["settings"]["systems"])})
        points, control = ([Point(**point) for point in content[key]] for key in ("points", "control"))
        return cls(settings=settings, points=points, control=control)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def systems_at(self, point: Point) -> list[str]:
        """The systems to measure at a point, the baseline first."""
        possible = [
            s for s in SYSTEMS if s in self.settings.systems and is_possible(s, point.stages, point.microbatches)
        ]
        if point.mode == "compute":
            return [s for s in possible if s in COMPUTE_SYSTEMS]
        if point.mode == "overhead":
            return [s for s in possible if s in (BASELINE, "2bw-async")]
        return [s for s in possible if s != CONTROL or point in self.control]

    def seconds(self) -> float:
        """Rough duration, the start of the processes included."""
        slots = 0.0
        for point in self.points:
            steps = self.settings.steps_at(point.microbatches)
            for system in self.systems_at(point):
                slots += (steps + warm_steps(system)) * expected_slots(system, point.stages, point.microbatches)
        start = START_SECONDS * max(self.ranks / 2, 1)
        if self.points[0].mode == "overhead":
            return start + self.settings.repeats * slots * 0.002
        slot = GUESSED_COMPUTE_SLOT if self.points[0].mode == "compute" else self.settings.slot_seconds * 1.03
        return start + self.settings.repeats * slots * slot


def warm_steps(system: str) -> int:
    """Steps that run before a window opens: an asynchronous pipeline that paused needs one to get back in step."""
    return 1 if SYSTEMS[system].asynchronous else 0
