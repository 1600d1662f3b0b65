"""The runs of the training-loop test, as command lines for scripts/pretrain_gpt.py. Imports nothing heavy."""

from __future__ import annotations

MODEL = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2", "--ffn-hidden-size", "64"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--position-embedding-type", "rope", "--no-rope-fusion"),
    *("--transformer-impl", "local", "--attention-backend", "unfused", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-bias-gelu-fusion"),
    *("--no-bias-dropout-fusion", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "96"),
    *("--num-workers", "0", "--distributed-backend", "gloo"),
]
TRAINING = [
    *("--micro-batch-size", "1", "--global-batch-size", "9", "--lr", "3e-3", "--min-lr", "3e-4"),
    *("--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--weight-decay", "0.1", "--seed", "7"),
    *("--eval-iters", "2"),
]
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
ADAM = ["--optimizer", "adam", "--adam-beta2", "0.95"]
MUON = ["--optimizer", "muon", "--muon-momentum", "0.95", "--muon-nesterov"]
SGD = ["--optimizer", "sgd"]
UNTIED = ["--untie-embeddings-and-output-weights"]
ASYNC = ["--pipeline-schedule", "2bw-async"]
FEEDBACK = ["--async-error-feedback"]
AUDIT = ["--async-audit"]
PHASES = ["--async-sync-start-iters", "3", "--async-sync-cooldown-iters", "0.3"]
TEN = ["--train-iters", "10"]


def run(*parts: list[str], log: int = 1, evaluate: int = 100) -> list[str]:
    """A command line; ``log`` and ``evaluate`` are intervals in iterations."""
    flags = [*MODEL, *TRAINING, "--log-interval", str(log), "--eval-interval", str(evaluate)]
    return [*flags, *(flag for part in parts for flag in part)]


def make_checkpoints(folder: str) -> dict[str, list[str]]:
    """One synchronous iteration each, saved, so that every pipeline size starts from the same weights."""
    one = ["--train-iters", "1", "--lr-warmup-iters", "0", "--ckpt-format", "torch_dist"]
    return {
        "checkpoint tied": run(NO_DROPOUT, ADAM, one, ["--save", f"{folder}/tied", "--save-interval", "1"]),
        "checkpoint untied": run(NO_DROPOUT, ADAM, UNTIED, one, ["--save", f"{folder}/untied", "--save-interval", "1"]),
    }


def everywhere(folder: str, stages: int) -> dict[str, list[str]]:
    """Runs whose losses must not depend on the number of stages."""
    size = ["--pipeline-model-parallel-size", str(stages)]
    tied = [*size, "--load", f"{folder}/tied", "--finetune"]
    untied = [*size, "--load", f"{folder}/untied", "--finetune", *UNTIED]
    exact = ["--clip-grad", "0"]
    phases = (NO_DROPOUT, ASYNC, FEEDBACK, TEN, untied, exact, PHASES)
    return {
        "adam": run(NO_DROPOUT, ADAM, ASYNC, TEN, untied, exact, evaluate=5),
        "sgd": run(NO_DROPOUT, SGD, ASYNC, TEN, untied, exact),
        "muon with feedback": run(NO_DROPOUT, MUON, ASYNC, FEEDBACK, TEN, untied, exact),
        "adam bf16": run(NO_DROPOUT, ADAM, ASYNC, FEEDBACK, TEN, untied, exact, ["--bf16"]),
        "phases": run(*phases, ADAM, AUDIT, ["--async-evaluate", "both"], evaluate=5),
        "tied and clipped": run(NO_DROPOUT, MUON, ASYNC, FEEDBACK, TEN, tied, ["--clip-grad", "0.3"]),
    }


def mitigated(folder: str, stages: int) -> dict[str, list[str]]:
    """More runs whose losses must not depend on the number of stages; on one and two."""
    size = ["--pipeline-model-parallel-size", str(stages)]
    base = (NO_DROPOUT, ASYNC, TEN, [*size, "--load", f"{folder}/untied", "--finetune", *UNTIED], ["--clip-grad", "0"])
    return {
        "phases bf16": run(*base, FEEDBACK, MUON, PHASES, ["--bf16", "--async-evaluate", "z"], evaluate=5),
        "compensated": run(*base, ADAM, ["--async-delay-compensation", "0.5"]),
        "predicted": run(*base, MUON, ["--async-weight-prediction"]),
        "skips 5 and 6": run(*base, ADAM, FEEDBACK, ["--iterations-to-skip", "5", "6"]),
        "grows": grows(*base, ADAM, FEEDBACK),
    }


def grows(*parts: list[str]) -> list[str]:
    """A command line whose batches grow from 4 to 9 microbatches after five iterations (20 samples)."""
    flags = run(*parts)
    start = flags.index("--global-batch-size")
    return [*flags[:start], *flags[start + 2 :], "--step-batch-size-schedule", "0:4 640:9"]


