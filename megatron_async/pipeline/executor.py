"""Runs a plan on one stage, with megatron-core's own ``forward_step`` and ``backward_step``."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
)

from megatron_async.observe.trace import NO_TRACE, Trace
from megatron_async.pipeline.communication import StageCommunicator
from megatron_async.pipeline.plan import Action, Op, Schedule, Step
from megatron_async.pipeline.random_state import RandomState
from megatron_async.pipeline.weight_versions import WeightVersions

ForwardStepFunc = Callable[..., Any]


class Updates(Protocol):
    """What the executor needs of the optimizer."""

    @property
    def pending(self) -> int | None:
        """Number of the update that has begun and is not complete, if any."""

    def take(self) -> None:
        """Empty the gradient accumulation buffers, if the pending update has not done so."""

    def complete(self) -> Any:
        """Complete the pending update."""

    def poll(self) -> None:
        """Let background communication of the pending update go on. Never blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """What the forwards of a batch need besides the model.

    Attributes:
        forward_step_func: Megatron's user function, ``(data_iterator, model) -> (output, loss function)``.
        data_iterator: Yields the microbatches of all batches in a row; None on stages that read no data.
        tensor_shape: (sequence, microbatch, hidden) of the tensors between stages.
    """

    forward_step_func: ForwardStepFunc
    data_iterator: Iterator[Any] | None
    tensor_shape: tuple[int, ...]


@dataclass(slots=True)
class _InFlight:
    """A forward whose backward has not run."""

    batch: int
    microbatch: int
    input_tensor: torch.Tensor | None
    output_tensor: torch.Tensor


