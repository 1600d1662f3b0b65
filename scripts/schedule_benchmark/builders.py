"""Builds the systems under measurement, with models that sleep or models that compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from schedule_benchmark.parts import Trained, make_config
from schedule_benchmark.points import SYSTEMS, Settings
from schedule_benchmark.sleeping import HIDDEN, SleepingStage, Work, loss_of, use_exact_timers
from schedule_benchmark.systems import AsyncSystem, Data, MegatronSystem, System
from schedule_benchmark.torch_systems import TorchSystem, chunk_numbers, first_stage_input

VOCABULARY = 512
"""Small, so that the last stage, which has the output layer, takes about as long as the others."""
OVERHEAD_WEIGHTS = 24
"""Parameters of the one stage in ``overhead``: as many as two transformer layers have."""


class Builder:
    """Builds systems for one mode and optimizer.

    Attributes:
        work: What sleeping stages do; None if they compute.
    """

    def __init__(self, mode: str, optimizer: str, settings: Settings) -> None:
        self._mode, self._optimizer, self._settings = mode, optimizer, settings
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._rank, self._ranks = self._group.rank(), self._group.size()
        self.work: Work | None = None
        if mode != "compute":
            use_exact_timers()
            backward = round(settings.backward_ms * 1e6)
            self.work = Work(
                forward=round(settings.forward_ms * 1e6),
                input_gradient=backward // 2,
                weight_gradient=backward - backward // 2,
                is_fast=mode == "overhead",
            )

    def build(self, name: str) -> System:
        """A system under its name in :data:`~schedule_benchmark.points.SYSTEMS`, with a model of its own."""
        chunks, config = (self._gpt if self._mode == "compute" else self._sleeping)(name)
        trained = Trained(chunks, config, self._optimizer)
        if name.startswith("torch"):
            return TorchSystem(trained, self._group)
        if self._mode == "compute":
            forward, data = gpt_forward, Data(self._settings.sequence, self._tokens)
        else:
            forward, data = sleeping_forward, Data(HIDDEN, first_stage_input)
        if name.startswith("megatron"):
            return MegatronSystem(trained, forward, data, self._ranks)
        return AsyncSystem(
            trained,
            forward,
            data,
            warmup_factor=2 if name == "2bw-async-factor2" else 1,
            blocking=name == "2bw-async-blocking",
        )

    def _sleeping(self, name: str) -> tuple[list[torch.nn.Module], TransformerConfig]:
        assert self.work is not None
        chunks = SYSTEMS[name].chunks
        stages = self._ranks * chunks
        config = make_config(self._ranks, chunks, num_layers=stages, hidden_size=HIDDEN, num_attention_heads=1)
        style = "v" if name.startswith("torch") else "loop"
        return [
            SleepingStage(
                config,
                self.work,
                number=number,
                stages=stages,
                chunks=chunks,
                vp_stage=chunk if chunks > 1 else None,
                weights=OVERHEAD_WEIGHTS if self._mode == "overhead" else 1,
            )
            for chunk, number in enumerate(chunk_numbers(style, self._rank, self._ranks, chunks))
        ], config

    def _gpt(self, name: str) -> tuple[list[torch.nn.Module], TransformerConfig]:
        settings = self._settings
        model_parallel_cuda_manual_seed(1)  # every system starts from the same weights
        config = make_config(
            self._ranks,
            1,
            num_layers=settings.layers * self._ranks,
            hidden_size=settings.hidden,
            num_attention_heads=settings.hidden // 64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            settings.sequence,
            pre_process=self._rank == 0,
            post_process=self._rank == self._ranks - 1,
        )
        return [model.bfloat16()], config

    def _tokens(self, samples: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randint(VOCABULARY, (samples, self._settings.sequence), generator=generator)


Forward = tuple[torch.Tensor, Callable[[torch.Tensor], Any]]


def sleeping_forward(data: Any, model: torch.nn.Module) -> Forward:
    """Megatron's user function for sleeping stages."""

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = loss_of(output)
        return value, {"loss": value.detach()}

    return model(next(data)), loss


def gpt_forward(data: Any, model: torch.nn.Module) -> Forward:
    """Megatron's user function for the GPT, which learns to repeat its input."""
    tokens = next(data)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.float().mean()
        return value, {"lm loss": value.detach()}

    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None, labels=tokens), loss
