"""A pipeline stage whose forward and backward take a set time without using the processor.

The stage is real in every other respect: it has a 2-D bf16 weight with a gradient, its output depends on its input and
weight, and its backward consists of two autograd nodes, one that takes the time of the input gradient and one that
takes the time of the weight gradient, so that schedules which split the backward can do so.
"""

from __future__ import annotations

import ctypes
import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import MegatronModule, TransformerConfig

HIDDEN = 64
"""Weights are HIDDEN × HIDDEN, activations (HIDDEN, samples, HIDDEN)."""
BYTES_PER_SAMPLE = HIDDEN * HIDDEN * 2
_PR_SET_TIMERSLACK = 29


def use_exact_timers() -> None:
    """Let sleeps of the calling thread end on time: by default Linux may delay each by 50 microseconds.

    Raises:
        OSError: If the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_TIMERSLACK) failed")


@dataclass(slots=True)
class Work:
    """How long a stage works, and what it has done.

    Attributes:
        forward: Duration of a forward of the whole stage, in ns; likewise the other two.
        input_gradient: Of the first half of a backward.
        weight_gradient: Of the second half.
        is_fast: Whether work takes no time at present, for steps that only fill or empty a pipeline.
        forwards: Number of forwards done; likewise the other two.
        input_gradients: Number of input gradients.
        weight_gradients: Number of weight gradients.
        late: Sum of the times by which sleeps ended late, in ns.
    """

    forward: int
    input_gradient: int
    weight_gradient: int
    is_fast: bool = False
    forwards: int = 0
    input_gradients: int = 0
    weight_gradients: int = 0
    late: int = 0

    def reset(self) -> None:
        """Count from zero."""
        self.forwards = self.input_gradients = self.weight_gradients = self.late = 0

    def counts(self) -> tuple[int, int, int]:
        """Forwards, input gradients and weight gradients done."""
        return self.forwards, self.input_gradients, self.weight_gradients

    def rest(self, start: int, duration: int) -> None:
        """Sleep until ``duration`` ns after ``start``, a time of the monotonic clock."""
        if self.is_fast:
            return
        end = start + duration
        left = end - time.monotonic_ns()
        if left > 0:
            time.sleep(left / 1e9)  # on Linux until an absolute time of the same clock
        self.late += time.monotonic_ns() - end


class _InputGradient(torch.autograd.Function):
    """Identity. Takes the time of the forward, and in the backward that of the input gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: SleepingStage, start: int) -> torch.Tensor:
        ctx.stage = stage
        # Not a view of x: Megatron frees what it has sent, and refuses to free a view.
        ctx.mark_dirty(x)
        stage.work.forwards += 1
        stage.work.rest(start, stage.work.forward // stage.chunks)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        stage = ctx.stage
        stage.work.input_gradients += 1
        stage.work.rest(time.monotonic_ns(), stage.work.input_gradient // stage.chunks)
        return gradient, None, None


class _WeightGradient(torch.autograd.Function):
    """Spreads the weight (H, H) over the samples: (H, 1, H) expanded to (H, N, H). Its backward takes its time."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, samples: int, stage: SleepingStage) -> torch.Tensor:
        ctx.stage = stage
        return weight.unsqueeze(1).expand(-1, samples, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start = time.monotonic_ns()
        stage = ctx.stage
        stage.work.weight_gradients += 1
        weight_gradient = gradient.sum(dim=1)
        stage.work.rest(start, stage.work.weight_gradient // stage.chunks)
        return weight_gradient, None, None


class SleepingStage(MegatronModule):  # type: ignore[misc]
    """y = x + W, with W (HIDDEN, HIDDEN) the same for every sample; W is the sum of all weights.

    Args:
        config: Megatron's configuration.
        work: Durations and counts; shared by the chunks of a rank.
        number: Of this stage in the whole model, which has ``stages`` of them: its weight depends on it.
        stages: Stages of the whole model, all chunks of all ranks.
        chunks: Chunks a rank holds.
        vp_stage: Number of this chunk on its rank, None if the rank has but one.
        weights: Number of parameters.
    """

    def __init__(
        self,
        config: TransformerConfig,
        work: Work,
        *,
        number: int,
        stages: int,
        chunks: int = 1,
        vp_stage: int | None = None,
        weights: int = 1,
    ) -> None:
        super().__init__(config)
        self.work, self.chunks, self.vp_stage = work, chunks, vp_stage
        self.pre_process, self.post_process = number == 0, number == stages - 1
        self.share_embeddings_and_output_weights = False
        generator = torch.Generator().manual_seed(1000 + number)
        shape, scale = (weights, HIDDEN, HIDDEN), (stages * weights) ** -0.5
        initial = (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)
        self.weights = torch.nn.ParameterList(initial.clone() for initial in initial.unbind())
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """As Megatron's schedules set the input of a stage."""
        (self.input_tensor,) = tensors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(HIDDEN, N, HIDDEN) to the same shape, bf16; ``x`` is what the first stage reads."""
        start = time.monotonic_ns()
        if self.pre_process:
            # The first stage, too, has an input gradient to work out.
            x = x.detach().requires_grad_()
        elif self.input_tensor is not None:
            x = self.input_tensor
        weight = functools.reduce(torch.add, self.weights)
        spread = _WeightGradient.apply(weight, x.shape[1], self)  # type: ignore[no-untyped-call]
        output: torch.Tensor = _InputGradient.apply(x + spread, self, start)  # type: ignore[no-untyped-call]
        return output


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Mean square of the first sample, 0-d fp32; cheap, whatever the size of the message."""
    return output[:, :1].float().square().mean()
