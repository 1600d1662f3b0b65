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


@dataclass(kw_only=True)
class AsyncPipelineConfig:
    """Asynchronous pipeline parallelism (megatron_async)."""

    pipeline_schedule: Literal["1f1b", "2bw-async"] = "1f1b"
    """Pipeline schedule for training. 1f1b: Megatron's choice, untouched. 2bw-async: no flush and no barrier between
    batches; every batch reads weights that are exactly one update old, on every stage, in forward and backward (two
    weight versions are kept)."""

    async_error_feedback: bool = False
    """Correct the one-update delay by error feedback on the optimizer's update:
    x_{k+1} = x_k - (1 + C) u_k + C u_{k-1}. Needs no persistent memory."""

    async_ef_coefficient: float = 1.0
    """C of --async-error-feedback; 1 is the published form, 0 turns the correction off."""

    async_warmup_factor: Literal[1, 2] = 1
    """Forwards that stage s of p runs ahead: factor * (p-1-s). 2 hides the latency of stage-to-stage messages
    completely, at the price of about twice the activations and of at least 2p-1 microbatches a batch."""

    async_trace: str | None = None
    """Folder for timelines: every rank writes a Chrome trace (Perfetto) of what it does in some iterations. Works with
    both schedules; scripts/plot_timeline.py draws it."""

    async_trace_start: int = 12
    """First iteration of --async-trace, counted from the start of this run."""

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
        self._check_microbatches(args)

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
        check_directory(self.async_trace)

    def _check_unused(self) -> None:
        for flag in self._set_among("async_error_feedback", "async_warmup_factor"):
            raise ConfigurationError(
                f"{flag} has no effect with --pipeline-schedule={SYNCHRONOUS}; "
                "add --pipeline-schedule=2bw-async or drop it"
            )

    def _set_among(self, *names: str) -> list[str]:
        """Flags of the fields that do not have their defaults."""
        defaults = AsyncPipelineConfig()
        return [_flag(name) for name in names if getattr(self, name) != getattr(defaults, name)]

    def _check_microbatches(self, args: argparse.Namespace) -> None:
        per_microbatch = args.micro_batch_size * args.data_parallel_size
        microbatches = args.global_batch_size // per_microbatch
        stages = args.pipeline_model_parallel_size
        least = make_schedule(self.pipeline_schedule, stages, 0, self.async_warmup_factor).minimum_microbatches()
        if microbatches < least:
            lower = " or use --async-warmup-factor=1" if self.async_warmup_factor > 1 and microbatches >= stages else ""
            raise ConfigurationError(
                f"--global-batch-size {args.global_batch_size} gives {microbatches} microbatch(es) a batch, and "
                f"--pipeline-schedule={self.pipeline_schedule} with {stages} pipeline stages and "
                f"--async-warmup-factor={self.async_warmup_factor} needs at least {least}; "
                f"raise --global-batch-size to {least * per_microbatch} or more{lower}"
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
