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


MOE = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--disable-bias-linear"),
    *("--swiglu", "--no-bias-swiglu-fusion"),
]
BIAS = [
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *("--moe-router-load-balancing-type", "none", "--moe-router-bias-update-rate", "0.05"),
]
SHARED_EXPERTS = ["--moe-shared-expert-intermediate-size", "32"]
ALL_TO_ALL = ["--moe-token-dispatcher-type", "alltoall"]
ALL_GATHER = ["--moe-token-dispatcher-type", "allgather"]
RECOMPUTED = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
TORCH_DIST = ["--ckpt-format", "torch_dist"]


def balanced(*types: str) -> list[str]:
    """Auxiliary losses of these types, and the z-loss."""
    coefficients = ["0.05"] * len(types)
    return [
        *("--moe-router-load-balancing-type", *types, "--moe-aux-loss-coeff", *coefficients),
        *("--moe-z-loss-coeff", "0.01"),
    ]


def moe_checkpoints(folder: str) -> dict[str, list[str]]:
    """A synchronous iteration each, saved, so that every layout starts from the same weights."""
    one = ["--train-iters", "1", "--lr-warmup-iters", "0", *TORCH_DIST]
    save = ["--save-interval", "1"]
    return {
        "checkpoint moe": run(NO_DROPOUT, ADAM, UNTIED, one, MOE, save, ["--save", f"{folder}/moe"]),
        "checkpoint biased": run(NO_DROPOUT, ADAM, UNTIED, one, MOE, BIAS, save, ["--save", f"{folder}/biased"]),
        "checkpoint shared": run(
            NO_DROPOUT, ADAM, UNTIED, one, MOE, SHARED_EXPERTS, save, ["--save", f"{folder}/shared"]
        ),
    }


def experts(folder: str, launch: str, size: list[str], *, logs: bool = False) -> dict[str, list[str]]:
    """Runs whose losses do not depend on the number of stages."""

    def from_(name: str) -> list[str]:
        return ["--load", f"{folder}/{name}", "--finetune", *UNTIED]

    base = (NO_DROPOUT, ASYNC, FEEDBACK, TEN, UNCLIPPED, MOE, size)
    written = [[], []]
    if logs:
        every = ["--tensorboard-log-interval", "1", "--tensorboard-dir"]
        written = [[*every, f"{folder}/moe every {launch}"], [*every, f"{folder}/moe fifth {launch}"]]
    auxiliary = balanced("aux_loss", "seq_aux_loss")
    return {
        "moe: auxiliary losses": run(*base, from_("moe"), ADAM, auxiliary, ALL_TO_ALL, written[0]),
        "moe: auxiliary losses, logged every 5": run(
            *base, from_("moe"), ADAM, auxiliary, ALL_TO_ALL, written[1], log=5, evaluate=3
        ),
        "moe: global loss": run(*base, from_("moe"), ADAM, balanced("global_aux_loss"), ALL_GATHER),
        "moe: bias": run(*base, from_("biased"), ADAM, BIAS, ALL_TO_ALL),
        "moe: bias, recomputed": run(*base, from_("biased"), ADAM, BIAS, ALL_TO_ALL, RECOMPUTED),
        "moe: bias, evaluated every 2": run(*base, from_("biased"), ADAM, BIAS, ALL_TO_ALL, evaluate=2),
        "moe: bias, muon bf16": run(*base, from_("biased"), MUON, BIAS, ALL_GATHER, ["--bf16"]),
        "moe: shared experts": run(*base, from_("shared"), ADAM, balanced("aux_loss"), SHARED_EXPERTS, ALL_TO_ALL),
    }


def expert_parallel(folder: str, stages: int) -> dict[str, list[str]]:
    """Experts cut over two ranks, which are data-parallel replicas in everything else."""
    size = [*sizes(stages, 1), "--expert-model-parallel-size", "2"]
    weights = ["--load", f"{folder}/biased", "--finetune", *UNTIED]
    base = (NO_DROPOUT, ASYNC, FEEDBACK, TEN, MOE, BIAS, weights, ["--global-batch-size", "8"])
    return {
        "ep2: all-to-all": run(*base, size, ADAM, UNCLIPPED, ALL_TO_ALL),
        "ep2: all-gather, bf16": run(*base, size, MUON, UNCLIPPED, ALL_GATHER, ["--bf16"]),
        "ep2: all-gather, bf16, sharded": run(
            *base, size, MUON, UNCLIPPED, ALL_GATHER, ["--bf16", "--use-distributed-optimizer"]
        ),
        "ep2: sharded": run(*base, size, ADAM, UNCLIPPED, ALL_TO_ALL, ["--use-distributed-optimizer"]),
        "ep2: clipped": run(*base, size, ADAM, ["--clip-grad", "0.3"], ALL_TO_ALL),
        "ep1: clipped": run(*base, sizes(stages, 1), ADAM, ["--clip-grad", "0.3"], ALL_TO_ALL),
    }


