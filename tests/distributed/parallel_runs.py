"""Runs with tensor parallelism and experts, for the training-loop launches; see loop_runs.py. Imports nothing heavy."""

from __future__ import annotations

from tests.distributed.loop_runs import ADAM, ASYNC, DROPOUT, FEEDBACK, MUON, NO_DROPOUT, TEN, UNTIED, run

SYNC = ["--pipeline-schedule", "1f1b"]
SEQUENCE = ["--sequence-parallel"]
UNCLIPPED = ["--clip-grad", "0"]
VOCABULARY = ["--make-vocab-size-divisible-by", "64"]
"""The same padding with one tensor-parallel rank and with two."""
WHOLE_MATRICES = ["--muon-tp-mode", "duplicated"]


def sizes(pipeline: int, tensor: int) -> list[str]:
    return ["--pipeline-model-parallel-size", str(pipeline), "--tensor-model-parallel-size", str(tensor)]


def start(folder: str) -> list[str]:
    return ["--load", f"{folder}/untied", "--finetune", *UNTIED, *VOCABULARY]


def tensor_parallel(folder: str, pipeline: int, tensor: int) -> dict[str, list[str]]:
    """Runs whose losses depend on the number of tensor-parallel ranks by rounding, on that of stages not at all."""
    size, weights = sizes(pipeline, tensor), start(folder)
    base = (NO_DROPOUT, ASYNC, FEEDBACK, TEN, weights, UNCLIPPED, size)
    sequence = SEQUENCE if tensor > 1 else []
    return {
        f"tp{tensor}: adam": run(*base, ADAM, sequence),
        f"tp{tensor}: muon": run(*base, MUON, WHOLE_MATRICES),
        f"tp{tensor}: adam bf16": run(*base, ADAM, ["--bf16"], sequence),
        f"tp{tensor}: sync": run(NO_DROPOUT, SYNC, TEN, weights, UNCLIPPED, size, ADAM),
    }


def on_one_stage(folder: str) -> dict[str, list[str]]:
    return tensor_parallel(folder, 1, 1)


def on_two_ranks(folder: str) -> dict[str, list[str]]:
    """One stage of two tensor-parallel ranks."""
    return tensor_parallel(folder, 1, 2)


def on_four_ranks(folder: str) -> dict[str, list[str]]:
    """Two stages of two tensor-parallel ranks, and one with two data-parallel replicas."""
    two = sizes(2, 2)
    flags = (DROPOUT, ADAM, ASYNC, FEEDBACK, TEN, two, ["--ckpt-format", "torch_dist"], SEQUENCE)
    saved = f"{folder}/checkpoints/tp2"
    replicas = (NO_DROPOUT, ADAM, ASYNC, FEEDBACK, TEN, start(folder), sizes(1, 2), ["--global-batch-size", "8"])
    clipped = ["--clip-grad", "0.5"]
    return {
        **tensor_parallel(folder, 2, 2),
        "tp2, tied, clipped: saved": run(*flags, clipped, ["--save", saved, "--save-interval", "5"]),
        "tp2, tied, clipped: from 5": run(*flags, clipped, ["--load", saved, "--ckpt-step", "5"]),
        "tp2, per token": run(*flags, ["--calculate-per-token-loss"]),
        "tp2, replicas": run(*replicas, clipped, SEQUENCE, ["--overlap-grad-reduce"]),
        "tp2, replicas, sharded": run(*replicas, clipped, SEQUENCE, ["--use-distributed-optimizer"]),
    }


def runs_of(launch: str, folder: str) -> dict[str, list[str]]:
    """The runs of one launch, after those of loop_runs.py."""
    return {"pp1": on_one_stage, "pp2": on_two_ranks, "pp4": on_four_ranks}[launch](folder)
