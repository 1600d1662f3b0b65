#!/usr/bin/env python3
"""Measure pipeline schedules against each other, on one machine, in one run.

Systems: Megatron's 1F1B and interleaved 1F1B, PyTorch's Schedule1F1B and ScheduleZBVZeroBubble (both with Megatron's
optimizer), and 2bw-async with both warm-up factors. All train with exact clipping by the global gradient norm. As a
control, 2bw-async with a step that blocks is measured too: it must show a bubble of about (p-1) tb a batch.

Modes:
  sleep     Forwards and backwards sleep for a set time, so that many stages fit on a few cores and the schedule alone
            is measured: through real processes, real messages, and real optimizer steps.
  compute   Stages of a real GPT on two ranks, one thread each. Needs two free cores.
  overhead  What a step costs on one stage of no duration: the Python of 2bw-async against that of Megatron.

At every point of the grid all systems are measured in turn, again and again. A window opens when an asynchronous
pipeline is in its steady state, and no pipeline fills or drains inside of one. Reported are medians over the repeats
and quartiles; the bubble is 1 - m (tf + tb) / T, where T is the time per step on the slowest rank.

Examples:
  benchmark_schedules.py --dry-run                        # the plan and how long it takes
  benchmark_schedules.py                                  # the whole grid
  benchmark_schedules.py --quick --output /tmp/look       # a first look
  benchmark_schedules.py --mode sleep --stages 8 --microbatch-factors 1 --optimizers muon
  benchmark_schedules.py --read benchmark_schedules.json  # table and figure of an earlier run

Nothing else should run on the machine meanwhile.
Exit codes: 0 done, 1 a rank failed or a file cannot be read or written, 2 bad command line, 130 interrupted.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from schedule_benchmark.command_line import BenchmarkError, parse_args, plan
from schedule_benchmark.figure import draw
from schedule_benchmark.points import Launch
from schedule_benchmark.report import Row, conclusions, rows_of, table

SCRIPTS = Path(__file__).resolve().parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    args = parse_args(__doc__ or "", argv)
    try:
        if args.read is not None:
            report(_read(args.read), args.output)
            return 0
        launches = plan(args)
        describe(launches)
        if args.dry_run:
            return 0
        check_output(args.output)
        record = run(launches, args.output)
        report(record, args.output)
    except BenchmarkError as error:
        print(f"benchmark_schedules.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmark_schedules.py: interrupted", file=sys.stderr)
        return 130
    return 0


def describe(launches: list[Launch]) -> None:
    """Print the plan."""
    print("plan")
    for launch in launches:
        settings, mode = launch.settings, launch.points[0].mode
        detail = {
            "sleep": f"tf {settings.forward_ms:g} ms, tb {settings.backward_ms:g} ms",
            "compute": f"{settings.layers} layers of {settings.hidden} a stage, "
            f"{settings.micro_batch} sequences of {settings.sequence}",
            "overhead": f"{settings.steps} steps in a window",
        }[mode]
        print(
            f"  {mode:8} p={launch.ranks}: {len(launch.points)} point(s), {settings.repeats} repeats, {detail}, "
            f"about {launch.seconds() / 60:.1f} min"
        )
    total = sum(launch.seconds() for launch in launches)
    print(f"  {os.cpu_count()} cores; about {total / 60:.0f} minutes in all", flush=True)


def check_output(prefix: Path) -> None:
    """See to it that results can be written, before they are measured.

    Raises:
        BenchmarkError: If not.
    """
    folder = prefix.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BenchmarkError(f"--output {prefix}: {folder} is not a folder that can be written to")


def run(launches: list[Launch], output: Path) -> dict[str, Any]:
    """Measure everything, and write what there is after every launch.

    Returns:
        The record, as it stands in the JSON file.
    """
    record: dict[str, Any] = {
        "format": 1,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "launches": [],
    }
    for number, launch in enumerate(launches, start=1):
        name = f"mode {launch.points[0].mode}, p={launch.ranks}"
        print(f"launch {number} of {len(launches)}: {name}", flush=True)
        start = time.monotonic()
        results = start_ranks(launch)
        record["launches"].append(
            {**launch.as_dict(), "results": results, "seconds": round(time.monotonic() - start, 1)}
        )
        _write_json(output, record)
    return record


def start_ranks(launch: Launch) -> list[dict[str, Any]]:
    """Start the processes of a launch and wait for what they measure.

    Raises:
        BenchmarkError: If one of them fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan_file, result_file = Path(folder) / "plan.json", Path(folder) / "results.json"
        plan_file.write_text(json.dumps(launch.as_dict()))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.ranks)),
            *("-m", "schedule_benchmark.worker", str(plan_file), str(result_file)),
        ]
        path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
        ranks = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            status = ranks.wait()
        except KeyboardInterrupt:
            ranks.send_signal(signal.SIGINT)
            ranks.wait()
            raise
        if status != 0 or not result_file.exists():
            raise BenchmarkError(f"the ranks of p={launch.ranks} failed with status {status}; see their messages above")
        results: list[dict[str, Any]] = json.loads(result_file.read_text())
        return results


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Of what was measured."""
    found = {"python": platform.python_version()}
    for package in ("torch", "megatron-core", "emerging-optimizers", "megatron-async"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def report(record: dict[str, Any], output: Path) -> list[Row]:
    """Print the table, and write it with the figure."""
    rows, settings = [], {}
    for content in record["launches"]:
        launch = Launch.from_dict(content)
        for result in content["results"]:
            rows += rows_of(result, launch.settings)
        if launch.points[0].mode == "sleep":
            settings[launch.ranks] = launch.settings
    print()
    for line in (*table(rows), *conclusions(rows, settings)):
        print(line)
    cpu = f"{record['machine']['cpu']}, {record['machine']['cores']} cores"
    found = record["versions"]
    caption = (
        f"medians and quartiles, clipping on; {cpu}; torch {found['torch']}, megatron-core {found['megatron-core']}"
    )
    figure = output.with_name(f"{output.name}.png")
    try:
        draw(rows, figure, caption)
    except OSError as error:
        raise BenchmarkError(f"{figure} cannot be written: {error.strerror or error}") from None
    return rows


def _write_json(output: Path, record: dict[str, Any]) -> None:
    path = output.with_name(f"{output.name}.json")
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(record, indent=1))
        unfinished.replace(path)
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be written: {error.strerror or error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        if record["format"] != 1:
            raise BenchmarkError(f"--read {path}: format {record['format']} is not known here")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"--read {path}: not a result of this script ({error})") from None
    return record


if __name__ == "__main__":
    sys.exit(main())
