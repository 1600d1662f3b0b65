"""Rank of the training-loop test: trains many times in one process and records what Megatron logged, exactly.

Started by conftest.py as ``loop_worker FOLDER LAUNCH``. Every run executes scripts/pretrain_gpt.py as
``__main__``; Megatron's global state is destroyed in between.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_async
from megatron_async.patches import cpu
from tests.distributed import checkpoint_runs, loop_runs, parallel_runs
from tests.distributed.loop_runs import STOCK

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """Stands behind the plugin, where Megatron's own functions are, and writes down what they are given."""

    def __init__(self, terminate_in: int | None = None) -> None:
        self.terminate_in = terminate_in
        self.iterations: list[dict[str, Any]] = []
        self.weights = ""
        self.evaluations: list[float] = []

    def log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_log(losses: Any, totals: Any, rate: float, iteration: int, *args: Any, **kwargs: Any) -> Any:
            entry = {"iteration": iteration, "lr": rate, "skipped": args[2], "norm": args[3]}
            entry |= {key: float(value) for key, value in losses.items()}
            self.iterations.append(entry)
            if iteration == self.terminate_in:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(losses, totals, rate, iteration, *args, **kwargs)

        return training_log

    def train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(forward_step_func: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(forward_step_func, model, *args, **kwargs)
            finally:
                session = current_session()
                if session is not None and session.pipeline is not None:
                    session.pipeline.bind_newest()
                self.weights = fingerprint(model)

        return train

    def evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.evaluations += [float(value) for value in (result[0] or {}).values()]
            return result

        return evaluate


def current_session() -> Any:
    from megatron_async import installation

    return installation._session


def clean_up() -> None:
    """Take the plugin and Megatron's global state out of the process, so that another run can begin."""
    from megatron.training import training

    pipeline = current_session() and current_session().pipeline
    if pipeline:
        pipeline.close()
    megatron_async.uninstall()
    training.destroy_global_state()
    if cpu.is_needed():
        cpu.install(quiet=True)


def fingerprint(model: list[torch.nn.Module]) -> str:
    """Digest of every byte of the weights, by name."""
    digest = hashlib.sha256()
    for chunk in model:
        for name, parameter in sorted(chunk.named_parameters()):
            digest.update(name.encode())
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def execute(arguments: list[str], *, plugin: bool) -> dict[str, Any]:
    """One run; on the last rank with its losses."""
    from megatron.training import training

    recorder = Recorder(terminate_in=4 if "--exit-signal-handler" in arguments else None)
    originals = {name: getattr(training, name) for name in ("training_log", "train", "evaluate")}
    training.training_log = recorder.log(originals["training_log"])
    training.train = recorder.train(originals["train"])
    training.evaluate = recorder.evaluate(originals["evaluate"])
    install = megatron_async.install
    if not plugin:
        megatron_async.install = lambda: None  # type: ignore[assignment, return-value]
    started = training._TRAIN_START_TIME
    if "--exit-duration-in-mins" in arguments:
        training.set_startup_timestamps(program_start=started - 3600)
    script = ROOT / "scripts" / "pretrain_gpt.py"
    sys.argv = [str(script), *arguments]
    status = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, flush=True)
        status = 1 if isinstance(ended.code, str) else int(ended.code or 0)
    finally:
        megatron_async.install = install
        training.set_startup_timestamps(program_start=started)
        clean_up()
        for name, original in originals.items():
            setattr(training, name, original)
    return {
        "status": status,
        "iterations": recorder.iterations,
        "weights": recorder.weights,
        "evaluations": recorder.evaluations,
    }


def main(folder: Path, launch: str) -> None:
    if cpu.is_needed():
        cpu.install(quiet=True)
    # Not above: it imports the executor, and who records what an executor does patches Megatron before that.
    from tests.distributed.loop_sabotages import sabotage_of

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, list[dict[str, Any]]] = {}
    runs: dict[str, list[str]] = {}
    for part in (loop_runs, checkpoint_runs, parallel_runs):
        runs |= part.runs_of(launch, str(folder))
    for name, arguments in runs.items():
        for plugin in (True, False) if name in STOCK else (True,):
            # Anew each time: Megatron leaves its old gloo groups behind, whose idle threads take the processor's time.
            store = folder / f"{launch}-{len(found)}.store"
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
            with sabotage_of(name):
                outcome = execute(arguments, plugin=plugin)
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, outcome)
            found[name if plugin else f"{name}, without the plugin"] = everyones
            dist.destroy_process_group()
            gc.collect()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
