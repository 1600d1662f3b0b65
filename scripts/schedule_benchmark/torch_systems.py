"""PyTorch's pipeline schedules with Megatron's optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

from schedule_benchmark.parts import Trained
from schedule_benchmark.sleeping import HIDDEN, loss_of


def chunk_numbers(style: str, rank: int, ranks: int, chunks: int) -> list[int]:
    """The stages of the whole model that a rank holds.

    Args:
        style: ``loop`` (Megatron's interleaving) or ``v`` (ZB-V: the last stage lies beside the first one).
        rank: Pipeline rank.
        ranks: Number of them.
        chunks: Chunks a rank holds; at most 2 for ``v``.
    """
    if style == "v" and chunks == 2:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * chunk for chunk in range(chunks)]


class TorchSystem:
    """``Schedule1F1B``, or ``ScheduleZBVZeroBubble`` with two chunks, followed by Megatron's optimizer step."""

    def __init__(self, trained: Trained, group: dist.ProcessGroup) -> None:
        self._trained, self._group = trained, group
        self._rank, self._ranks = group.rank(), group.size()
        self._schedule: Any = None
        self._batch: torch.Tensor | None = None

    @property
    def grad_norm(self) -> float:
        """Of the last step."""
        return self._trained.grad_norm

    def start(self, microbatches: int, samples: int) -> None:
        """Build the schedule: PyTorch's fixes the number of microbatches."""
        chunks = len(self._trained.chunks)
        example = torch.zeros(HIDDEN, samples, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        stages: list[Any] = [
            PipelineStage(
                chunk.module,
                number,
                self._ranks * chunks,
                torch.device("cpu"),
                # Given, so that no forward has to run to find out.
                input_args=example if number > 0 else example.detach(),
                output_args=example,
                group=self._group,
            )
            for number, chunk in zip(
                chunk_numbers("v", self._rank, self._ranks, chunks), self._trained.chunks, strict=True
            )
        ]

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return loss_of(output) / microbatches

        if chunks == 1:
            self._schedule = Schedule1F1B(stages[0], microbatches, loss_fn=loss, scale_grads=False)
        else:
            self._schedule = ScheduleZBVZeroBubble(stages, microbatches, loss_fn=loss, scale_grads=False)
        # Each stage is one of the two ends or none, and with two chunks in a V rank 0 is both.
        self._is_first = stages[0].is_first
        self._is_last = any(stage.is_last for stage in stages)
        self._batch = first_stage_input(samples).repeat(microbatches, 1, 1)
        self._target = torch.zeros(microbatches)

    def step(self) -> None:
        """Schedule, gradients to where Megatron looks for them, optimizer step."""
        self._trained.zero_grad()
        arguments = (self._batch,) if self._is_first else ()
        target = self._target if self._is_last else None
        losses: list[torch.Tensor] | None = [] if self._is_last else None
        self._schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        for chunk in self._trained.chunks:
            for parameter in chunk.parameters():
                # A whole backward runs DDP's hook, which accumulates; a split one leaves the gradient here.
                if parameter.grad is not None:
                    parameter.main_grad.add_(parameter.grad)
                    parameter.grad = None
        self._trained.step()

    def finish(self) -> None:
        """Nothing is left over after a step."""

    def close(self) -> None:
        """No groups of its own."""


def first_stage_input(samples: int) -> torch.Tensor:
    """One microbatch, (HIDDEN, samples, HIDDEN) bf16, the same in every system."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(HIDDEN, samples, HIDDEN, generator=generator).to(torch.bfloat16)
