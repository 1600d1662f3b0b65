"""The asynchronous pipeline inside Megatron's training loop, and which iteration a number belongs to."""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator
from megatron.core.transformer.moe import moe_logging

from megatron_async.checkpoint import Checkpoints
from megatron_async.config import AsyncPipelineConfig
from megatron_async.delay.audit import DelayAudit
from megatron_async.errors import ConfigurationError
from megatron_async.evaluation import evaluate
from megatron_async.observe.moe_metrics import BatchMetrics
from megatron_async.observe.trace import NO_TRACE, Trace
from megatron_async.optimizer.deferred_step import UpdateResult
from megatron_async.optimizer.state_sharding import provide_initial_state
from megatron_async.pipeline.plan import make_schedule
from megatron_async.pipeline.runtime import AsyncPipeline, PipelineOptions, versioned_tensors

_EXIT_BY_SIGNAL, _EXIT_BY_TIME = 1, 2
"""What a rank can request of all, a bit each."""

_ADVANCED, _SKIPPED, _NAN = "advanced iterations", "skipped iterations", "nan iterations"


@dataclass(slots=True)
class _Iteration:
    """An iteration whose update is still pending, with what its result may change later.

    Attributes:
        number: Number of the iteration as Megatron logs it, from 1.
        scheduler_steps: Position of the learning-rate schedule before the iteration moved it on.
        samples: Samples consumed with this iteration; 0 until it is logged.
        totals: Megatron's running totals, and a copy of them from before this iteration was booked.
        losses: The iteration's losses.
    """

    number: int
    scheduler_steps: int
    samples: int = 0
    totals: tuple[dict[str, Any], dict[str, Any]] | None = None
    losses: dict[str, torch.Tensor] | None = None


