"""The faults that are injected into runs. Imports nothing heavy."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.loop_runs import ADAM, ASYNC, DROPOUT, FEEDBACK, TEN, run

POINTS = int(os.environ.get("MEGATRON_ASYNC_FAULTS", "2"))
"""Random points at which a rank is killed, and as many moments of saves."""

BASE = [DROPOUT, ADAM, ASYNC, FEEDBACK, TEN, ["--pipeline-model-parallel-size", "2", "--ckpt-format", "torch_dist"]]
BASE += [["--distributed-timeout-minutes", "1"]]
ACTIONS = 10 * 9 * 4
"""Actions of a stage in a run, at least: forward, backward and two messages of 9 microbatches in 10 iterations."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: What happens.
        rank: To whom.
        point: When, or how much: the number of an action of the plan, milliseconds after a save has begun, the number
            of a batch, or bytes that a file may have.
        iteration: The iteration whose save is concerned.
    """

    kind: str
    rank: int
    point: int
    iteration: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}, rank {self.rank}, {self.point}" + (f" at {self.iteration}" if self.iteration else "")

    def arguments(self, saved: Path) -> list[str]:
        """Command line of the run."""
        flags = ["--no-check-for-nan-in-loss-and-grad"] if self.kind == "not a number" else []
        return run(*BASE, ["--save", str(saved), "--save-interval", "2"], flags)


def faults(rng: random.Random) -> Iterator[Fault]:
    """All of them; the random points are those of ``rng``."""
    for _ in range(POINTS):
        yield Fault("killed", rng.randrange(2), rng.randrange(1, ACTIONS))
    for _ in range(POINTS):
        yield Fault("killed in a save", rng.randrange(2), rng.randrange(1, 100), 2 * rng.randrange(1, 5))
    yield Fault("full disk", 0, 200_000, 6)
    yield Fault("not a number", rng.randrange(2), rng.randrange(1, 9))


def reference() -> list[str]:
    """The run that nothing happens to."""
    return run(*BASE)


def resumed(saved: Path) -> list[str]:
    """What follows a fault: the run from its last complete checkpoint, or from the start if there is none."""
    return run(*BASE, ["--load", str(saved)])


def without_data(folder: Path) -> list[str]:
    """A data set of no documents."""
    index, data = folder / "empty.idx", folder / "empty.bin"
    data.write_bytes(b"")
    # Megatron's header: magic, version, code of uint16, number of sequences and of documents; one document boundary.
    numbers = [(1, 8), (8, 1), (0, 8), (1, 8), (0, 8)]
    index.write_bytes(b"MMIDIDX\x00\x00" + b"".join(value.to_bytes(size, "little") for value, size in numbers))
    flags = run(*BASE)
    flags.remove("--mock-data")
    return [*flags, "--data-path", str(folder / "empty"), "--split", "90,5,5"]
