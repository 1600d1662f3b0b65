"""One case of the exactness test: the real pipeline, with Megatron's parts, beside the records of the oracle."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig

from megatron_async.pipeline.runtime import AsyncPipeline, PipelineOptions
from tests.distributed.exactness_cases import Case, learning_rate
from tests.models import Stage, build_stages, cross_entropy, tied_pairs
from tests.oracle import Oracle, OracleConfig, Record


def oracle_records(case: Case) -> list[Record]:
    """The records of all updates."""
    config = OracleConfig(
        schedule="2bw-async",
        ef_coefficient=case.ef,
        lr=lambda batch: learning_rate(case.optimizer, batch),
        dtype=getattr(torch, case.dtype),
        fault=case.fault,  # type: ignore[arg-type]
        **case.optimizer_settings,
    )
    oracle = Oracle(
        build_stages(case.spec, case.stages),
        cross_entropy,
        config,
        tied=tied_pairs(case.spec, case.stages),
        # One rounding, as the pipeline adds the stages' norms; Megatron's all-reduce leaves the order to the backend.
        sum_across_stages=lambda squares: torch.tensor(math.fsum(s.item() for s in squares), dtype=torch.float64),
    )
    return [oracle.step([case.microbatch(k, i) for i in range(case.microbatches)]) for k in range(case.updates)]


class PipelineStage(MegatronModule):
    """A plain stage behind the protocol that Megatron's schedules expect of a model."""

    def __init__(self, config: TransformerConfig, stage: Stage) -> None:
        super().__init__(config)
        self.stage = stage
        self.pre_process, self.post_process = stage.pre_process, stage.post_process
        self.share_embeddings_and_output_weights = stage.share_embeddings_and_output_weights
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        (self.input_tensor,) = tensors

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        return self.stage.shared_embedding_or_output_weight()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.stage(tokens if self.pre_process else self.input_tensor)


def build_pipeline(case: Case) -> tuple[AsyncPipeline, Any]:
    """The pipeline of this rank and its Megatron optimizer; the model-parallel groups must be initialized."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    dtype = getattr(torch, case.dtype)
    config = TransformerConfig(
        num_layers=case.stages,
        hidden_size=case.spec.hidden,
        num_attention_heads=2,
        pipeline_model_parallel_size=case.stages,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    stage = build_stages(case.spec, case.stages)[rank].to(dtype)
    stage.mark_parameters()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if not case.data_parallel:
        # The other replicas of this pipeline run other cases: to this one it is alone, like a rank without TP.
        groups.dp = groups.dp_cp = groups.expt_dp = groups.tp
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        PipelineStage(config, stage),
        pg_collection=groups,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=learning_rate(case.optimizer, 0),
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            **case.optimizer_settings,
        ),
        [model],
    )
    for group in optimizer.param_groups:
        group["weight_decay"] *= group.get("wd_mult", 1.0)  # as Megatron's scheduler does
    options = PipelineOptions(warmup_factor=case.warmup_factor, ef_coefficient=case.ef)
    return AsyncPipeline(model=model, optimizer=optimizer, pg_collection=groups, options=options), optimizer


def loss_function(targets: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = cross_entropy(logits, targets)
    return loss, {"loss": loss.detach().clone()}


def forward_step(data: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    tokens, targets = next(data)
    return model(tokens), functools.partial(loss_function, targets)


Labelled = list[tuple[str, torch.Tensor]]


def pack(tensors: Labelled) -> torch.Tensor:
    """The bytes of all tensors, one after the other."""
    return torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for _, t in tensors])


def layout(tensors: Labelled) -> list[tuple[str, int]]:
    """Label and number of bytes of each tensor."""
    return [(label, t.numel() * t.element_size()) for label, t in tensors]


def zero_unless(counts: bool, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if counts else torch.zeros_like(tensor)


def expected(record: Record, stage: int) -> Labelled:
    """What the oracle says of one stage after an update, in a fixed order."""
    # What is not a number has many bit patterns: of a skipped update the norm, losses and gradients are left out.
    counts = not record.skipped
    norm = torch.tensor(record.norm, dtype=torch.float64)
    found: Labelled = [("norm", zero_unless(counts, norm)), ("losses", zero_unless(counts, record.losses))]
    for name in sorted(record.masters[stage]):
        gradient = record.gradients[stage][name]
        if record.clip_coefficient < 1.0:
            gradient = gradient * record.clip_coefficient
        found += [
            (f"{name} gradient", zero_unless(counts, gradient)),
            (f"{name} newest", record.newest[stage][name]),
            (f"{name} older", record.older[stage][name]),
            (f"{name} master", record.masters[stage][name]),
        ]
        state = record.optimizer_state[stage][name]
        found += [(f"{name} {key}", state[key]) for key in sorted(state)]
    return found


@dataclass
class StageRecords:
    """The oracle's records of one stage: the bytes of each update, and where what is."""

    data: list[torch.Tensor]
    layouts: list[list[tuple[str, int]]]

    @classmethod
    def of(cls, records: list[Record], stage: int) -> StageRecords:
        labelled = [expected(record, stage) for record in records]
        return cls([pack(tensors) for tensors in labelled], [layout(tensors) for tensors in labelled])

    def losses(self, update: int) -> torch.Tensor:
        (_, norm), (_, losses), *_ = self.layouts[update]
        return self.data[update][norm : norm + losses]

    def differences(self, update: int, found: Labelled) -> list[str]:
        """Labels of what differs from the oracle in any byte."""
        if layout(found) != self.layouts[update]:
            return ["what there is to compare"]
        ours, oracles = pack(found), self.data[update]
        if torch.equal(ours, oracles):
            return []
        sizes = [size for _, size in self.layouts[update]]
        pairs = zip(self.layouts[update], ours.split(sizes), oracles.split(sizes), strict=True)
        return [label for (label, _), mine, other in pairs if not torch.equal(mine, other)]


