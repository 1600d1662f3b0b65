"""A long run: memory and file descriptors stay flat, and saves, evaluations and resumes change nothing.

    python -m tests.distributed.soak FOLDER [--iterations 2000] [--seed 1]

Two stages, dropout, Muon with error feedback. Three times the same training: plain; with saves and evaluations; in
parts that end and resume at random iterations, with saves and evaluations in between. All losses must be equal. Prints
what every rank occupied, and ends with 1 if something grew or differs. Not a part of the suite: it takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import psutil

from megatron_async.patches import cpu
from tests.distributed import fault_worker
from tests.distributed.loop_runs import ASYNC, DROPOUT, FEEDBACK, MUON, run
from tests.distributed.loop_worker import Recorder

EVERY = 50
"""Iterations between two looks at what a process occupies."""


class Observer(Recorder):
    """Looks at the process too."""

    def log(self, original: Any) -> Any:
        inner = super().log(original)
        process = psutil.Process()

        def training_log(losses: Any, totals: Any, rate: float, iteration: int, *args: Any, **kwargs: Any) -> Any:
            result = inner(losses, totals, rate, iteration, *args, **kwargs)
            if iteration % EVERY == 0:
                self.iterations[-1] |= {"megabytes": process.memory_info().rss / 2**20, "files": process.num_fds()}
            return result

        training_log.__wrapped__ = original  # type: ignore[attr-defined]  # its parameters are looked at
        return training_log


def flags(iterations: int, *more: str) -> list[str]:
    """Command line of the training."""
    length = ["--train-iters", str(iterations), "--pipeline-model-parallel-size", "2", "--ckpt-format", "torch_dist"]
    batch = ["--global-batch-size", "3", "--lr-warmup-iters", "20", "--distributed-timeout-minutes", "2"]
    return run(DROPOUT, MUON, ASYNC, FEEDBACK, length, batch, list(more), log=100, evaluate=10**6)


def losses(outcome: dict[str, Any]) -> list[float]:
    """Losses of the last stage."""
    return [entry["lm loss"] for entry in outcome["ranks"][1]["iterations"]]


def in_parts(folder: Path, iterations: int, rng: random.Random) -> list[float]:
    """The training in parts, each a process that resumes what the one before has left."""
    found: list[float] = []
    saved = ["--save", str(folder / "parts"), "--save-interval", "70"]
    for number, end in enumerate([*sorted(rng.sample(range(20, iterations), 8)), iterations]):
        resume = ["--load", str(folder / "parts")] if found else []
        every = ["--eval-interval", str(rng.randrange(20, 200)), "--eval-iters", "1"]
        outcome = fault_worker.run(
            f"part {number}", folder, flags(iterations, *saved, *resume, *every, "--exit-interval", str(end))
        )
        if outcome["status"] != [0, 0]:
            sys.exit(f"part {number} failed: {outcome['logs']}")
        found += losses(outcome)
        print(f"part {number}: to iteration {len(found)} of {iterations}", flush=True)
    return found


def occupied(outcome: dict[str, Any]) -> list[tuple[float, float, int, int]]:
    """For every rank the megabytes after a fifth of the run and at its end, and the files open at these."""
    result = []
    for rank in outcome["ranks"]:
        seen = [(e["megabytes"], e["files"]) for e in rank["iterations"] if "megabytes" in e]
        early, late = seen[len(seen) // 5], seen[-1]
        result.append((early[0], late[0], early[1], late[1]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    if cpu.is_needed():
        cpu.install(quiet=True)
    import megatron.training.training  # noqa: F401  # before the forks

    import tests.distributed.loop_worker as worker

    worker.Recorder = Observer  # type: ignore[misc]
    fault_worker.DEADLINE = 1800.0
    plain = fault_worker.run("plain", args.folder, flags(args.iterations))
    print(f"plain: {len(losses(plain))} iterations in {plain['seconds']:.0f} s", flush=True)
    whole = fault_worker.run(
        "whole",
        args.folder,
        flags(args.iterations, "--save", str(args.folder / "whole"), "--save-interval", "100", "--eval-interval", "50"),
    )
    print(f"with saves and evaluations: {len(losses(whole))} iterations in {whole['seconds']:.0f} s", flush=True)
    parts = in_parts(args.folder, args.iterations, random.Random(args.seed))
    failures = []
    for rank, (early, late, files, more_files) in enumerate(occupied(whole)):
        print(f"rank {rank}: {early:.0f} MB, then {late:.0f} MB; {files} open files, then {more_files}")
        if late > early * 1.05 or more_files > files + 2:
            failures.append(f"rank {rank} grew")
    for name, found in (("with saves and evaluations", losses(whole)), ("in parts", parts)):
        equal = found == losses(plain)
        print(f"losses {name}: {'equal' if equal else 'different'}, {len(found)} iterations")
        failures += [] if equal else [f"losses {name} differ"]
    (args.folder / "soak.json").write_text(json.dumps({"plain": plain, "whole": whole, "parts": parts}))
    sys.exit("; ".join(failures) or 0)


if __name__ == "__main__":
    main()
