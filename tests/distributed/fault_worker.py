"""Injects faults into runs of Megatron's training loop and writes down how they end. Started by test_faults.py.

``fault_worker FOLDER`` imports Megatron once and forks the ranks of every run, which takes no time. A rank that is to
die is killed from inside, at a random point of its plan or at a random moment of a save.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_async.patches import cpu
from megatron_async.pipeline.plan import Op
from megatron_async.pipeline.runtime import AsyncPipeline
from tests.distributed.fault_cases import Fault, faults, reference, resumed, without_data
from tests.distributed.loop_worker import execute

RANKS = 2
DEADLINE = 90.0
"""Seconds after which a run counts as hung. Megatron's own timeout is a minute in these runs."""


def inject(fault: Fault, rank: int) -> None:
    """Prepare a rank, before its run starts, for what is to happen to it."""
    if fault.kind == "full disk":
        _at_save(fault.iteration, lambda: _limit_files(fault.point))
    elif rank != fault.rank:
        return
    elif fault.kind == "killed":
        _observe(lambda count, pipeline, action: count == fault.point and _die())
    elif fault.kind == "not a number":
        _observe(lambda count, pipeline, action: _poison(fault.point, pipeline, action))
    elif fault.kind == "killed in a save":
        _at_save(fault.iteration, lambda: threading.Timer(fault.point / 1000, _die).start())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _limit_files(size: int) -> None:
    """Let every file that grows beyond ``size`` bytes fail, as it would on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _at_save(iteration: int, act: Callable[[], None]) -> None:
    """Do something when the save of an iteration begins."""
    from megatron.training import checkpointing

    original = checkpointing.generate_state_dict

    @functools.wraps(original)
    def generate_state_dict(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("iteration") == iteration:
            act()
        return original(*args, **kwargs)

    checkpointing.generate_state_dict = generate_state_dict


def _observe(look: Callable[[int, AsyncPipeline, Any], Any]) -> None:
    """Call something after every action of the pipeline, with its number from 1."""
    original = AsyncPipeline.__init__
    count = 0

    def __init__(self: AsyncPipeline, **kwargs: Any) -> None:
        def observer(action: Any) -> None:
            nonlocal count
            count += 1
            look(count, self, action)

        original(self, **kwargs)
        self.executor.observer = observer

    AsyncPipeline.__init__ = __init__  # type: ignore[method-assign]


def _poison(batch: int, pipeline: AsyncPipeline, action: Any) -> None:
    if action.op is Op.BACKWARD and (action.batch, action.microbatch) == (batch, 0):
        pipeline.versions.parameters[0].main_grad.fill_(float("nan"))


def run_rank(rank: int, store: Path, arguments: list[str], fault: Fault | None, out: Path) -> None:
    """One rank of a run, in a process of its own; never returns."""
    with open(out.with_suffix(".log"), "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        status = 1
        os.setsid()
        try:
            faulthandler.dump_traceback_later(DEADLINE - 10)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            if fault is not None:
                inject(fault, rank)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
            outcome = execute(arguments, plugin=True)
            status = outcome["status"]
            out.write_text(json.dumps(outcome))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)


def run(name: str, folder: Path, arguments: list[str], fault: Fault | None = None) -> dict[str, Any]:
    """One run: the exit status of its ranks (minus the signal, if one ended it), what they recorded, and how long."""
    started = time.monotonic()
    outs = [folder / f"{name}-{rank}.json" for rank in range(RANKS)]
    pids = {}
    for rank, out in enumerate(outs):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, folder / f"{name}.store", arguments, fault, out)
        pids[pid] = rank
    statuses: dict[int, int] = {}
    hung = False
    while pids.keys() - statuses.keys():
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            statuses[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() - started > DEADLINE:
            hung = True
            for pid in pids.keys() - statuses.keys():
                os.kill(pid, signal.SIGKILL)
        else:
            time.sleep(0.02)
    for pid in pids:
        # What a rank has started and could not end any more: Megatron's savers.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return {
        "status": [statuses[pid] for pid in pids],
        "hung": hung,
        "ranks": [json.loads(out.read_text()) if out.exists() else None for out in outs],
        "logs": [out.with_suffix(".log").read_text()[-4000:] for out in outs],
        "said": [_said(out.with_suffix(".log")) for out in outs],
        "seconds": time.monotonic() - started,
    }


def _said(log: Path) -> str:
    """What the plugin has printed."""
    return "\n".join(line for line in log.read_text().splitlines() if "megatron_async" in line)


def main(folder: Path) -> None:
    if cpu.is_needed():
        cpu.install(quiet=True)
    import megatron.training.training  # noqa: F401  # before the forks

    found = {"reference": run("reference", folder, reference())}
    for fault in faults(random.Random(20261201)):
        name = fault.name
        saved = folder / "checkpoints" / name
        outcome = run(name, folder, fault.arguments(saved), fault)
        tracker = saved / "latest_checkpointed_iteration.txt"
        outcome["checkpoint"] = int(tracker.read_text()) if tracker.exists() else 0
        found[name] = outcome
        found[f"{name}, resumed"] = run(f"{name} resumed", folder, resumed(saved))
        print(f"{name}: {outcome['status']}, resumed: {found[f'{name}, resumed']['status']}", flush=True)
    found["truncated"] = run("truncated", folder, resumed(truncate(saved)))
    found["truncated, the one before"] = run("before", folder, [*resumed(saved), "--ckpt-step", "2"])
    found["no data"] = run("no data", folder, without_data(folder))
    (folder / "results.json").write_text(json.dumps(found))


def truncate(saved: Path) -> Path:
    """Cut a file of the newest checkpoint in two."""
    newest = max(saved.glob("iter_*"))
    file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    return saved


if __name__ == "__main__":
    main(Path(sys.argv[1]))