class Comparison:
    """Compares every update of the pipeline with the oracle's, byte for byte."""

    def __init__(self, pipeline: AsyncPipeline, records: StageRecords) -> None:
        self.pipeline = pipeline
        self.records = records
        self.differences: list[str] = []
        self.compared = 0
        names = {id(p): n for n, p in pipeline.model.module.stage.named_parameters()}
        masters = pipeline.updates.masters
        self.order = sorted(range(len(masters)), key=lambda i: names[id(masters[i].parameter)])
        self.names = [names[id(m.parameter)] for m in masters]
        self.losses: dict[int, torch.Tensor] = {}

    def __call__(self, result: Any) -> None:
        update = result.update
        updates, versions = self.pipeline.updates, self.pipeline.versions
        # Only the last stage has losses; the others stand in with the oracle's.
        losses = self.losses.pop(update, None)
        if losses is None:
            losses = self.records.losses(update)
        counts = not result.skipped
        norm = torch.tensor(result.grad_norm, dtype=torch.float64)
        found: Labelled = [("norm", zero_unless(counts, norm)), ("losses", zero_unless(counts, losses))]
        for i in self.order:
            name, master = self.names[i], updates.masters[i]
            found += [
                (f"{name} gradient", zero_unless(counts, updates._gradients.of(master.parameter))),
                (f"{name} newest", versions.tensors(update + 1)[i]),
                (f"{name} older", versions.tensors(update)[i]),
                (f"{name} master", master.weight),
            ]
            state = self._state(master.optimized)
            found += [(f"{name} {key}", state[key]) for key in sorted(state)]
        stage = self.pipeline.schedule.stage
        self.differences += [f"update {update}, stage {stage}: {d}" for d in self.records.differences(update, found)]
        self.compared += 1

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        for base in self.pipeline.updates.optimizer.chained_optimizers:
            if parameter in base.optimizer.state:
                return {k: v for k, v in base.optimizer.state[parameter].items() if isinstance(v, torch.Tensor)}
        return {}

    def remember(self, batch: int, losses: list[dict[str, torch.Tensor]]) -> None:
        if self.pipeline.schedule.is_last:
            self.losses[batch] = torch.stack([entry["loss"].float() for entry in losses])


