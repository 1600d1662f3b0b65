"""What a study leaves behind: a folder for each run, what the run was, how it ended, and its losses."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import compare_runs

from delay_study.plan import Run

DONE, DIVERGED, FAILED = "done", "diverged", "failed"
Z_VALIDATION = "lm loss z validation"
"""Tag of the plain iterate's validation loss, under --async-evaluate both."""

LAST = 50  # training loss: mean over so many logged iterations
NOT_FINITE = re.compile(r"(NaN|Inf) in the loss|found (NaN|Inf) in|number of nan iterations:\s+[1-9]")
"""What Megatron or the training script says when a loss or a gradient is not finite."""


@dataclass(kw_only=True)
class Outcome:
    """How a run ended, and what it measured.

    Attributes:
        status: DONE, DIVERGED (a loss or a gradient was not finite) or FAILED.
        flags: Flags it ran with.
        environment: Environment variables of the study.
        seconds: From start to end.
        message: Why it failed, for people.
        validation_loss: At the last iteration, in nats per token; None unless done.
        validation_loss_z: The same for the plain iterate, where it was evaluated too.
        training_loss: Mean over the last logged iterations.
        seconds_per_iteration: Median without the first log interval.
        training: (iteration, loss of its batch).
        validation: (iteration, loss).
        validation_z: (iteration, loss) of the plain iterate.
    """

    status: str
    flags: list[str]
    environment: dict[str, str]
    seconds: float
    message: str = ""
    validation_loss: float | None = None
    validation_loss_z: float | None = None
    training_loss: float | None = None
    seconds_per_iteration: float | None = None
    training: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    validation_z: list[tuple[int, float]] = field(default_factory=list)


class Store:
    """Folder of a study.

    Args:
        directory: The folder; made when a run starts.
        environment: Environment variables of the study, part of what a run is known by.
    """

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self._environment = environment
        self._known: dict[Run, Outcome] = {}

    def folder(self, run: Run) -> Path:
        """Where a run writes."""
        return self.directory / "runs" / run.name

    def log(self, run: Run) -> Path:
        """Output of a run."""
        return self.folder(run) / "log.txt"

    def begin(self, run: Run) -> None:
        """Make an empty folder: what an interrupted or outdated run left there goes."""
        self._known.pop(run, None)
        shutil.rmtree(self.folder(run), ignore_errors=True)
        self.folder(run).mkdir(parents=True)

    def forget(self, run: Run) -> None:
        """Let a run count as not run; its log stays until it starts again."""
        self._known.pop(run, None)
        (self.folder(run) / "outcome.json").unlink(missing_ok=True)

    def outcome(self, run: Run) -> Outcome | None:
        """How a run with exactly these flags ended; None where it did not run, or did not end, or had other flags."""
        if run not in self._known:
            file = self.folder(run) / "outcome.json"
            if not file.is_file():
                return None
            outcome = Outcome(**json.loads(file.read_text(encoding="utf-8")))
            if outcome.flags != list(run.flags) or outcome.environment != self._environment:
                return None
            self._known[run] = outcome
        return self._known[run]

    def is_finished(self, run: Run) -> bool:
        """Whether a run need not run again: it gave a result, be it that it diverged."""
        outcome = self.outcome(run)
        return outcome is not None and outcome.status != FAILED

    def end(self, run: Run, *, exit_code: int, seconds: float) -> Outcome:
        """Read what a run measured and keep it.

        Args:
            run: A run whose process is gone.
            exit_code: Of the process; negative for the signal that ended it.
            seconds: How long it took.
        """
        outcome = Outcome(status=DONE, flags=list(run.flags), environment=self._environment, seconds=round(seconds, 2))
        log = self.log(run).read_text(encoding="utf-8", errors="replace")
        _read_losses(outcome, self.folder(run))
        last = outcome.validation[-1] if outcome.validation else (0, math.nan)
        finite = all(math.isfinite(loss) for _, loss in outcome.training) and not NOT_FINITE.search(log)
        if not finite or (outcome.validation and not math.isfinite(last[1])):
            outcome.status = DIVERGED
        elif exit_code != 0:
            outcome.status = FAILED
            outcome.message = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        elif last[0] != run.iterations:
            outcome.status = FAILED
            outcome.message = f"ended without a validation loss at its last iteration, {run.iterations}"
        else:
            outcome.validation_loss = last[1]
            outcome.validation_loss_z = outcome.validation_z[-1][1] if outcome.validation_z else None
        _write(self.folder(run) / "outcome.json", asdict(outcome))
        self._known[run] = outcome
        return outcome


def _read_losses(outcome: Outcome, folder: Path) -> None:
    read = compare_runs.read_run(folder.name, folder, LAST)
    outcome.training, outcome.validation = _compact(read.training), _compact(read.validation)
    outcome.training_loss = read.training_loss
    outcome.seconds_per_iteration = compare_runs.seconds_per_iteration(read)
    outcome.validation_z = _compact(read_scalar(folder, Z_VALIDATION))


def _compact(series: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Six digits after the point are more than a loss of float32 sums has."""
    return [(step, round(loss, 6)) for step, loss in series]


def read_scalar(folder: Path, tag: str) -> list[tuple[int, float]]:
    """A scalar of a run's event files: (iteration, mean of its values at this iteration).

    Args:
        folder: Searched for event files.
        tag: Of the scalar.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[int, list[float]] = {}
    for below in sorted({file.parent for file in folder.rglob("events.out.tfevents.*")}):
        accumulator = EventAccumulator(str(below), size_guidance={"scalars": 0})  # 0: keep every point
        accumulator.Reload()
        if tag in accumulator.Tags()["scalars"]:
            for event in accumulator.Scalars(tag):
                values.setdefault(event.step, []).append(event.value)
    return [(step, sum(some) / len(some)) for step, some in sorted(values.items())]


def _write(file: Path, content: Any) -> None:
    """At once or not at all: whoever reads meanwhile, or resumes after a crash, sees a whole file."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content), encoding="utf-8")
    os.replace(part, file)