class PipelineExecutor:
    """One stage of an asynchronous pipeline.

    Attributes:
        next_batch: Number of the batch whose backwards the next call of :meth:`run_step` runs.
        tokens: Tokens of the batch that was run last, as Megatron's loss functions count them, int, one element; None
            on stages without a loss.

    Between two calls of :meth:`run_step` forwards of the next batch may have run, their graphs are kept here.

    Args:
        model: The stage's model, wrapped by Megatron's ``DistributedDataParallel``.
        config: Its ``TransformerConfig``.
        schedule: The schedule of this stage.
        versions: The weight versions of this stage.
        communicator: Messages with the neighbours.
        updates: The deferred optimizer step.
        observer: Called with every action after it ran, while the parameters point at what it read; for audits.
        first_batch: Number of the first batch.
        enter_batch: Called with the number of a batch before a forward or backward of it, for what the model keeps of
            batches.
        trace: Where the times of the actions go.
    """

    def __init__(
        self,
        *,
        model: Any,
        config: Any,
        schedule: Schedule,
        versions: WeightVersions,
        communicator: StageCommunicator,
        updates: Updates,
        observer: Callable[[Action], None] | None = None,
        first_batch: int = 0,
        enter_batch: Callable[[int], None] | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.model = model
        self.config = config
        self.schedule = schedule
        self.versions = versions
        self.communicator = communicator
        self.updates = updates
        self.observer = observer
        self.trace = trace
        self.next_batch = first_batch
        self._enter_batch = enter_batch or (lambda batch: None)
        self.tokens: torch.Tensor | None = None
        # Their results go out before anything else is looked at.
        is_sent = {Op.FORWARD: not schedule.is_last, Op.BACKWARD: not schedule.is_first}
        self._sent_next = {op for op, sent in is_sent.items() if sent}
        self._has_reduction_hooks = bool(model.ddp_config.overlap_grad_reduce)
        self._in_flight: list[_InFlight] = []
        self._losses: dict[int, list[Any]] = {}
        self._tokens: dict[int, torch.Tensor] = {}
        self._microbatches: dict[int, int] = {}
        self._filled = False
        self._before_prefetch: RandomState | None = None
        self._context: BatchContext | None = None
        self._gradient_to_send: torch.Tensor | None = None
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.RECEIVE_ACTIVATION: self._receive_activation,
            Op.FORWARD: self._forward,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECEIVE_GRADIENT: self._receive_gradient,
            Op.BACKWARD: self._backward,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.TAKE_GRADIENTS: lambda _: self.updates.take(),
            Op.COMPLETE_UPDATE: self._complete_update,
        }

    def run_step(
        self, context: BatchContext, microbatches: int, next_microbatches: int | None
    ) -> list[dict[str, torch.Tensor]]:
        """Run the backwards of the next batch, and the forwards that the plan puts beside them.

        The update of the batch is left to the caller, who begins it through the optimizer: the plan's last action.

        Args:
            context: Where data and shapes come from.
            microbatches: m of this batch.
            next_microbatches: m of the batch after it, or None to prefetch nothing.

        Returns:
            The loss dictionaries of this batch's microbatches, in order, on the last stage; elsewhere an empty list.

        Raises:
            ValueError: If a batch has too few microbatches for the schedule.
        """
        batch = self.next_batch
        known = self._microbatches.get(batch, microbatches)
        if known != microbatches:
            raise ValueError(
                f"batch {batch} was prefetched with {known} microbatches and now has {microbatches}: "
                "the batch size must not change while the asynchronous pipeline runs"
            )
        self._context = context
        self._before_prefetch = None
        self._microbatches[batch] = microbatches
        if next_microbatches is not None:
            self._microbatches[batch + 1] = next_microbatches
        step = Step(
            batch=batch,
            microbatches=microbatches,
            next_microbatches=next_microbatches,
            filled=self._filled,
            pending_update=self.updates.pending,
        )
        for action in self.schedule.actions(step):
            if action.op is Op.BEGIN_UPDATE:
                break
            self._handlers[action.op](action)
            if action.op not in self._sent_next:
                self.updates.poll()
            if self.observer is not None:
                self.observer(action)
        self._filled = next_microbatches is not None
        self._microbatches.pop(batch)
        self.tokens = self._tokens.pop(batch, None)
        self.next_batch += 1
        return self._losses.pop(batch, [])

    def random_state_of_next_batch(self) -> contextlib.AbstractContextManager[None]:
        """Put the random state back, for a while, to where it was before forwards of the next batch were prefetched."""
        return contextlib.nullcontext() if self._before_prefetch is None else self._before_prefetch.in_place()

    def discard_prefetched(self) -> None:
        """Throw the prefetched forwards away; their data have to be read again, and their random numbers drawn."""
        if self._before_prefetch is not None:
            self._before_prefetch.put_back()
            self._before_prefetch = None
        self.communicator.discard()
        for flight in self._in_flight:
            self.versions.release(flight.batch)
        self._in_flight.clear()
        self._losses.clear()
        self._tokens.clear()
        self._microbatches.clear()
        self._filled = False

    def _receive_activation(self, _: Action) -> None:
        assert self._context is not None
        self.communicator.post_receive_activation(self._context.tensor_shape)

    def _receive_gradient(self, _: Action) -> None:
        assert self._context is not None
        self.communicator.post_receive_gradient(self._context.tensor_shape)

    def _forward(self, action: Action) -> None:
        assert self._context is not None
        input_tensor = None
        if not self.schedule.is_first:
            with self._span("receive wait", action):
                input_tensor = self.communicator.receive_activation()
        if action.batch > self.next_batch and self._before_prefetch is None:
            # A checkpoint after this step begins with this forward again.
            self._before_prefetch = RandomState.now()
        with self._span("forward", action):
            self.versions.acquire(action.batch)
            self._enter_batch(action.batch)
            output_tensor, tokens = forward_step(
                self._context.forward_step_func,
                self._context.data_iterator,
                self.model,
                self._microbatches[action.batch],
                input_tensor,
                self._losses.setdefault(action.batch, []),
                self.config,
                cp_group_size=1,
                current_microbatch=action.microbatch,
                is_last_stage=self.schedule.is_last,
            )
        if self.schedule.is_last:
            counted = self._tokens.get(action.batch)
            self._tokens[action.batch] = tokens if counted is None else counted + tokens
        self._in_flight.append(_InFlight(action.batch, action.microbatch, input_tensor, output_tensor))

    def _send_activation(self, action: Action) -> None:
        output_tensor = self._in_flight[-1].output_tensor
        with self._span("send", action):
            self.communicator.send_activation(output_tensor)
        deallocate_output_tensor(output_tensor, self.config.deallocate_pipeline_outputs)

    def _backward(self, action: Action) -> None:
        flight = self._in_flight.pop(0)
        if (flight.batch, flight.microbatch) != (action.batch, action.microbatch):
            raise RuntimeError(f"the plan wants the backward of {action}, the oldest forward is {flight}")
        gradient = None
        if not self.schedule.is_last:
            with self._span("receive wait", action):
                gradient = self.communicator.receive_gradient()
        is_last_of_batch = action.microbatch == self._microbatches[action.batch] - 1
        with self._span("backward", action), self._no_sync(is_last_of_batch):
            # The parameters may be bound to the other version by now: an operator that saved the leaf would use that.
            self.versions.bind(flight.batch)
            self._enter_batch(flight.batch)
            self._gradient_to_send = backward_step(flight.input_tensor, flight.output_tensor, gradient, self.config)
        self.versions.release(flight.batch)

    def _no_sync(self, is_last_of_batch: bool) -> contextlib.AbstractContextManager[Any]:
        """Megatron's hooks of ``--overlap-grad-reduce`` start reductions in the last backward of a batch only."""
        if is_last_of_batch or not self._has_reduction_hooks:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self.model.no_sync()
        return context

    def _span(self, name: str, action: Action) -> contextlib.AbstractContextManager[Any]:
        return self.trace.span(name, batch=action.batch, microbatch=action.microbatch, version=action.version)

    def _send_gradient(self, action: Action) -> None:
        assert self._gradient_to_send is not None
        with self._span("send", action):
            self.communicator.send_gradient(self._gradient_to_send)
        self._gradient_to_send = None

    def _complete_update(self, _: Action) -> None:
        self.updates.complete()