def live_bytes() -> int:
    """Bytes of all tensors that are alive in this process, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def run_case(case: Case, records: StageRecords) -> tuple[list[str], int, int]:
    """Train all batches of the case.

    Returns:
        The differences on this rank, the number of updates compared, and the bytes of all tensors that live between
        two steps because of this case.
    """
    before = live_bytes() if case.counts_bytes else 0
    pipeline, optimizer = build_pipeline(case)
    comparison = Comparison(pipeline, records)
    pipeline.updates.on_complete.append(comparison)
    data = (case.microbatch(k, i) for k in range(case.updates) for i in range(case.microbatches))
    SABOTAGES[case.sabotage](pipeline)
    for k in range(case.updates):
        for chunk in pipeline.model.buffers:
            chunk.reset()
        losses = pipeline.forward_backward(
            forward_step_func=forward_step,
            data_iterator=data,
            num_microbatches=case.microbatches,
            next_num_microbatches=case.microbatches if k + 1 < case.updates else None,
            seq_length=case.spec.sequence,
            micro_batch_size=case.spec.micro_batch,
        )
        comparison.remember(k, losses)
        pipeline.step()
        # As Megatron's scheduler does: the rate of the next batch, before the deferred step has run.
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case.optimizer, k + 1)
        if case.complete_early and k % 3 == 0:
            pipeline.bind_newest()
    pipeline.complete()
    persistent = live_bytes() - before if case.counts_bytes else 0
    pipeline.close()
    return comparison.differences, comparison.compared, persistent


def _no_rebinding(pipeline: AsyncPipeline) -> None:
    """Backwards run on whatever version is bound."""
    executor, bind = pipeline.executor, pipeline.versions.bind
    original = executor._handlers

    def backward(action: Any) -> None:
        pipeline.versions.bind = lambda version: None  # type: ignore[method-assign]
        executor._backward(action)
        pipeline.versions.bind = bind  # type: ignore[method-assign]

    executor._handlers = {op: backward if op.value == "backward" else f for op, f in original.items()}


def _write_into_live_buffer(pipeline: AsyncPipeline) -> None:
    """The new version also lands in the buffer that the graphs in flight read."""
    versions = pipeline.versions
    end_write = versions.end_write

    def overwrite(version: int) -> None:
        for target, source in zip(versions.tensors(version - 1), versions.tensors(version - 2), strict=True):
            target.copy_(source)
        end_write(version)

    versions.end_write = overwrite  # type: ignore[method-assign]


def _current_learning_rate(pipeline: AsyncPipeline) -> None:
    """The deferred step takes the rate that the scheduler has moved on to."""
    pipeline.updates._exchange_schedule = lambda values: values  # type: ignore[method-assign]


def _first_update_without_feedback(pipeline: AsyncPipeline) -> None:
    """The first update is left uncorrected, and no later one makes up for it."""
    updates = pipeline.updates
    coefficient, step = updates.ef_coefficient, updates._step

    def first_differs(norm: float) -> None:
        updates.ef_coefficient = coefficient if updates.pending else 0.0
        step(norm)

    updates._step = first_differs  # type: ignore[method-assign]


def _one_version_too_new(pipeline: AsyncPipeline) -> None:
    """Every batch reads the newest weights there are, in forward and backward."""
    pipeline.schedule.version_read = lambda batch: pipeline.versions.newest  # type: ignore[method-assign]


SABOTAGES: dict[str | None, Callable[[AsyncPipeline], None]] = {
    None: lambda pipeline: None,
    "no rebinding before the backward": _no_rebinding,
    "written into a live buffer": _write_into_live_buffer,
    "learning rate of the next batch": _current_learning_rate,
    "error feedback drops u_0": _first_update_without_feedback,
    "newest weights": _one_version_too_new,
}
