"""Configuration of the plugin: one dataclass, from which the flags are generated, and its validation."""

import argparse
import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from megatron_async.errors import ConfigurationError
from megatron_async.observe.trace import check_directory
from megatron_async.pipeline.plan import make_schedule
from megatron_async.refusals import REFUSALS

SYNCHRONOUS = "1f1b"
PREDICTABLE = ("adam", "sgd", "muon", "lion")
"""Optimizers whose momentum alone says where it would lead."""


@dataclass(kw_only=True)
class AsyncPipelineConfig:
    """Asynchronous pipeline parallelism (megatron_async)."""

    pipeline_schedule: Literal["1f1b", "2bw-async", "pipedream", "wpipe"] = "1f1b"
    """Pipeline schedule for training. 1f1b: Megatron's choice, untouched. 2bw-async: no flush and no barrier between
    batches; every batch reads weights that are exactly one update old, on every stage, in forward and backward (two
    weight versions are kept). For comparison of what is learned, not for speed: pipedream, weights of stage s of p are
    p-1-s updates old; wpipe, those of the first half of the stages are one update old, those of the others new."""

    simulate_pipeline_stages: int = 1
    """Give a model that is on one pipeline stage the delays of a pipeline of so many stages. 2bw-async needs no
    simulation: its delay is one update on any number of stages."""

    async_error_feedback: bool = False
    """Correct the one-update delay by error feedback on the optimizer's update:
    x_{k+1} = x_k - (1 + C) u_k + C u_{k-1}. Needs no persistent memory."""

    async_ef_coefficient: float = 1.0
    """C of --async-error-feedback; 1 is the published form, 0 turns the correction off."""

    async_evaluate: Literal["x", "z", "both"] = "x"
    """Weights to evaluate under error feedback or weight prediction. x: the corrected weights, which batches read. z:
    the plain iterate of the optimizer. both: x, and z on the same data, logged with a z in its name."""

    async_delay_compensation: float = 0.0
    """LAMBDA of the Taylor compensation of the delay: the optimizer sees g + LAMBDA g * g * (x_k - x_read), all of it
    elementwise, x_read being the weights that the gradient g was taken at. 0 is off. Needs no persistent memory."""

    async_weight_prediction: bool = False
    """Write weights that are predicted by momentum, as in SpecTrain and XPipe: x = z - D lr d, d being the direction
    that the optimizer's momentum alone gives, D the delay in updates. With --optimizer adam, sgd, muon or lion."""

    async_lr_discount_iters: int = 0
    """K of the learning-rate discount of PipeMare and AsyncPP: parameters with a delay of D > 1 updates begin with
    lr / D, and come to lr in K asynchronous iterations. 0 is off. For --pipeline-schedule=pipedream."""

    async_sync_start_iters: int = 0
    """Iterations at the start of training that run synchronously, with Megatron's own schedule."""

    async_sync_cooldown_iters: float = 0.0
    """Iterations at the end of training that run synchronously: a number, or, below 1, a fraction of --train-iters."""

    async_warmup_factor: Literal[1, 2] = 1
    """Forwards that stage s of p runs ahead: factor * (p-1-s). 2 hides the latency of stage-to-stage messages
    completely, at the price of about twice the activations and of at least 2p-1 microbatches a batch."""

    async_audit: bool = False
    """Check what every forward and backward reads, and what every update is applied to, against the plan and by the
    contents of the weights; end the run at the first difference. Costs a pass over the weights each time."""

    async_trace: str | None = None
    """Folder for timelines: every rank writes a Chrome trace (Perfetto) of what it does in some iterations. Works with
    both schedules; scripts/plot_timeline.py draws it."""

    async_trace_start: int = 12
    """First iteration of --async-trace, counted from the start of this run, or from the end of its
    --async-sync-start-iters."""

    async_trace_steps: int = 5
    """Number of iterations of --async-trace."""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "AsyncPipelineConfig":
        """The configuration in Megatron's parsed arguments."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls)})

    @property
    def is_asynchronous(self) -> bool:
        """Whether training leaves Megatron's own schedule."""
        return self.pipeline_schedule != SYNCHRONOUS

    @property
    def ef_coefficient(self) -> float:
        """Coefficient c in effect: 0 without error feedback."""
        return self.async_ef_coefficient if self.async_error_feedback else 0.0

    def is_synchronous_at(self, iteration: int, train_iters: int) -> bool:
        """Whether an iteration runs with Megatron's own schedule.

        Args:
            iteration: Number of the iteration, from 0.
            train_iters: Iterations of the whole training.
        """
        cooldown = self.async_sync_cooldown_iters
        last = train_iters - (round(cooldown * train_iters) if cooldown < 1 else int(cooldown))
        return not self.async_sync_start_iters <= iteration < last

    def validate(self, args: argparse.Namespace) -> None:
        """Check this configuration together with Megatron's validated arguments.

        Args:
            args: Megatron's arguments after its own validation.

        Raises:
            ConfigurationError: With the flag and the remedy, for a setting that is out of range or a combination that
                is not supported.
        """
        self._check_values()
        self._check_trace(args)
        if not self.is_asynchronous:
            self._check_unused()
            return
        for refusal in REFUSALS:
            if refusal.applies(args):
                raise ConfigurationError(
                    f"{refusal.flag} is not supported with --pipeline-schedule={self.pipeline_schedule}: "
                    f"{refusal.reason}; {refusal.remedy}"
                )
        self._check_corrections(args)
        self._check_phases(args)
        self._check_stages(args)
        self._check_microbatches(args)
        if args.save:
            # Not first after hours of training.
            check_directory("--save", args.save)

    def _check_values(self) -> None:
        coefficient = self.async_ef_coefficient
        if not math.isfinite(coefficient) or coefficient < 0:
            raise ConfigurationError(
                f"--async-ef-coefficient must be a finite number of at least 0, got {coefficient}; "
                "1 is the published form"
            )
        if coefficient != 1.0 and not self.async_error_feedback:
            raise ConfigurationError(
                "--async-ef-coefficient has no effect without --async-error-feedback; add that flag"
            )

    def _check_trace(self, args: argparse.Namespace) -> None:
        if self.async_trace is None:
            for flag in self._set_among("async_trace_start", "async_trace_steps"):
                raise ConfigurationError(f"{flag} has no effect without --async-trace; add that flag")
            return
        if self.async_trace_start < 1 or self.async_trace_steps < 1:
            raise ConfigurationError("--async-trace-start and --async-trace-steps must be at least 1")
        if args.train_iters and self.async_trace_start > args.train_iters:
            raise ConfigurationError(
                f"--async-trace-start {self.async_trace_start} is beyond --train-iters {args.train_iters}; lower it"
            )
        check_directory("--async-trace", self.async_trace)

    def _check_unused(self) -> None:
        for flag in self._set_among(*(f.name for f in fields(self) if "trace" not in f.name)):
            raise ConfigurationError(
                f"{flag} has no effect with --pipeline-schedule={SYNCHRONOUS}; "
                "add --pipeline-schedule=2bw-async or drop it"
            )

    def _check_corrections(self, args: argparse.Namespace) -> None:
        strength = self.async_delay_compensation
        if not math.isfinite(strength) or strength < 0:
            raise ConfigurationError(
                f"--async-delay-compensation must be a finite number of at least 0, got {strength}"
            )
        if self.async_lr_discount_iters < 0:
            raise ConfigurationError(
                f"--async-lr-discount-iters must be at least 0, got {self.async_lr_discount_iters}"
            )
        if self.async_lr_discount_iters and self.pipeline_schedule != "pipedream":
            raise ConfigurationError(
                f"--async-lr-discount-iters has no effect with --pipeline-schedule={self.pipeline_schedule}, whose "
                "delays are not above one update; use pipedream or drop it"
            )
        if strength and args.calculate_per_token_loss:
            raise ConfigurationError(
                "--async-delay-compensation needs the mean gradient before the norm is taken, and "
                "--calculate-per-token-loss knows it only afterwards; drop one of them"
            )
        if strength and self.pipeline_schedule != "2bw-async" and not args.untie_embeddings_and_output_weights:
            raise ConfigurationError(
                f"--async-delay-compensation with --pipeline-schedule={self.pipeline_schedule} would correct the two "
                "copies of a tied weight for different delays; add --untie-embeddings-and-output-weights"
            )
        if self.async_weight_prediction:
            for flag in self._set_among("async_error_feedback", "async_delay_compensation"):
                raise ConfigurationError(f"--async-weight-prediction corrects the same delay as {flag}; drop one")
            if args.optimizer not in PREDICTABLE:
                raise ConfigurationError(
                    f"--async-weight-prediction does not know where the momentum of --optimizer {args.optimizer} alone "
                    f"would lead; use --optimizer {', '.join(PREDICTABLE)}, or --async-error-feedback"
                )
        elif self.async_evaluate != "x" and not self.async_error_feedback:
            raise ConfigurationError(
                "--async-evaluate has no effect without --async-error-feedback or --async-weight-prediction: "
                "x and z are the same; drop it"
            )

    def _check_phases(self, args: argparse.Namespace) -> None:
        start, cooldown = self.async_sync_start_iters, self.async_sync_cooldown_iters
        if start < 0:
            raise ConfigurationError(f"--async-sync-start-iters must be at least 0, got {start}")
        if not math.isfinite(cooldown) or cooldown < 0 or (cooldown >= 1 and cooldown != int(cooldown)):
            raise ConfigurationError(
                f"--async-sync-cooldown-iters must be a whole number or a fraction below 1, got {cooldown}"
            )
        if not (start or cooldown):
            return
        if not args.train_iters:
            raise ConfigurationError(
                "--async-sync-start-iters and --async-sync-cooldown-iters need --train-iters; use it in place of "
                "--train-samples"
            )
        if all(self.is_synchronous_at(i, args.train_iters) for i in (start, args.train_iters - 1)):
            raise ConfigurationError(
                f"--async-sync-start-iters {start} and --async-sync-cooldown-iters {cooldown:g} leave no asynchronous "
                f"iteration of --train-iters {args.train_iters}; lower them"
            )

    def _check_stages(self, args: argparse.Namespace) -> None:
        stages, simulated = args.pipeline_model_parallel_size, self.simulate_pipeline_stages
        if simulated < 1:
            raise ConfigurationError(f"--simulate-pipeline-stages must be at least 1, got {simulated}")
        if simulated == 1:
            if stages == 1 and self.pipeline_schedule != "2bw-async":
                raise ConfigurationError(
                    f"--pipeline-schedule={self.pipeline_schedule} on one pipeline stage has no delay; "
                    "raise --pipeline-model-parallel-size or add --simulate-pipeline-stages"
                )
            return
        if stages > 1:
            raise ConfigurationError(
                f"--simulate-pipeline-stages {simulated} simulates on one stage; use --pipeline-model-parallel-size 1"
            )
        if args.num_layers % simulated:
            raise ConfigurationError(
                f"--simulate-pipeline-stages {simulated} does not divide --num-layers {args.num_layers}; change one"
            )
        if self.pipeline_schedule == "2bw-async":
            return
        if not args.untie_embeddings_and_output_weights:
            raise ConfigurationError(
                "--simulate-pipeline-stages cannot give one tied weight the delays of two stages; "
                "add --untie-embeddings-and-output-weights"
            )
        if args.use_distributed_optimizer:
            raise ConfigurationError(
                "--simulate-pipeline-stages keeps as many versions of a parameter as its stage needs, and "
                "--use-distributed-optimizer gathers all parameters together; drop one of them"
            )

    def _set_among(self, *names: str) -> list[str]:
        """Flags of the fields that do not have their defaults."""
        defaults = AsyncPipelineConfig()
        return [_flag(name) for name in names if getattr(self, name) != getattr(defaults, name)]

    def _check_microbatches(self, args: argparse.Namespace) -> None:
        per_microbatch = args.micro_batch_size * args.data_parallel_size
        flag, smallest = "--global-batch-size", args.global_batch_size
        if args.step_batch_size_schedule:
            from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

            steps = StepBatchsizeNumMicroBatchesCalculator(
                args.micro_batch_size, args.data_parallel_size, False, 1, args.step_batch_size_schedule, args.seq_length
            ).schedule
            flag, smallest = "--step-batch-size-schedule", min(batch for _, batch in steps)
        microbatches = smallest // per_microbatch
        stages = args.pipeline_model_parallel_size
        least = make_schedule(self.pipeline_schedule, stages, 0, self.async_warmup_factor).minimum_microbatches()
        if microbatches < least:
            lower = " or use --async-warmup-factor=1" if self.async_warmup_factor > 1 and microbatches >= stages else ""
            raise ConfigurationError(
                f"{flag} {args.step_batch_size_schedule or smallest} gives {microbatches} microbatch(es) a batch, and "
                f"--pipeline-schedule={self.pipeline_schedule} with {stages} pipeline stages and "
                f"--async-warmup-factor={self.async_warmup_factor} needs at least {least}; "
                f"raise {flag} to {least * per_microbatch} or more{lower}"
            )


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to a parser, in a group of their own.

    Args:
        parser: Megatron's parser, or any other.

    Returns:
        The same parser.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory(AsyncPipelineConfig).build_group(parser, title="asynchronous pipeline (megatron_async)")
    return parser


