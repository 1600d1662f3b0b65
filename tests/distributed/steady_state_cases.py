"""The runs of the steady-state test, as command lines for scripts/pretrain_gpt.py. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from tests.distributed.loop_runs import ADAM, ASYNC, FEEDBACK, MODEL, MUON, NO_DROPOUT, TRAINING, UNTIED
from tests.distributed.parallel_runs import ALL_TO_ALL, BIAS, MOE, SEQUENCE, balanced, sizes

RANKS = 4
STEPS = 11
STEADY = range(4, STEPS)
"""Steps, from 1, in which the pipeline neither fills nor drains."""

LOGGED_STEP = 6
"""The step that ``logged`` prints; it may synchronize."""

NOTHING_LOGGED = 100
"""A log interval longer than the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        stages: Pipeline stages; the ranks that are left make replicas.
        tensor: Tensor-parallel ranks of a stage.
        flags: What is added to the command line.
        microbatches: Microbatches of a batch: with as few as there are stages, there is the least time to hide in.
        log_interval: Of Megatron's log.
        control: A deliberate fault, or none.
        counted: Whether the dispatcher counts too, to see that the recorder missed nothing.
    """

    stages: int
    flags: tuple[str, ...]
    microbatches: int
    tensor: int = 1
    log_interval: int = NOTHING_LOGGED
    control: str = ""
    counted: bool = False

    @property
    def is_tied(self) -> bool:
        """Whether the first and the last stage share a weight."""
        return UNTIED[0] not in self.flags

    @property
    def arguments(self) -> list[str]:
        """The command line."""
        samples = self.microbatches * RANKS // (self.stages * self.tensor)
        training = [*TRAINING, "--train-iters", str(STEPS), "--global-batch-size", str(samples)]
        no_evaluation = ["--eval-interval", "1000", "--eval-iters", "0"]
        size = [*sizes(self.stages, self.tensor), "--log-interval", str(self.log_interval)]
        return [*MODEL, *training, *no_evaluation, *NO_DROPOUT, *size, *self.flags]


PLAIN = (*ADAM, *ASYNC)
EXITS = ("--exit-signal-handler", "--exit-duration-in-mins", "1000")
PER_TOKEN = ("--calculate-per-token-loss",)
SHARDED = ("--use-distributed-optimizer",)
DOUBLED = ("--async-warmup-factor", "2")

CASES = {
    "tied weights": Case(stages=4, microbatches=4, flags=PLAIN),
    "feedback, untied, warm-up 2": Case(stages=4, microbatches=7, flags=(*MUON, *ASYNC, *FEEDBACK, *UNTIED, *DOUBLED)),
    "exits by signal and time": Case(stages=4, microbatches=4, flags=(*PLAIN, *EXITS)),
    "replicas": Case(stages=2, microbatches=2, flags=PLAIN),
    "replicas, per-token loss": Case(stages=2, microbatches=2, flags=(*PLAIN, *PER_TOKEN)),
    "tensor parallelism": Case(stages=2, tensor=2, microbatches=2, flags=(*PLAIN, *SEQUENCE)),
    "experts, biased": Case(
        stages=2, microbatches=2, flags=(*PLAIN, *MOE, *BIAS, *ALL_TO_ALL, "--expert-model-parallel-size", "2")
    ),
    "experts, auxiliary losses": Case(stages=4, microbatches=4, flags=(*PLAIN, *MOE, *balanced("aux_loss"))),
    "replicas, muon, distributed optimizer": Case(
        stages=2, microbatches=2, flags=(*MUON, *ASYNC, *FEEDBACK, *SHARDED, "--bf16")
    ),
    "replicas, distributed optimizer": Case(stages=2, microbatches=4, flags=(*PLAIN, *SHARDED), counted=True),
}
"""Nothing in them may make a stage wait for another."""

LOGGED = {"logged": Case(stages=2, microbatches=2, flags=PLAIN, log_interval=LOGGED_STEP)}

CONTROLS = {
    "1f1b": Case(stages=2, microbatches=2, flags=(*ADAM,), counted=True),
    "logged in every step": Case(stages=4, microbatches=4, flags=PLAIN, log_interval=1),
    "stock reductions": Case(stages=4, microbatches=4, flags=PLAIN, control="stock reductions"),
}
"""What the test must see. A logged step completes its update at once, as a blocking optimizer step would."""

ALL = {**CASES, **LOGGED, **CONTROLS}
