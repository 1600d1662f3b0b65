"""Runs that save and resume, for the training-loop launches; see loop_runs.py. Imports nothing heavy."""

from __future__ import annotations

from tests.distributed.loop_runs import (
    ADAM,
    ASYNC,
    AUDIT,
    DROPOUT,
    FEEDBACK,
    MUON,
    NO_DROPOUT,
    PHASES,
    SGD,
    TEN,
    UNTIED,
    grows,
    run,
)

SHARDED = ["--ckpt-format", "torch_dist"]
PER_RANK = ["--ckpt-format", "torch"]
IN_BACKGROUND = ["--async-save", "--async-strategy", "mcore"]
BF16 = ["--bf16"]
SOAP = ["--optimizer", "soap"]
SYNC = ["--pipeline-schedule", "1f1b"]


def stages(count: int) -> list[str]:
    return ["--pipeline-model-parallel-size", str(count)]


def saves(folder: str, name: str, interval: int) -> list[str]:
    return ["--save", f"{folder}/checkpoints/{name}", "--save-interval", str(interval)]


def loads(folder: str, name: str, iteration: int) -> list[str]:
    return ["--load", f"{folder}/checkpoints/{name}", "--ckpt-step", str(iteration), "--exit-on-missing-checkpoint"]


KINDS: dict[str, list[list[str]]] = {
    "adam": [DROPOUT, ADAM, ASYNC, FEEDBACK, AUDIT, SHARDED],
    "muon bf16, in background": [DROPOUT, MUON, ASYNC, FEEDBACK, BF16, SHARDED, IN_BACKGROUND],
    "soap, per rank": [NO_DROPOUT, SOAP, ASYNC, FEEDBACK, PER_RANK],
    "sgd, no feedback": [NO_DROPOUT, SGD, ASYNC, SHARDED],
    "predicted": [NO_DROPOUT, ADAM, ASYNC, ["--async-weight-prediction"], SHARDED],
    "pipedream": [NO_DROPOUT, ADAM, ["--pipeline-schedule", "pipedream"], FEEDBACK, SHARDED],
    "phases": [DROPOUT, ADAM, ASYNC, FEEDBACK, PHASES, SHARDED],
}
"""Flags of runs on two stages that are saved and resumed."""

RESUMED: dict[str, tuple[int, ...]] = {"adam": (1, 4, 9), "phases": (2, 3, 5, 7, 8)}
"""Iterations that they are resumed from; 6 elsewhere."""

SABOTAGES = {
    "adam: from 4, no entry": "no entry",
    "adam: from 4, older weights lost": "older weights lost",
}
"""Resumed runs that are made wrong, as negative controls, and how."""

SABOTAGED_SAVES = ("random state of later", "z in the entry")
"""Kinds of saves that are made wrong."""


def resumed_at(kind: str) -> tuple[int, ...]:
    return RESUMED.get(kind, (6,))


