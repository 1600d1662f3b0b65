"""Megatron's parts around a model: groups, DDP, optimizer, and what a training step does after the schedule."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.training.utils import (
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)

CLIP = 1e-3
"""Below the gradient norm of every model here, so that clipping always has something to do."""

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adam"},
    "muon": {"optimizer": "muon"},
}


def initialize_groups(stages: int) -> None:
    """Megatron's process groups for one pipeline, those with the same ranks being one and the same.

    Megatron makes about twenty groups a rank, most of them of one rank, and gloo keeps three threads for each, which
    wake up all the time. Eight ranks on a few cores would spend a noticeable part of the processor's time on that.
    """
    made: dict[tuple[int, ...], Any] = {tuple(range(stages)): dist.group.WORLD}
    original = dist.new_group

    def new_group(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        key = tuple(ranks)
        if key not in made:
            made[key] = original(ranks, *args, **kwargs)
        return made[key]

    dist.new_group = new_group  # type: ignore[assignment]
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    finally:
        dist.new_group = original


def make_config(stages: int, chunks: int, **settings: Any) -> TransformerConfig:
    """A configuration with the stage-to-stage settings that Megatron's arguments default to.

    Args:
        stages: Pipeline stages p.
        chunks: Model chunks a rank holds.
        settings: Further fields; ``hidden_size``, ``num_layers`` and ``num_attention_heads`` are required.
    """
    overlap = chunks > 1  # megatron.training: overlapped for the interleaved schedule, batched for 1F1B
    return TransformerConfig(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        params_dtype=torch.bfloat16,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        **settings,
    )


class Trained:
    """The model chunks of a rank in DDP, and their optimizer.

    Attributes:
        chunks: DDP-wrapped chunks.
        optimizer: Megatron's.
        groups: Megatron's process groups.
        grad_norm: Of the last synchronous step, before clipping.

    Args:
        chunks: The chunks.
        config: Their configuration; its loss-scale function is set, as Megatron's training loop does.
        optimizer: ``adamw`` or ``muon``.
    """

    def __init__(self, chunks: list[torch.nn.Module], config: TransformerConfig, optimizer: str) -> None:
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        for chunk in chunks:
            chunk.model_type = ModelType.encoder_or_decoder  # as Megatron's get_model does
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.chunks = [
            DistributedDataParallel(config, ddp_config, chunk, pg_collection=self.groups, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=1e-4,
                weight_decay=0.1,
                clip_grad=CLIP,
                bf16=True,
                params_dtype=torch.bfloat16,
                **_OPTIMIZERS[optimizer],
            ),
            self.chunks,
        )
        config.grad_scale_func = self.optimizer.scale_loss
        self.grad_norm = 0.0

    def zero_grad(self) -> None:
        """What a training step does before the schedule."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """What a training step of Megatron does after the schedule: the update, and what the stages must agree on."""
        successful, grad_norm, _ = self.optimizer.step()
        group = self.groups.mp
        if not logical_and_across_model_parallel_group(successful, group=group):
            raise RuntimeError("an optimizer step was skipped: gradients are not finite")
        self.grad_norm = reduce_max_stat_across_model_parallel_group(grad_norm, group=group) or 0.0
