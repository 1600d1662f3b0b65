#!/usr/bin/env python3
"""What a delay costs each optimizer, and what repairs it: a study of many training runs, from one YAML file.

Each run is a normal training (scripts/pretrain_gpt.py) on one process and one thread; several run at a time. The
learning rate of an optimizer is chosen on synchronous runs, then kept for all its arms. A run that is finished is not
run again, so the same command line resumes a study; one that was interrupted or whose flags changed starts anew.

The output folder gets report.md, results.json, gaps.png and losses.png, and runs/ with log, tensorboard events and
offline wandb run of every training run.

  reproduce_delay_table.py scripts/studies/smoke.yaml               # a look at it, in minutes
  reproduce_delay_table.py scripts/studies/delay_table.yaml         # the table
  reproduce_delay_table.py STUDY.yaml --only 'muon/*' --dry-run     # which runs, with their command lines
  reproduce_delay_table.py STUDY.yaml --report                      # the report of what there is so far

Exit codes: 0 done, 1 a run failed, 2 bad command line or study file, 130 interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from delay_study import figure, report, results
from delay_study.plan import Study, StudyError, load
from delay_study.runner import ROOT, Runner, Scheduler, command_line, environment, prepare_data
from delay_study.store import Store


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    args = parse_args(argv)
    try:
        study = load(args.study)
        store = Store((args.output or ROOT / "runs" / study.name).resolve(), study.environment)
        scheduler = Scheduler(study, store, args.only)
        if args.dry_run:
            list_runs(study, store, scheduler, wandb=args.wandb)
            return 0
        if args.report:
            print(write_report(study, store))
            return 0
        prepare_data(study)
        with locked(store.directory):
            try:
                failed = Runner(study, store, scheduler, jobs=args.jobs, wandb=args.wandb, say=say).run()
            finally:
                text = write_report(study, store)
    except StudyError as error:
        print(f"reproduce_delay_table.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nreproduce_delay_table.py: interrupted; the same command line resumes", file=sys.stderr)
        return 130
    print(f"\n{text}\nin {store.directory}: report.md, results.json, gaps.png, losses.png")
    for run, outcome in failed:
        print(f"reproduce_delay_table.py: error: {run.name} failed ({outcome.message})", file=sys.stderr)
    return 1 if failed else 0


def say(text: str) -> None:
    """Print at once, also into a file."""
    print(text, flush=True)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    cores = len(os.sched_getaffinity(0))
    add("study", type=Path, metavar="STUDY.yaml", help="what to run; see scripts/studies and docs/delay_study.md")
    add("--output", type=Path, metavar="DIR", help="folder of the study (default: runs/NAME OF THE FILE)")
    add("--jobs", type=int, default=cores, metavar="N", help=f"runs at a time (default: number of cores, here {cores})")
    add("--only", nargs="+", default=[], metavar="PATTERN",
        help="run only OPTIMIZER[/POINT]/ARM/SEED, or a beginning of it, e.g. muon, '*/async', 'muon/*/2', and what "
        "its learning rate is chosen by")  # fmt: skip
    add("--dry-run", action="store_true", help="print the runs and their command lines, run nothing")
    add("--report", action="store_true", help="write the report of what there is, also while the study runs")
    add("--no-wandb", dest="wandb", action="store_false", help="do not log to wandb (offline, one group)")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least 1")
    return args


def list_runs(study: Study, store: Store, scheduler: Scheduler, *, wandb: bool) -> None:
    """Print the runs with their command lines, to be started in the repository's root."""
    runs, later = scheduler.runs()
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment(study).items())
    print(f"environment of every run: {variables.replace('MASTER_PORT=0', 'MASTER_PORT=FREE')}")
    for run in runs:
        state = "finished" if store.is_finished(run) else "to run"
        print(f"\n{run.name} ({state})\n  {shlex.join(command_line(study, store, run, wandb=wandb))}")
    if later:
        print(f"\nand {later} runs with the learning rates that these lead to")


def write_report(study: Study, store: Store) -> str:
    """Write report.md, results.json and the pictures.

    Returns:
        The text of report.md.
    """
    found = results.rows(study, store)
    text = report.markdown(study, found, store)
    store.directory.mkdir(parents=True, exist_ok=True)
    (store.directory / "report.md").write_text(text, encoding="utf-8")
    content = json.dumps(report.content(study, found, store), indent=1, allow_nan=False)
    (store.directory / "results.json").write_text(content + "\n", encoding="utf-8")
    figure.draw_gaps(study, found, store.directory / "gaps.png")
    figure.draw_losses(study, found, store.directory / "losses.png")
    return text


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a study's folder, so that no second process runs the same study.

    Raises:
        StudyError: If one does.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyError(
                f"{directory}: this study is running; --report shows its state, --output DIR starts another"
            ) from None
        yield


if __name__ == "__main__":
    sys.exit(main())