SABOTAGES = {
    "moe: bias, shared counters": "shared counters",
    "moe: bias, of the newest version": "newest bias",
}
"""Runs that are made wrong, as negative controls, and how."""


def on_one_stage(folder: str) -> dict[str, list[str]]:
    return {
        **tensor_parallel(folder, 1, 1),
        **moe_checkpoints(folder),
        **experts(folder, "pp1", sizes(1, 1), logs=True),
    }


def on_two_ranks(folder: str) -> dict[str, list[str]]:
    """One stage of two tensor-parallel or expert-parallel ranks, and two stages with experts."""
    runs = {
        **tensor_parallel(folder, 1, 2),
        **experts(folder, "pp2", sizes(2, 1), logs=True),
        **expert_parallel(folder, 1),
    }
    uneven = (NO_DROPOUT, ADAM, ASYNC, FEEDBACK, TEN, start(folder), UNCLIPPED, sizes(2, 1))
    runs["uneven: first stage"] = run(*uneven, ["--decoder-first-pipeline-num-layers", "1"])
    runs["uneven: last stage"] = run(*uneven, ["--decoder-last-pipeline-num-layers", "1"])
    runs["uneven: layout"] = run(*uneven, ["--pipeline-model-parallel-layout", "Ettt|tL"])
    biased = runs["moe: bias"]
    runs |= dict.fromkeys(SABOTAGES, biased)
    saved = f"{folder}/checkpoints/biased"
    flags = (DROPOUT, ADAM, ASYNC, FEEDBACK, TEN, MOE, BIAS, ALL_TO_ALL, TORCH_DIST, sizes(2, 1))
    runs["moe: saved"] = run(*flags, ["--save", saved, "--save-interval", "4"])
    runs["moe: from 4"] = run(*flags, ["--load", saved, "--ckpt-step", "4"])
    return runs


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
        "moe: bias": experts(folder, "pp4", sizes(4, 1))["moe: bias"],
        **expert_parallel(folder, 2),
        **layer_wise(folder),
    }


def layer_wise(folder: str) -> dict[str, list[str]]:
    """Two stages and two replicas that share Muon's matrices, beside Adam's parameters in shards."""
    weights = ["--load", f"{folder}/untied", "--finetune", *UNTIED]
    batch = ["--global-batch-size", "8", "--bf16"]
    base = (MUON, ASYNC, FEEDBACK, TEN, sizes(2, 1), batch)
    sharded = ["--use-distributed-optimizer"]
    saved = f"{folder}/checkpoints/layer-wise"
    return {
        "muon, replicas": run(NO_DROPOUT, *base, weights, UNCLIPPED),
        "muon, sharded": run(NO_DROPOUT, *base, weights, UNCLIPPED, sharded),
        "muon, sharded, overlaps": run(
            NO_DROPOUT,
            *base,
            weights,
            UNCLIPPED,
            sharded,
            ["--overlap-grad-reduce", "--overlap-param-gather"],
            evaluate=3,
        ),
        "muon, sharded, tied, clipped: saved": run(
            DROPOUT, *base, sharded, ["--clip-grad", "0.3"], TORCH_DIST, ["--save", saved, "--save-interval", "5"]
        ),
        "muon, sharded, tied, clipped: from 5": run(
            DROPOUT, *base, sharded, ["--clip-grad", "0.3"], TORCH_DIST, ["--load", saved, "--ckpt-step", "5"]
        ),
        "muon, replicas, tied, clipped": run(DROPOUT, *base, ["--clip-grad", "0.3"]),
    }


def runs_of(launch: str, folder: str) -> dict[str, list[str]]:
    """The runs of one launch, after those of loop_runs.py."""
    return {"pp1": on_one_stage, "pp2": on_two_ranks, "pp4": on_four_ranks}[launch](folder)