def on_two_stages(folder: str) -> dict[str, list[str]]:
    """Every kind saved and resumed; the ways out of an asynchronous checkpoint and into one."""
    two = stages(2)
    runs: dict[str, list[str]] = {}
    for kind, flags in KINDS.items():
        interval = 1 if kind in RESUMED else 3
        runs[f"{kind}: saved"] = run(*flags, TEN, two, saves(folder, kind, interval))
        for iteration in resumed_at(kind):
            runs[f"{kind}: from {iteration}"] = run(*flags, TEN, two, loads(folder, kind, iteration))
    adam = KINDS["adam"]
    for name in SABOTAGES:
        runs[name] = run(*adam, TEN, two, loads(folder, "adam", 4))
    for kind in SABOTAGED_SAVES:
        runs[f"{kind}: saved"] = run(*adam, TEN, two, saves(folder, kind, 4))
        runs[f"{kind}: from 4"] = run(*adam, TEN, two, loads(folder, kind, 4))
    for name, what in (
        ("saved", saves(folder, "grows", 4)),
        ("from 4", loads(folder, "grows", 4)),
        ("from 5", loads(folder, "grows", 5)),
        ("only evaluated", [*loads(folder, "grows", 4), "--skip-train"]),
    ):
        # Megatron saves at iteration 5 by itself, because the batch grows there.
        runs[f"grows: {name}"] = grows(*adam, TEN, two, what)
    runs["adam: not saved"] = run(*adam, TEN, two)
    # a signal, and what it leaves
    signal = saves(folder, "terminated", 100)
    runs["adam: terminated in 4"] = run(*adam, TEN, two, signal, ["--exit-signal-handler"])
    runs["adam: after the signal"] = run(*adam, TEN, two, loads(folder, "terminated", 5))
    # from one mode into the other
    plain = (NO_DROPOUT, MUON, SHARDED, TEN, two)
    asynchronous = (*plain, ASYNC, FEEDBACK)
    runs["sync: saved"] = run(*plain, SYNC, saves(folder, "sync", 5))
    runs["sync: goes on asynchronously"] = run(*asynchronous, loads(folder, "sync", 5))
    runs["sync: switches"] = run(*asynchronous, ["--async-sync-start-iters", "5"])
    runs["async: saved"] = run(*asynchronous, saves(folder, "async", 5))
    runs["async: goes on synchronously"] = run(*plain, SYNC, loads(folder, "async", 5))
    runs["async: switches"] = run(*asynchronous, ["--async-sync-cooldown-iters", "5"])
    # parts of a checkpoint
    at_five = loads(folder, "async", 5)
    runs["async: fine-tuned"] = run(*asynchronous, at_five, ["--finetune"])
    runs["async: fine-tuned synchronously"] = run(*plain, SYNC, at_five, ["--finetune"])
    runs["async: without optimizer"] = run(*asynchronous, at_five, ["--no-load-optim"])
    runs["async: without random state"] = run(*asynchronous, at_five, ["--no-load-rng"])
    runs["async: from 5"] = run(*asynchronous, at_five)
    runs["one stage: goes on on two"] = run(*resharded(), two, loads(folder, "one stage", 6))
    runs["two stages: saved"] = run(*resharded(), two, saves(folder, "two stages", 6))
    runs["pipedream: goes on with 2bw-async"] = run(
        NO_DROPOUT, ADAM, ASYNC, FEEDBACK, SHARDED, TEN, two, loads(folder, "pipedream", 6)
    )
    return runs


def resharded() -> list[list[str]]:
    """Losses of these flags do not depend on the number of stages."""
    return [NO_DROPOUT, MUON, UNTIED, ["--clip-grad", "0"], ASYNC, FEEDBACK, SHARDED, TEN]


def on_one_stage(folder: str) -> dict[str, list[str]]:
    """Saved here, resumed on two."""
    return {"one stage: saved": run(*resharded(), stages(1), saves(folder, "one stage", 6))}


def on_four_ranks(folder: str) -> dict[str, list[str]]:
    """More stages than before, and data-parallel replicas with the distributed optimizer."""
    runs = {"two stages: goes on on four": run(*resharded(), stages(4), loads(folder, "two stages", 6))}
    replicas = (DROPOUT, ADAM, ASYNC, FEEDBACK, SHARDED, TEN, stages(2), ["--use-distributed-optimizer"])
    batch = ["--global-batch-size", "8"]
    for name, flags in {"fp32": [], "bf16": [*BF16, *IN_BACKGROUND]}.items():
        runs[f"replicas {name}: saved"] = run(*replicas, batch, flags, saves(folder, f"replicas {name}", 6))
        runs[f"replicas {name}: from 6"] = run(*replicas, batch, flags, loads(folder, f"replicas {name}", 6))
    return runs


def runs_of(launch: str, folder: str) -> dict[str, list[str]]:
    """The runs of one launch, after those of loop_runs.py."""
    return {"pp1": on_one_stage, "pp2": on_two_stages, "pp4": on_four_ranks}[launch](folder)
