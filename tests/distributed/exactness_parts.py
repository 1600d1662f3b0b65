"""What Megatron has on one rank of an exactness case: model, optimizer, groups, loss, and its own schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig

from megatron_async.pipeline.runtime import AsyncPipeline, PipelineOptions
from tests.distributed.exactness_cases import Case, learning_rate
from tests.models import Stage, build_stages, cross_entropy


class PipelineStage(MegatronModule):
    """A plain stage behind the protocol that Megatron's schedules expect of a model."""

    def __init__(self, config: TransformerConfig, stage: Stage) -> None:
        super().__init__(config)
        self.stage = stage
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = stage.pre_process, stage.post_process
        self.share_embeddings_and_output_weights = stage.share_embeddings_and_output_weights
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        (self.input_tensor,) = tensors

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        return self.stage.shared_embedding_or_output_weight()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.stage(tokens if self.pre_process else self.input_tensor)


@dataclass
class Parts:
    """What Megatron has on this rank: model, optimizer, process groups."""

    model: DistributedDataParallel
    optimizer: Any
    groups: Any

    def pipeline(self, case: Case, **more: Any) -> AsyncPipeline:
        options = PipelineOptions(
            schedule=case.schedule,
            warmup_factor=case.warmup_factor,
            ef_coefficient=case.ef,
            delay_compensation=case.compensation,
            weight_prediction=case.prediction,
            lr_discount_iters=case.discount,
            per_token=case.per_token,
            simulated_stages=case.simulated,
        )
        parts = {"model": self.model, "optimizer": self.optimizer, "pg_collection": self.groups}
        return AsyncPipeline(**parts, options=options, **more)


def build_parts(case: Case) -> Parts:
    """The parts of this rank; the model-parallel groups must be initialized."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    dtype = getattr(torch, case.dtype)
    config = TransformerConfig(
        num_layers=len(case.spec.blocks),
        hidden_size=case.spec.hidden,
        num_attention_heads=2,
        pipeline_model_parallel_size=case.stages,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=case.per_token,
    )
    stage = build_stages(case.spec, case.stages)[rank].to(dtype)
    stage.mark_parameters()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if not case.data_parallel:
        # The other replicas of this pipeline run other cases: to this one it is alone, like a rank without TP.
        groups.dp = groups.dp_cp = groups.expt_dp = groups.tp
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=case.sharded, overlap_grad_reduce=case.hooks
        ),
        PipelineStage(config, stage),
        pg_collection=groups,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=learning_rate(case.optimizer, 0),
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=case.sharded,
            **case.optimizer_settings,
        ),
        [model],
    )
    for group in optimizer.param_groups:
        group["weight_decay"] *= group.get("wd_mult", 1.0)  # as Megatron's scheduler does
    return Parts(model, optimizer, groups)


def synchronous_step(case: Case, parts: Parts, data: Iterator[Any]) -> Any:
    """Megatron's own schedule and step; returns (losses, gradient norm)."""
    config = parts.model.config
    config.finalize_model_grads_func = finalize_model_grads
    parts.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step_of(case),
        data_iterator=data,
        model=[parts.model],
        num_microbatches=case.microbatches,
        seq_length=case.spec.sequence,
        micro_batch_size=case.spec.micro_batch,
        p2p_communicator=P2PCommunicator(pp_group=parts.groups.pp, config=config),
        pg_collection=parts.groups,
    )
    config.finalize_model_grads_func = None
    successful, norm, _ = parts.optimizer.step()
    assert successful
    return losses, norm


def loss_function(targets: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = cross_entropy(logits, targets)
    return loss, {"loss": loss.detach().clone()}


def loss_per_token(targets: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    loss = cross_entropy(logits, targets)
    tokens = torch.tensor(targets.numel(), dtype=torch.int)
    return loss * targets.numel(), tokens, {"loss": loss.detach().clone()}


def forward_step_of(case: Case) -> Callable[..., Any]:
    loss = loss_per_token if case.per_token else loss_function

    def forward_step(data: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens, targets = next(data)
        return model(tokens), functools.partial(loss, targets)

    return forward_step