def flag_names() -> tuple[str, ...]:
    """The plugin's flags, as they are written on a command line."""
    return tuple(_flag(f.name) for f in fields(AsyncPipelineConfig))


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def adjust_arguments(args: Any) -> list[str]:
    """Change Megatron settings that an asynchronous run cannot keep at their defaults, before Megatron validates them.

    Args:
        args: Megatron's parsed arguments; changed in place.

    Returns:
        A line for the log about each change.
    """
    notes = []
    if args.rerun_mode == "validate_results":
        args.rerun_mode = "disabled"
        notes.append(
            "--rerun-mode set to disabled: the default replays a batch, which an asynchronous pipeline cannot, and "
            "synchronizes all ranks every iteration (NaN checks stay on)"
        )
    if args.overlap_param_gather and not args.overlap_param_gather_with_optimizer_step:
        args.overlap_param_gather = False
        notes.append(
            "--overlap-param-gather taken out: the all-gather of new weights overlaps with a whole step by itself"
        )
    if args.wandb_project and not args.tensorboard_dir:
        base = args.wandb_save_dir or args.save or "."
        args.tensorboard_dir = f"{base}/tensorboard"
        notes.append(
            f"--tensorboard-dir set to {args.tensorboard_dir}: without it Megatron sends neither loss nor gradient "
            "norm to wandb"
        )
    return notes
