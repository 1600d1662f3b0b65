"""Invalid input, and what the one error about it must say."""

from __future__ import annotations

from dataclasses import dataclass

from tests.distributed.loop_runs import ASYNC, MODEL, NO_DROPOUT, TRAINING

SCRIPT = ("scripts/pretrain_gpt.py",)
DOOR = ("-m", "megatron_async", "scripts/pretrain_gpt.py")
PLAIN = [*MODEL, *TRAINING, *NO_DROPOUT, "--train-iters", "10", "--optimizer", "adam"]
TWO = [*PLAIN, "--pipeline-model-parallel-size", "2"]
NO_DATA = [flag for flag in TWO if flag != "--mock-data"]


@dataclass(frozen=True)
class Case:
    """One invalid input.

    Attributes:
        name: What is wrong.
        arguments: The command line.
        says: What the error must contain: the flag, and the remedy.
        door: How the plugin is entered.
        upstream_version: Version that the installed megatron-core claims to have.
    """

    name: str
    arguments: list[str]
    says: tuple[str, ...]
    door: tuple[str, ...] = SCRIPT
    upstream_version: str | None = None


def refused(flags: list[str], *says: str, base: list[str] = TWO) -> Case:
    return Case(" ".join(flags), [*base, *ASYNC, *flags], says)


CASES = [
    # The plugin's flags
    Case("unknown schedule", [*TWO, "--pipeline-schedule", "gpipe"], ("--pipeline-schedule", "2bw-async")),
    Case("unknown warm-up factor", [*TWO, *ASYNC, "--async-warmup-factor", "3"], ("--async-warmup-factor", "1, 2")),
    Case("misspelt flag", [*TWO, *ASYNC, "--async-error-feedbak"], ("--async-error-feedbak",)),
    Case(
        "feedback without schedule",
        [*TWO, "--async-error-feedback"],
        ("--async-error-feedback", "add --pipeline-sched"),
    ),
    Case("warm-up without schedule", [*TWO, "--async-warmup-factor", "2"], ("--async-warmup-factor", "add --pipeline")),
    refused(["--async-ef-coefficient", "0.5"], "--async-ef-coefficient", "--async-error-feedback; add that flag"),
    refused(["--async-error-feedback", "--async-ef-coefficient", "-1"], "--async-ef-coefficient", "at least 0"),
    refused(["--async-error-feedback", "--async-ef-coefficient", "nan"], "--async-ef-coefficient", "got nan"),
    refused(["--async-error-feedback", "--async-ef-coefficient", "much"], "--async-ef-coefficient", "invalid float"),
    # Too few microbatches
    refused(["--global-batch-size", "1"], "--global-batch-size 1", "raise --global-batch-size to 2"),
    refused(["--micro-batch-size", "9"], "--global-batch-size 9", "raise --global-batch-size to 18"),
    refused(["--global-batch-size", "2", "--async-warmup-factor", "2"], "to 3 or more", "--async-warmup-factor=1"),
    # Settings of Megatron that are refused
    refused(["--fp16"], "--fp16", "use --bf16"),
    refused(["--bf16", "--loss-scale", "128"], "--loss-scale", "drop the flag"),
    refused(["--num-virtual-stages-per-pipeline-rank", "2"], "virtual", "drop --num-layers-per-virtual"),
    refused(
        ["--tensor-model-parallel-size", "2", "--optimizer", "soap"],
        "--optimizer with --tensor-model-parallel-size",
        "use --optimizer muon",
        base=PLAIN,
    ),
    refused(["--context-parallel-size", "2"], "--context-parallel-size", "--context-parallel-size 1", base=PLAIN),
    refused(
        ["--num-experts", "4", "--moe-router-load-balancing-type", "quantile_balancing", "--moe-aux-loss-coeff", "0"],
        "quantile_balancing",
        "use aux_loss",
    ),
    refused(
        ["--use-distributed-optimizer", "--optimizer", "adan", "--bf16"],
        "--use-distributed-optimizer",
        "use --optimizer adam or muon",
    ),
    refused(["--async-sync-start-iters", "12"], "--async-sync-start-iters", "leave no asynchronous iteration"),
    refused(["--async-evaluate", "z"], "--async-evaluate", "--async-error-feedback"),
    refused(["--simulate-pipeline-stages", "2"], "--simulate-pipeline-stages", "use --pipeline-model-parallel-size 1"),
    refused(["--adan-beta1", "1.5"], "--adan-beta1", "must be below 1"),
    refused(["--ddp-reduce-scatter-with-fp32-accumulation"], "--ddp-reduce-scatter-with-fp32-accumul", "drop the flag"),
    refused(["--async-trace-start", "3"], "--async-trace-start", "--async-trace; add that flag"),
    refused(["--async-trace", "/dev/null/x", "--async-trace-start", "1"], "--async-trace", "cannot be written"),
    refused(["--cuda-graph-impl", "local"], "--cuda-graph-impl", "--cuda-graph-impl none"),
    refused(["--rerun-mode", "report_stats"], "--rerun-mode", "use --rerun-mode disabled"),
    refused(["--timing-log-level", "1"], "--timing-log-level", "add --no-barrier-with-level-1-timing"),
    refused(["--save", "/dev/null/x", "--save-interval", "5"], "--save", "cannot be written"),
    refused(["--log-num-zeros-in-grad"], "--log-num-zeros-in-grad", "drop the flag"),
    refused(["--log-params-norm"], "--log-params-norm", "drop the flag"),
    refused(["--save-wgrads-interval", "5"], "--save-wgrads-interval", "drop the flag"),
    refused(["--check-weight-hash-across-dp-replicas-interval", "5"], "--check-weight-hash", "drop the flag"),
    refused(["--yaml-cfg", "settings.yaml"], "--pipeline-schedule", "--yaml-cfg", "give Megatron's settings as flags"),
    # The machine
    refused(["--distributed-backend", "nccl"], "--distributed-backend", "use --distributed-backend gloo"),
    refused(["--transformer-impl", "transformer_engine"], "--transformer-impl", "use --transformer-impl local"),
    # Data and script
    Case("no data", [*NO_DATA, *ASYNC], ("--data-path", "--mock-data")),
    refused(["--data-path", "nowhere/corpus", "--split", "99,1,0"], "--data-path", "nowhere/corpus.idx", base=NO_DATA),
    Case("no script", [], ("usage: torchrun",), door=("-m", "megatron_async")),
    Case(
        "a script that is not there", [], ("no such script: nowhere.py",), door=("-m", "megatron_async", "nowhere.py")
    ),
    # Upstream
    Case("an older megatron-core", TWO, ("megatron-core 0.16.1", "pip install"), DOOR, "0.16.1"),
    Case("a newer megatron-core", TWO, ("megatron-core 0.20.0", "pip install"), DOOR, "0.20.0"),
]
