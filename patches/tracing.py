"""Traces of Megatron's own schedules, so that a synchronous timeline can stand beside an asynchronous one.

The schedules call ``forward_step`` and ``backward_step`` through the globals of their module, and talk through one
method of ``P2PCommunicator``: wrapped there, 1F1B, interleaved 1F1B and a single stage are all traced.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from megatron_async.observe.trace import NO_TRACE, Trace
from megatron_async.patches.replacement import Replacement
from megatron_async.patches.training_loop import finished_by

_FLAG = "--async-trace with --pipeline-schedule=1f1b"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_COMMUNICATION = "megatron.core.pipeline_parallel.p2p_communication"
_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer"
_TRAINING = "megatron.training.training"


class ScheduleTracer:
    """Knows which batch and microbatch Megatron's schedule is at.

    Attributes:
        trace: Where the times go; :data:`~megatron_async.observe.trace.NO_TRACE` until training starts.
        batch: Number of the batch, from 0. It reads weight version ``batch`` and makes version ``batch + 1``.

    Args:
        make_trace: Makes the trace when ``megatron.training.training.train`` is called: by then every rank knows its
            stage. None for a program with a loop of its own, which sets :attr:`trace`.
    """

    def __init__(self, make_trace: Callable[[], Trace] | None = None) -> None:
        self.trace = NO_TRACE
        self.batch = 0
        self._make_trace = make_trace
        self._microbatches: dict[int, tuple[int | None, int | None]] = {}
        self._messages: Counter[str] = Counter()
        self._steps_open = 0

    def start(self) -> None:
        """Training starts."""
        if self._make_trace is not None:
            self.trace = self._make_trace()

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One forward; remembers which microbatch its output belongs to."""
        microbatch, chunk = kwargs.get("current_microbatch"), kwargs.get("vp_stage")
        with self._span("forward", microbatch, chunk):
            output, tokens = original(*args, **kwargs)
        self._microbatches[id(_first(output))] = microbatch, chunk
        return output, tokens

    def backward(self, original: Callable[..., Any], input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        """One backward. The schedule does not say of which microbatch; its output tensor does."""
        microbatch, chunk = self._microbatches.pop(id(_first(output_tensor)), (None, None))
        with self._span("backward", microbatch, chunk):
            return original(input_tensor, output_tensor, *args)

    def communicate(
        self, original: Callable[..., Any], communicator: Any, *, wait_on_reqs: bool = True, **kwargs: Any
    ) -> Any:
        """One exchange with the neighbours. What is both a send and a receive counts as a receive."""
        receives = [side for side in ("recv_prev", "recv_next") if kwargs[side]]
        sends = [side for side in ("tensor_send_next", "tensor_send_prev") if kwargs[side] is not None]
        for side in receives + sends:
            self._messages[side] += 1
        microbatch = None
        if communicator.virtual_pipeline_model_parallel_size is None and (receives or sends):
            # Without model chunks, messages of a batch travel in the order of its microbatches.
            microbatch = self._messages[(receives + sends)[0]] - 1
        waits = wait_on_reqs and bool(receives)
        with self._span("receive wait" if waits else "send", microbatch):
            received_prev, received_next, requests = original(communicator, wait_on_reqs=wait_on_reqs, **kwargs)
        if isinstance(requests, dict):
            requests = {side: _TimedRequest(self, side, request) for side, request in requests.items()}
        return received_prev, received_next, requests

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One optimizer step, the end of a training step. Optimizers may contain optimizers."""
        self._steps_open += 1
        try:
            with self.trace.span("step", batch=self.batch, version=self.batch + 1):
                return original(*args, **kwargs)
        finally:
            self._steps_open -= 1
            if not self._steps_open:
                self._end_step()

    def wait(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call that waits for other ranks."""
        with self.trace.span(name, batch=self.batch):
            return original(*args, **kwargs)

    def _end_step(self) -> None:
        self.batch += 1
        self._messages.clear()
        # Outputs of a step that ended in an exception would otherwise lend their numbers to later objects.
        self._microbatches.clear()
        self.trace.next_step()

    def _span(
        self, name: str, microbatch: int | None, chunk: int | None = None
    ) -> contextlib.AbstractContextManager[None, None]:
        return self.trace.span(name, batch=self.batch, microbatch=microbatch, version=self.batch, chunk=chunk)


class _TimedRequest:
    """A message of ``--overlap-p2p-communication`` that the schedule waits for later."""

    def __init__(self, tracer: ScheduleTracer, side: str, request: Any) -> None:
        self._tracer = tracer
        self._name = "receive wait" if side.startswith("recv") else "send"
        self._request = request

    def wait(self) -> Any:
        return self._tracer.wait(self._name, self._request.wait)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output


def _in_training(original: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """An evaluation uses the same functions, without gradients; it belongs to no training step."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return traced(original, *args, **kwargs)

    return replacement


def _wrapped(traced: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return traced(original, *args, **kwargs)

        return replacement

    return replace


def _train(original: Callable[..., Any], tracer: ScheduleTracer) -> Callable[..., Any]:
    finished = finished_by(original, lambda: tracer.trace.close())

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        tracer.start()
        return finished(*args, **kwargs)

    return replacement


def tracing(tracer: ScheduleTracer) -> tuple[Replacement, ...]:
    """Rows that trace Megatron's own schedules and optimizers. They change no number.

    Args:
        tracer: Where the spans go. One tracer belongs to one application of the rows.
    """

    def row(module: str, attribute: str, replace: Callable[[Any], Any], parameters: str, reason: str) -> Replacement:
        return Replacement(
            module=module,
            attribute=attribute,
            replace=replace,
            parameters=tuple(parameters.split()),
            reason=reason,
            enabled_by=_FLAG,
        )

    step = _wrapped(tracer.step)
    norm = _wrapped(functools.partial(tracer.wait, "norm wait"))
    reduction = _wrapped(functools.partial(tracer.wait, "reduction wait"))
    no_hook = "Megatron's timers know totals, not spans, and synchronize the device"
    return (
        row(
            _SCHEDULES,
            "forward_step",
            lambda original: _in_training(original, tracer.forward),
            "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config "
            "cp_group_size collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch "
            "current_microbatch vp_stage is_last_stage",
            no_hook,
        ),
        row(
            _SCHEDULES,
            "backward_step",
            lambda original: _in_training(original, tracer.backward),
            "input_tensor output_tensor output_tensor_grad config",
            no_hook,
        ),
        row(
            _COMMUNICATION,
            "P2PCommunicator._communicate",
            lambda original: _in_training(original, tracer.communicate),
            "self tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape wait_on_reqs",
            "every schedule makes its own communicator, and this is the one method all exchanges go through",
        ),
        row(_OPTIMIZERS, "ChainedOptimizer.step", step, "self", "optimizers have no hook around a step"),
        row(_OPTIMIZERS, "MixedPrecisionOptimizer.step", step, "self", "optimizers have no hook around a step"),
        row(_OPTIMIZERS, "FP32Optimizer.step", step, "self", "optimizers have no hook around a step"),
        row(
            _OPTIMIZERS,
            "get_grad_norm_fp32",
            norm,
            "grads_for_norm norm_type grad_stats_parallel_group",
            "inside a step, and where the stages wait for each other",
        ),
        row(
            _LAYER_WISE,
            "get_grad_norm_fp32",
            norm,
            "grads_for_norm norm_type grad_stats_parallel_group",
            "a global of its own for the layer-wise distributed optimizer",
        ),
        row(
            _TRAINING,
            "finalize_model_grads",
            reduction,
            "model num_tokens pg_collection force_all_reduce",
            "the training loop gives this global to the schedule",
        ),
        row(
            _TRAINING,
            "train",
            lambda original: _train(original, tracer),
            "forward_step_func model optimizer opt_param_scheduler train_data_iterator valid_data_iterator "
            "process_non_loss_data_func config checkpointing_context non_loss_data_func inference_model "
            "p2p_communicator pg_collection",
            "the trace starts when the process groups are there, and is written when training ends",
        ),
    )
