"""Megatron's schedules and the asynchronous pipeline behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_async.pipeline.runtime import AsyncPipeline, PipelineOptions
from schedule_benchmark.parts import Trained

ForwardStep = Callable[[Any, torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]


class System(Protocol):
    """A way to train, on one rank."""

    @property
    def grad_norm(self) -> float:
        """Gradient norm of the last update that is complete."""

    def start(self, microbatches: int, samples: int) -> None:
        """Get ready for batches of ``microbatches`` microbatches of ``samples`` samples."""

    def step(self) -> None:
        """Train one batch. A schedule that runs forwards ahead expects another batch after it."""

    def finish(self) -> None:
        """Train what has been started."""

    def close(self) -> None:
        """Give process groups back: each keeps threads, whose idle wake-ups take processor time."""


class Data:
    """What the stages read: the same microbatch again and again.

    Attributes:
        sequence: First dimension of activations.
    """

    def __init__(self, sequence: int, microbatch: Callable[[int], Any]) -> None:
        self.sequence = sequence
        self._microbatch = microbatch

    def repeat(self, samples: int) -> Iterator[Any]:
        """Microbatches of ``samples`` samples, for ever."""
        microbatch = self._microbatch(samples)
        while True:
            yield microbatch


class MegatronSystem:
    """megatron-core's own schedule: 1F1B, interleaved 1F1B with several chunks, or no pipeline on one stage."""

    def __init__(self, trained: Trained, forward_step: ForwardStep, data: Data, stages: int) -> None:
        self._trained, self._forward_step, self._data = trained, forward_step, data
        chunks = len(trained.chunks)
        self._run = get_forward_backward_func(pp_size=stages, vp_size=chunks if chunks > 1 else None)

    @property
    def grad_norm(self) -> float:
        """Of the last step."""
        return self._trained.grad_norm

    def start(self, microbatches: int, samples: int) -> None:
        """Nothing is kept between steps but these numbers."""
        self._microbatches, self._samples = microbatches, samples
        self._iterators = [self._data.repeat(samples) for _ in self._trained.chunks]

    def step(self) -> None:
        """What megatron.training's ``train_step`` does."""
        self._trained.zero_grad()
        self._run(
            forward_step_func=self._forward_step,
            data_iterator=self._iterators,
            model=self._trained.chunks,
            num_microbatches=self._microbatches,
            seq_length=self._data.sequence,
            micro_batch_size=self._samples,
            forward_only=False,
        )
        self._trained.step()

    def finish(self) -> None:
        """Nothing is left over after a step."""

    def close(self) -> None:
        """No groups of its own."""


class AsyncSystem:
    """The asynchronous pipeline.

    Args:
        trained: Model and optimizer.
        forward_step: Megatron's user function.
        data: What the stages read.
        warmup_factor: See ``--async-warmup-factor``.
        blocking: Whether every update is completed as soon as it has begun, as a step that blocks would.
    """

    def __init__(
        self, trained: Trained, forward_step: ForwardStep, data: Data, *, warmup_factor: int = 1, blocking: bool = False
    ) -> None:
        self._trained, self._forward_step, self._data = trained, forward_step, data
        self._blocking = blocking
        self.grad_norm = 0.0
        self.pipeline = AsyncPipeline(
            model=trained.chunks[0],
            optimizer=trained.optimizer,
            pg_collection=trained.groups,
            options=PipelineOptions(warmup_factor=warmup_factor),
        )
        self.pipeline.updates.on_complete.append(self._note)

    def _note(self, result: Any) -> None:
        if result.skipped:
            raise RuntimeError("an optimizer step was skipped: gradients are not finite")
        self.grad_norm = result.grad_norm

    def start(self, microbatches: int, samples: int) -> None:
        """The pipeline is empty here."""
        self._microbatches, self._samples = microbatches, samples
        self._iterator = self._data.repeat(samples)

    def step(self) -> None:
        """One step of the training loop; the forwards that belong to the next batch run as well."""
        self._train(self._microbatches)

    def finish(self) -> None:
        """The last batch: nothing runs ahead, and its update is completed."""
        self._train(None)
        self.pipeline.complete()

    def close(self) -> None:
        """The pipeline has groups of its own."""
        self.pipeline.close()

    def _train(self, next_microbatches: int | None) -> None:
        self._trained.zero_grad()
        self.pipeline.forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=self._iterator,
            num_microbatches=self._microbatches,
            next_num_microbatches=next_microbatches,
            seq_length=self._data.sequence,
            micro_batch_size=self._samples,
        )
        self.pipeline.step()
        if self._blocking:
            self.pipeline.complete()