def other_schedules(folder: str, stages: int) -> dict[str, list[str]]:
    """Schedules with other delays on real stages; on one, what they are on two and four stages, simulated."""
    base = (NO_DROPOUT, ADAM, FEEDBACK, TEN, AUDIT, ["--load", f"{folder}/untied", "--finetune", *UNTIED])
    runs = {}
    for schedule in ("pipedream", "wpipe"):
        for simulated in (2, 4) if stages == 1 else (stages,):
            size = (
                ["--simulate-pipeline-stages", str(simulated)]
                if stages == 1
                else ["--pipeline-model-parallel-size", str(stages)]
            )
            flags = ["--pipeline-schedule", schedule, "--clip-grad", "0", *size]
            runs[f"{schedule} of {simulated}"] = run(*base, flags, evaluate=5)
    return runs


def warmup_factor_two(folder: str, stages: int) -> dict[str, list[str]]:
    """The same run with a doubled warm-up."""
    return {"adam, warm-up 2": [*everywhere(folder, stages)["adam"], "--async-warmup-factor", "2"]}


def on_two_stages(folder: str) -> dict[str, list[str]]:
    """Runs that are compared with each other."""
    two = ["--pipeline-model-parallel-size", "2"]
    base = (MUON, ASYNC, FEEDBACK, TEN, two)
    recompute = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return {
        "plain": run(NO_DROPOUT, *base),
        "logged every 5": run(NO_DROPOUT, *base, log=5),
        "logged every 5, again": run(
            NO_DROPOUT, *base, ["--tensorboard-dir", f"{folder}/tensorboard", "--tensorboard-log-interval", "1"], log=5
        ),
        "evaluated every 2": run(NO_DROPOUT, *base, evaluate=2),
        "dropout": run(DROPOUT, *base),
        "dropout, evaluated every 3": run(DROPOUT, *base, evaluate=3),
        "dropout, recomputed": run(DROPOUT, *base, recompute),
        "1f1b": run(DROPOUT, MUON, TEN, two, evaluate=4),
        "1f1b tied adam bf16": run(DROPOUT, ADAM, TEN, two, ["--bf16"], evaluate=4),
        "terminated in 4": run(NO_DROPOUT, *base, ["--exit-signal-handler"]),
        "out of time": run(NO_DROPOUT, *base, ["--exit-duration-in-mins", "1"]),
        "per token": run(NO_DROPOUT, *base, ["--calculate-per-token-loss"]),
        "exits at 6": run(NO_DROPOUT, *base, ["--exit-interval", "6"]),
    }


def on_two_replicas(folder: str) -> dict[str, list[str]]:
    """Two stages, two data-parallel replicas; clipped."""
    weights = ["--load", f"{folder}/untied", "--finetune", *UNTIED]
    base = (NO_DROPOUT, ADAM, ASYNC, FEEDBACK, TEN, weights, ["--pipeline-model-parallel-size", "2"])
    batch = ["--global-batch-size", "8", "--clip-grad", "0.5"]
    sharded = ["--use-distributed-optimizer"]
    overlaps = ["--overlap-grad-reduce", "--overlap-param-gather"]
    return {
        "replicas": run(*base, batch),
        "replicas, evaluated": run(*base, batch, log=5, evaluate=3),
        "replicas, hooks": run(*base, batch, overlaps[:1]),
        "replicas, sharded": run(*base, batch, sharded),
        "replicas, sharded, overlaps": run(*base, batch, sharded, overlaps, log=5, evaluate=4),
        "replicas, sharded, bf16": run(*base, batch, sharded, overlaps, ["--bf16"]),
        "replicas, bf16": run(*base, batch, ["--bf16"]),
        "one replica": run(*base[:-1], batch, ["--pipeline-model-parallel-size", "4"]),
    }


STOCK = ("1f1b", "1f1b tied adam bf16")
"""Runs that are repeated without the plugin."""


def runs_of(name: str, folder: str) -> dict[str, list[str]]:
    """The runs of one launch: ``pp1``, ``pp2`` or ``pp4``."""
    if name == "pp1":
        return {
            **make_checkpoints(folder),
            **everywhere(folder, 1),
            **mitigated(folder, 1),
            **other_schedules(folder, 1),
        }
    if name == "pp2":
        return {
            **everywhere(folder, 2),
            **mitigated(folder, 2),
            **other_schedules(folder, 2),
            **warmup_factor_two(folder, 2),
            **on_two_stages(folder),
        }
    return {
        **everywhere(folder, 4),
        **other_schedules(folder, 4),
        **warmup_factor_two(folder, 4),
        **on_two_replicas(folder),
    }
