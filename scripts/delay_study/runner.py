"""Runs the training runs of a study, several at a time, each a process of one thread."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from delay_study.plan import Group, Run, Study, StudyError, is_selected
from delay_study.store import DONE, FAILED, Outcome, Store

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0  # between the request to end and the end
TAIL_LINES = 25


@dataclass(kw_only=True)
class Process:
    """A run in progress.

    Attributes:
        run: What runs.
        process: Its process, leader of a process group of its own.
        log: Open file that takes its output.
        started: Clock at its start, in seconds.
        slot: Which of the parallel places it occupies.
    """

    run: Run
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started: float
    slot: int


def command_line(study: Study, store: Store, run: Run, *, wandb: bool, slot: int = 0) -> list[str]:
    """Command of a run, to be started in the repository's root.

    Args:
        study: Study of the run.
        store: Where it writes.
        run: What to run.
        wandb: Whether to log to wandb.
        slot: Two runs at the same time have two caches of the data's order: Megatron writes them without a lock.
    """
    folder = store.folder(run)
    where = ["--data-path", study.data.path, "--data-cache-path", str(store.directory / "cache" / str(slot))]
    where += ["--tensorboard-dir", str(folder / "tensorboard")]
    if wandb:
        where += ["--wandb-project", "megatron-async-delay-study", "--wandb-exp-name", run.name.replace("/", " ")]
        where += ["--wandb-save-dir", str(folder)]
    return [sys.executable, "scripts/pretrain_gpt.py", *run.flags, *where]


def environment(study: Study, port: int = 0) -> dict[str, str]:
    """Environment variables of a run: one process, one thread, no accelerator; wandb offline and as one group."""
    own = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_RUN_GROUP": study.name,
        "WANDB_X_DISABLE_STATS": "true",
    }  # fmt: skip
    return {**own, **study.environment}


def prepare_data(study: Study) -> None:
    """Build the data set where it is missing.

    Raises:
        StudyError: If it cannot be built, or the study does not say how.
    """
    import sysconfig

    prefix = ROOT / study.data.path
    if all(prefix.with_name(prefix.name + suffix).is_file() for suffix in (".bin", ".idx")):
        return
    if not study.data.prepare:
        raise StudyError(f"data: no {prefix}.idx; build it with scripts/prepare_data.py, or add data.prepare")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    stdlib = sysconfig.get_path("stdlib")
    command = [part.replace("{path}", study.data.path).replace("{stdlib}", stdlib) for part in study.data.prepare]
    print(f"building {study.data.path}: {shlex.join(command)}", flush=True)
    if subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode != 0:
        raise StudyError("data.prepare: the command failed; its output is above")


def tuned_learning_rate(study: Study, store: Store, group: Group) -> float | None:
    """Learning rate of the best synchronous run; None while one of them is missing or if none gave a loss."""
    if len(group.learning_rates) == 1:
        return group.learning_rates[0]
    losses = {}
    for run in study.tuning_runs(group):
        outcome = store.outcome(run)
        if outcome is None:
            return None
        if outcome.status == DONE and outcome.validation_loss is not None:
            losses[run.learning_rate] = outcome.validation_loss
    return min(losses, key=losses.__getitem__) if losses else None


class Scheduler:
    """What to run next: first everything that learning rates are chosen by, then seed by seed, the longest first.

    Args:
        study: The study.
        store: What there is already.
        only: Patterns of --only; empty: everything.
    """

    def __init__(self, study: Study, store: Store, only: Sequence[str] = ()) -> None:
        self._study, self._store, self._only = study, store, tuple(only)
        self.groups = [group for group in study.groups() if self._arm_runs(group, group.learning_rates[0])]
        if not self.groups:
            raise StudyError(f"--only {' '.join(only)}: no run is called so; --dry-run lists them")

    def runs(self) -> tuple[list[Run], int]:
        """The runs that are known, in order, and how many more there will be when learning rates are chosen."""
        tuning = [run for group in self.groups for run in self._study.tuning_runs(group)]
        arms: list[Run] = []
        later = 0
        for group in self.groups:
            rate = tuned_learning_rate(self._study, self._store, group)
            if rate is not None:
                arms += self._arm_runs(group, rate)
            elif not self._is_hopeless(group):
                reused = self._study.run(group, self._study.baseline, 0.0, self._study.seeds[0])
                expected = self._arm_runs(group, 0.0)
                later += len(expected) - (reused in expected)
        seeds = {seed: i for i, seed in enumerate(self._study.seeds)}
        seconds = {group: self._seconds(group) for group in self.groups}
        arms.sort(key=lambda run: (seeds[run.seed], -seconds[run.group]))
        return list(dict.fromkeys([*tuning, *arms])), later

    def _is_hopeless(self, group: Group) -> bool:
        """Whether all synchronous runs ended and none gave a loss."""
        return all(self._store.outcome(run) is not None for run in self._study.tuning_runs(group))

    def _arm_runs(self, group: Group, rate: float) -> list[Run]:
        runs = self._study.arm_runs(group, rate)
        return [run for run in runs if is_selected(run, self._only)] if self._only else runs

    def _seconds(self, group: Group) -> float:
        """How long a synchronous run of a group takes, as far as one was seen."""
        return max(
            (o.seconds for run in self._study.tuning_runs(group) if (o := self._store.outcome(run))), default=0.0
        )


class Runner:
    """Keeps a number of runs going until none is left.

    Args:
        study: The study.
        store: Where runs write.
        scheduler: What to run.
        jobs: How many at a time.
        wandb: Whether to log to wandb.
        say: Takes lines for people.
    """

    def __init__(
        self, study: Study, store: Store, scheduler: Scheduler, *, jobs: int, wandb: bool, say: Callable[[str], None]
    ) -> None:
        self._study, self._store, self._scheduler = study, store, scheduler
        self._jobs, self._wandb, self._say = jobs, wandb, say
        self._running: list[Process] = []
        self._ended: dict[Run, Outcome] = {}
        self._durations: dict[str, list[float]] = {}

    def run(self) -> list[tuple[Run, Outcome]]:
        """Run everything that is not finished.

        Returns:
            The runs that failed.
        """
        from tqdm import tqdm

        for run in self._scheduler.runs()[0]:
            outcome = self._store.outcome(run)
            if outcome is not None and outcome.status == FAILED:
                self._store.forget(run)
        form = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
        # A bar on a terminal; elsewhere a line for every run that ended.
        bar = tqdm(desc=self._study.name, bar_format=form, dynamic_ncols=True, disable=not sys.stderr.isatty())
        with bar, self._children():
            while True:
                runs, later = self._scheduler.runs()
                self._start(runs)
                waiting = [run for run in runs if run not in self._ended and not self._store.is_finished(run)]
                bar.total, bar.n = len(runs) + later, len(runs) - len(waiting)
                forecast = self._forecast(waiting, later)
                bar.set_postfix_str(forecast)
                if not self._running:
                    break
                time.sleep(POLL_SECONDS)
                for process in [p for p in self._running if p.process.poll() is not None]:
                    text = self._end(process)
                    if bar.disable:
                        self._say(f"{len(runs) - len(waiting)}/{len(runs) + later}, {forecast}; {text}")
                    else:
                        bar.write(text)
        return [(run, outcome) for run, outcome in self._ended.items() if outcome.status == FAILED]

    def _start(self, runs: list[Run]) -> None:
        busy = {process.run for process in self._running}
        for run in runs:
            free = [slot for slot in range(self._jobs) if slot not in {process.slot for process in self._running}]
            if not free:
                return
            if run in busy or run in self._ended or self._store.is_finished(run):
                continue
            self._store.begin(run)
            log = self._store.log(run).open("wb")
            command = command_line(self._study, self._store, run, wandb=self._wandb, slot=free[0])
            log.write(f"{shlex.join(command)}\n\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_clean(os.environ) | environment(self._study, _free_port()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.append(Process(run=run, process=process, log=log, started=time.monotonic(), slot=free[0]))

    def _end(self, process: Process) -> str:
        """Keep what a run gave, and say it."""
        self._running.remove(process)
        process.log.close()
        seconds = time.monotonic() - process.started
        outcome = self._store.end(process.run, exit_code=process.process.returncode, seconds=seconds)
        self._ended[process.run] = outcome
        self._durations.setdefault(process.run.group.optimizer, []).append(seconds)
        if outcome.status == FAILED:
            log = self._store.log(process.run)
            return f"{process.run.name}: failed ({outcome.message}); the end of {log}:\n{tail(log)}"
        if outcome.validation_loss is None:
            return f"{process.run.name}: {outcome.status} after {seconds:.0f} s"
        z = "" if outcome.validation_loss_z is None else f", of z {outcome.validation_loss_z:.4f}"
        return f"{process.run.name}: validation loss {outcome.validation_loss:.4f}{z} ({seconds:.0f} s)"

    def _forecast(self, waiting: list[Run], later: int) -> str:
        """Time left, from how long runs of the same optimizer took; empty while none has ended."""
        measured = {name: statistics.fmean(seconds) for name, seconds in self._durations.items()}
        if not measured:
            return "first runs under way"
        usual = statistics.fmean(measured.values())
        left = sum(measured.get(run.group.optimizer, usual) for run in waiting) + later * usual
        for process in self._running:
            left -= min(time.monotonic() - process.started, measured.get(process.run.group.optimizer, usual))
        minutes, seconds = divmod(round(left / self._jobs), 60)
        return f"about {minutes}:{seconds:02d} left"

    @contextlib.contextmanager
    def _children(self) -> Iterator[None]:
        """Ends all processes on the way out, also when this one is interrupted or asked to end."""

        def interrupt(number: int, frame: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            for number in (signal.SIGTERM, signal.SIGKILL):
                for process in self._running:
                    if process.process.poll() is None:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(process.process.pid, number)
                deadline = time.monotonic() + GRACE_SECONDS
                while any(p.process.poll() is None for p in self._running) and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS / 4)
            for process in self._running:
                process.log.close()


def tail(log: Path) -> str:
    """Last lines of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])


def _clean(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a surrounding torchrun or wandb run left in it."""
    return {name: value for name, value in inherited.items() if not name.startswith(("WANDB_", "TORCHELASTIC_"))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
