"""The command line of scripts/benchmark_schedules.py, and the plan that follows from it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from schedule_benchmark.points import BASELINE, MODES, OPTIMIZERS, SYSTEMS, WINDOW, Launch, Point, Settings

OVERHEAD_MICROBATCHES = 8
OVERHEAD_STEPS = 30
FORWARD_MS = {2: 15.0, 4: 30.0, 8: 80.0}
"""Default of tf by the number of stages."""
EPILOG = """The more stages, the longer they sleep by default: a slot must be long compared to what all ranks together
need of the processor for messages and Python, and that grows with their number. Where a schedule does not exist
(warm-up factor 2 needs m >= 2p-1) the table has a dash."""
QUICK = {
    "mode": ["sleep", "overhead"],
    "stages": [2, 4],
    "microbatch_factors": [1, 2],
    "messages_kib": [16],
    "optimizers": ["adamw"],
    "repeats": 2,
}


class BenchmarkError(Exception):
    """What the user has to be told."""


def parse_args(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; exits with status 2 if it is bad.

    Args:
        description: Head of the help.
        argv: The arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        description=description, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mode", type=_names(MODES), metavar="A,B", help=f"what to measure, of {', '.join(MODES)} (default: all)")
    add("--systems", type=_names(SYSTEMS), metavar="A,B", help=f"of {', '.join(SYSTEMS)} (default: all)")
    add("--stages", type=_numbers(2), metavar="P,P", help="numbers of pipeline stages p in mode sleep (2,4,8)")
    add("--microbatch-factors", type=_numbers(1), metavar="F,F", help="m = F p microbatches a batch (1,2,4)")
    add("--messages-kib", type=_numbers(1), metavar="N,N", help="KiB of a message in mode sleep (16,1024)")
    add("--optimizers", type=_names(OPTIMIZERS), metavar="A,B", help=f"of {', '.join(OPTIMIZERS)} (default: both)")
    add(
        "--full-grid",
        action="store_true",
        help="all optimizers with all message sizes and all m; without it one thing is varied at a time (all "
        "optimizers with the first message size, all message sizes with the first optimizer), not at the largest m",
    )
    add("--forward-ms", type=_duration, metavar="MS", help="tf in mode sleep (15 for p = 2, 30 for 4, 80 for 8)")
    add("--backward-ms", type=_duration, metavar="MS", help="tb in mode sleep (twice the forward)")
    add(
        "--steps",
        type=_number(1),
        default=0,
        metavar="N",
        help=f"measured steps in a window (as many as have {WINDOW} microbatches; {OVERHEAD_STEPS} in mode overhead)",
    )
    add(
        "--repeats",
        type=_number(1),
        metavar="N",
        help="windows of every system at every point (3; 2 more in mode compute, 5 times as many in mode overhead)",
    )
    add("--layers", type=_number(1), default=4, metavar="N", help="layers of a stage in mode compute (%(default)s)")
    add(
        "--hidden",
        type=_number(64),
        default=256,
        metavar="N",
        help="hidden size in mode compute, a multiple of 64 (%(default)s)",
    )
    add("--sequence", type=_number(1), default=256, metavar="N", help="sequence length in mode compute (%(default)s)")
    add(
        "--micro-batch",
        type=_number(1),
        default=8,
        metavar="N",
        help="sequences of a microbatch in mode compute (%(default)s); the more tokens, the less the optimizer weighs",
    )
    add("--quick", action="store_true", help="a small grid with two repeats; other options still count")
    add(
        "--output",
        type=Path,
        metavar="PREFIX",
        help="writes PREFIX.json and PREFIX.png (benchmark_schedules; with --read, the name of that file)",
    )
    add("--dry-run", action="store_true", help="print the plan and stop")
    add("--read", type=Path, metavar="FILE", help="report on an earlier run's JSON file instead of measuring")
    args = parser.parse_args(argv)
    defaults: dict[str, Any] = {
        "mode": list(MODES),
        "systems": list(SYSTEMS),
        "stages": [2, 4, 8],
        "microbatch_factors": [1, 2, 4],
        "messages_kib": [16, 1024],
        "optimizers": list(OPTIMIZERS),
        "repeats": 3,
        "output": Path("benchmark_schedules") if args.read is None else args.read.with_suffix(""),
    } | (QUICK if args.quick else {})
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64, the size of an attention head, got {args.hidden}")
    if any(size % 8 for size in args.messages_kib):
        parser.error(f"--messages-kib must be multiples of 8, the size of one sample, got {args.messages_kib}")
    if BASELINE not in args.systems:
        parser.error(f"--systems must include {BASELINE}, to which the others are compared")
    return args


def _names(known: Sequence[str] | dict[str, Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return names

    return parse


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def _numbers(least: int) -> Callable[[str], list[int]]:
    return lambda text: list(dict.fromkeys(_number(least)(part) for part in text.split(",")))


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds") from None
    if not 0.0 < value <= 10_000.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 10000 milliseconds, got {text}")
    return value


def plan(args: argparse.Namespace) -> list[Launch]:
    """The launches of a run, one for each number of processes and mode.

    Raises:
        BenchmarkError: If nothing would be measured.
    """
    launches = []
    if "sleep" in args.mode:
        launches += [_sleep_launch(args, stages) for stages in args.stages]
    if "compute" in args.mode:
        points = [_point("compute", 2, 2 * factor, 0, "adamw") for factor in args.microbatch_factors if factor <= 2]
        if points:
            launches.append(Launch(settings=_settings(args, 2, args.repeats + 2), points=points))
    if "overhead" in args.mode:
        points = [_point("overhead", 1, OVERHEAD_MICROBATCHES, 0, "adamw")]
        settings = _settings(args, 1, 5 * args.repeats, steps=args.steps or OVERHEAD_STEPS)
        launches.append(Launch(settings=settings, points=points))
    if not launches:
        raise BenchmarkError("nothing to measure: mode compute knows the --microbatch-factors 1 and 2 only")
    return launches


def _sleep_launch(args: argparse.Namespace, stages: int) -> Launch:
    first = (args.optimizers[0], args.messages_kib[0])
    points = [
        _point("sleep", stages, factor * stages, size, optimizer)
        for optimizer in args.optimizers
        for size in args.messages_kib
        for factor in args.microbatch_factors
        if args.full_grid or _is_in_small_grid(args, factor, size, optimizer)
    ]
    # The control proves the measurement, not a system: once for each m is enough.
    control = [point for point in points if (point.optimizer, point.message_kib) == first]
    return Launch(settings=_settings(args, stages, args.repeats), points=points, control=control)


def _is_in_small_grid(args: argparse.Namespace, factor: int, size: int, optimizer: str) -> bool:
    """At the largest m a step takes longest, and there is the least to gain: the variations are left out there."""
    varied = (optimizer != args.optimizers[0]) + (size != args.messages_kib[0])
    largest = len(args.microbatch_factors) > 1 and factor == max(args.microbatch_factors)
    return varied == 0 or (varied == 1 and not largest)


def _point(mode: str, stages: int, microbatches: int, message_kib: int, optimizer: str) -> Point:
    return Point(mode=mode, stages=stages, microbatches=microbatches, message_kib=message_kib, optimizer=optimizer)


def _settings(args: argparse.Namespace, stages: int, repeats: int, steps: int | None = None) -> Settings:
    forward = args.forward_ms or FORWARD_MS.get(stages, 10.0 * stages)
    return Settings(
        forward_ms=forward,
        backward_ms=args.backward_ms or 2 * forward,
        steps=args.steps if steps is None else steps,
        repeats=repeats,
        systems=tuple(args.systems),
        layers=args.layers,
        hidden=args.hidden,
        sequence=args.sequence,
        micro_batch=args.micro_batch,
    )