class Session:
    """State of the plugin in one process, from ``install()`` on.

    Attributes:
        config: The configuration in effect; None until arguments are parsed.
        pipeline: The pipeline, once the first training step has begun.
        scheduler: Megatron's learning-rate scheduler.
        checkpoints: What of the pipeline goes into checkpoints and comes out of them.
    """

    def __init__(self, *, cpu: bool) -> None:
        self.cpu = cpu
        self.config: AsyncPipelineConfig | None = None
        self.pipeline: AsyncPipeline | None = None
        self.scheduler: Any = None
        self.checkpoints = Checkpoints()
        self.on_configure: list[Callable[[AsyncPipelineConfig], None]] = []
        self._args: Any = None
        self._optimizer: Any = None
        self._synchronous_step: Callable[[], Any]
        self._model: list[torch.nn.Module] = []
        self._pending: _Iteration | None = None
        self._agreed_requests = 0
        self._audit: DelayAudit | None = None

    def check_machine(self, args: argparse.Namespace) -> None:
        """Refuse what cannot run on this machine.

        Raises:
            ConfigurationError: If there is no CUDA device and the arguments need one.
        """
        if not self.cpu:
            return
        if args.distributed_backend != "gloo":
            raise ConfigurationError(
                f"--distributed-backend {args.distributed_backend} needs a CUDA device and this machine has none; "
                "use --distributed-backend gloo"
            )
        if args.transformer_impl != "local":
            raise ConfigurationError(
                f"--transformer-impl {args.transformer_impl} needs a CUDA device and this machine has none; "
                "use --transformer-impl local"
            )

    def configure(self, config: AsyncPipelineConfig, args: argparse.Namespace) -> None:
        """Take the validated configuration."""
        self.config = config
        self._args = args
        for callback in self.on_configure:
            callback(config)

    def adopt_optimizer(self, optimizer: Any, model: list[torch.nn.Module]) -> None:
        """Make the optimizer's ``step()`` the begin of a deferred update."""
        self._optimizer = optimizer
        self._synchronous_step = optimizer.step
        self._model = list(model)
        provide_initial_state(optimizer)
        optimizer.step = self.step

    def forward_backward(self, stock: Callable[..., Any], *, forward_only: bool = False, **kwargs: Any) -> Any:
        """One call of the schedule, with the signature of megatron-core's.

        Args:
            stock: The schedule that Megatron would run.
            forward_only: Whether to evaluate: that is Megatron's schedule, on the newest weights.
            **kwargs: Arguments of megatron-core's schedules.
        """
        if forward_only:
            assert self.config is not None
            return evaluate(self.pipeline, self.config.async_evaluate, stock, **kwargs)
        if self._is_synchronous(self._args.curr_iteration):
            self._hand_back()
            self.checkpoints.resumed = None  # what is synchronous goes on from z
            return stock(forward_only=False, **kwargs)
        for name in ("p2p_communicator", "pg_collection", "adjust_tensor_shapes_fn"):
            if kwargs.get(name) is not None:
                raise ConfigurationError(
                    f"pretrain({name}=...) is not supported with an asynchronous --pipeline-schedule"
                )
        if self.pipeline is None:
            self.pipeline = self._make_pipeline()
        timers = self.pipeline.config.timers
        if timers is not None:
            # Without Megatron's barrier: stages are at different places of the schedule.
            timers("forward-backward", log_level=1).start(barrier=False)
        m = kwargs["num_microbatches"]
        losses = self.pipeline.forward_backward(
            forward_step_func=kwargs["forward_step_func"],
            data_iterator=kwargs["data_iterator"],
            num_microbatches=m,
            next_num_microbatches=self._next_microbatches(m),
            seq_length=kwargs["seq_length"],
            micro_batch_size=kwargs["micro_batch_size"],
            decoder_seq_length=kwargs.get("decoder_seq_length"),
        )
        if timers is not None:
            timers("forward-backward").stop()
        return losses

    def step(self) -> tuple[bool, float | None, int | None]:
        """In place of the optimizer's ``step()``: begin the update.

        Returns:
            (successful, gradient norm, zeros in the gradient) as Megatron's optimizers do. While the update is
            pending it counts as successful and has no norm; both are set right when it completes.
        """
        if self.pipeline is None:
            result: tuple[bool, float | None, int | None] = self._synchronous_step()
            return result
        assert self.scheduler is not None
        iteration = self._args.curr_iteration + 1
        self.pipeline.step()
        if self._is_last_step() or self._is_logged(iteration):
            completed = self.pipeline.complete()
            assert completed is not None
            if completed.skipped:
                _say_skipped(iteration, completed)
            return not completed.skipped, completed.grad_norm, None
        self._pending = _Iteration(iteration, self.scheduler.num_steps)
        return True, None, None

    def before_log(self, losses: dict[str, torch.Tensor], totals: dict[str, Any], iteration: int) -> None:
        """Remember what a late skip of this iteration would have to undo."""
        if self._pending is not None and self._pending.number == iteration:
            self._pending.samples = self._args.consumed_train_samples
            self._pending.totals = (totals, dict(totals))
            self._pending.losses = losses

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let model and random state be what a checkpoint has to hold, and its entry the pipeline's."""
        kept: AbstractContextManager[None] = nullcontext() if self.pipeline is None else self.pipeline.as_saved()
        with kept:
            # Before the pipeline has started, a checkpoint hands on what the one before has left.
            state = self.checkpoints.resumed if self.pipeline is None else self.pipeline.state()
            with self.checkpoints.saving(state):
                yield

    def versioned_tensors(self) -> dict[str, torch.Tensor]:
        """What the pipeline keeps versions of on this stage; nothing without an optimizer (``--skip-train``)."""
        return versioned_tensors(self._model[0]) if self._model else {}

    def asks_for_saves(self) -> bool:
        """Whether to ask all ranks, and wait for them, if a save in the background has ended.

        Megatron asks in every iteration. While the pipeline runs it is enough where ranks wait for each other anyway.
        """
        # The loop has not moved on to the iteration that follows.
        return self.pipeline is None or self._is_logged(self._args.curr_iteration + 1)

    @contextmanager
    def exit_checks(self) -> Iterator[None]:
        """Let Megatron check signals and the time limit only when a rank is known to have seen one.

        Megatron's own checks are world-wide reductions in every iteration. A request travels with the agreement of an
        update instead, and every rank completes that update within the same iteration, so all of them ask together.
        """
        args = self._args
        kept = args.exit_signal_handler, args.exit_duration_in_mins
        if self.pipeline is not None:
            if not self._agreed_requests & _EXIT_BY_SIGNAL:
                args.exit_signal_handler = False
            if not self._agreed_requests & _EXIT_BY_TIME:
                args.exit_duration_in_mins = None
        try:
            yield
        finally:
            args.exit_signal_handler, args.exit_duration_in_mins = kept

    def _request(self) -> int:
        """What this rank requests now."""
        from megatron.training import training
        from megatron.training.global_vars import get_signal_handler

        args, bits = self._args, 0
        if args.exit_signal_handler and get_signal_handler()._signal_received:
            bits |= _EXIT_BY_SIGNAL
        if args.exit_duration_in_mins:
            minutes = (time.time() - training._TRAIN_START_TIME) / 60.0
            bits |= _EXIT_BY_TIME if minutes > args.exit_duration_in_mins else 0
        return bits

    def make_trace(self) -> Trace:
        """The trace of this rank; all ranks of the job must call it together."""
        from megatron.core import parallel_state

        assert self.config is not None
        if self.config.async_trace is None:
            return NO_TRACE
        trace = Trace(
            self.config.async_trace,
            rank=dist.get_rank(),
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            first_step=self.config.async_trace_start,
            steps=self.config.async_trace_steps,
            device=torch.device("cpu") if self.cpu else torch.device("cuda", torch.cuda.current_device()),
        )
        assert dist.group.WORLD is not None
        trace.align(dist.group.WORLD)
        return trace

    def finish_training(self) -> None:
        """Complete the last update, bind the newest weights, take messages off the wire."""
        if self.pipeline is not None:
            self._report_audit()
            self.pipeline.trace.close()
            self.pipeline.bind_newest()
            self.pipeline.discard_prefetched()

    def _hand_back(self) -> None:
        """From here on training is synchronous."""
        if self.pipeline is not None:
            self.pipeline.hand_back()
            moe_logging.destroy_moe_metrics_tracker()
            self.pipeline.trace.close()
            self._report_audit()
            self.pipeline = None

    def _report_audit(self) -> None:
        if self._audit is None:
            return
        from megatron.training.global_vars import get_wandb_writer

        self._audit.report(get_wandb_writer())
        self._audit = None

    def _make_pipeline(self) -> AsyncPipeline:
        from megatron.core.process_groups_config import ProcessGroupCollection

        assert self.config is not None
        if len(self._model) != 1:
            raise ConfigurationError("an asynchronous schedule runs one model chunk a stage; drop virtual stages")
        kind = make_schedule(
            self.config.pipeline_schedule,
            self._args.pipeline_model_parallel_size,
            stage=0,
            simulated_stages=self.config.simulate_pipeline_stages,
        ).kind()
        pipeline = AsyncPipeline(
            model=self._model[0],
            optimizer=self._optimizer,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            options=PipelineOptions(
                schedule=self.config.pipeline_schedule,
                warmup_factor=self.config.async_warmup_factor,
                ef_coefficient=self.config.ef_coefficient,
                timeout=timedelta(minutes=self._args.distributed_timeout_minutes),
                per_token=self._args.calculate_per_token_loss,
                simulated_stages=self.config.simulate_pipeline_stages,
                delay_compensation=self.config.async_delay_compensation,
                weight_prediction=self.config.async_weight_prediction,
                lr_discount_iters=self.config.async_lr_discount_iters,
            ),
            resumed=self.checkpoints.hand_over(kind),
            metrics=self._make_metrics(),
            trace=self.make_trace(),
        )
        if self.config.async_audit:
            self._audit = DelayAudit(pipeline)
        pipeline.updates.on_complete.append(self._after_update)
        pipeline.updates.request = self._request
        return pipeline

    def _make_metrics(self) -> BatchMetrics | None:
        if not self._args.num_experts:
            return None
        # Also where the pipeline drains, and Megatron's own tracker takes over.
        metrics = BatchMetrics(lambda iteration: self._is_logged(iteration) or self._is_last_step())
        moe_logging.set_moe_metrics_tracker(metrics)
        return metrics

    def _is_last_step(self) -> bool:
        """Whether the pipeline ends with the current iteration, as far as that is known in advance."""
        args = self._args
        following = args.curr_iteration + 1
        return (
            following >= args.train_iters
            or self._is_synchronous(following)
            or bool(args.exit_interval and following % args.exit_interval == 0)
            or following in (args.phase_transition_iterations or ())
            # Megatron reads the data of an iteration that is to be skipped from the same iterator.
            or following + 1 in args.iterations_to_skip
        )

    def _next_microbatches(self, microbatches: int) -> int | None:
        """m of the batch after the current one, by Megatron's schedule of batch sizes; None if there is none."""
        if self._is_last_step():
            return None
        args = self._args
        # A copy: Megatron's own moves on at the start of the next iteration.
        calculator: Any = copy.copy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)
        samples = microbatches * args.micro_batch_size * args.data_parallel_size
        calculator.update(args.consumed_train_samples + samples, consistency_check=False)
        return int(calculator.get())

    def _is_synchronous(self, iteration: int) -> bool:
        assert self.config is not None
        return self.config.is_synchronous_at(iteration, self._args.train_iters)

    def _is_logged(self, iteration: int) -> bool:
        """Whether Megatron prints this iteration, so that its norm is needed now. The wait costs a little, once."""
        pipeline = self.pipeline
        first = pipeline is not None and pipeline.executor.next_batch == pipeline.first_batch + 1
        return first or iteration % self._args.log_interval == 0

    def _after_update(self, result: UpdateResult) -> None:
        """Note requests, and book a result that came after its iteration was logged."""
        self._agreed_requests |= result.requests
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if result.skipped:
            # The schedule moved on in the belief that the update would be made; no update has used it since.
            self.scheduler.num_steps = pending.scheduler_steps
            self.scheduler.step(0)
            _book_as_skipped(pending)
            _say_skipped(pending.number, result)
        self._log_norm(pending, result.grad_norm)

    def _log_norm(self, pending: _Iteration, norm: float) -> None:
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        if pending.number % self._args.tensorboard_log_interval != 0:
            return
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        if writer is not None:
            writer.add_scalar("grad-norm", norm, pending.number)
            writer.add_scalar("grad-norm vs samples", norm, pending.samples)
            if wandb is not None:
                wandb.log({"grad-norm": norm}, pending.number)


def _book_as_skipped(iteration: _Iteration) -> None:
    """Turn an iteration that Megatron's running totals count as advanced into a skipped one."""
    if iteration.totals is None:
        return
    totals, before = iteration.totals
    totals.clear()
    totals.update(before)
    totals.setdefault(_ADVANCED, 0)
    totals[_SKIPPED] = totals.get(_SKIPPED, 0) + 1
    lost = any(not bool(torch.isfinite(loss.float().sum())) for loss in (iteration.losses or {}).values())
    totals[_NAN] = totals.get(_NAN, 0) + int(lost)


def _say_skipped(iteration: int, result: UpdateResult) -> None:
    from megatron.training.utils import print_rank_last

    print_rank_last(f"> megatron_async: iteration {iteration}: update skipped, gradient norm {result.grad_norm}")
