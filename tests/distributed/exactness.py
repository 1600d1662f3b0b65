"""One case of the exactness test: the real pipeline, with Megatron's parts, beside the records of the oracle."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

from megatron_async.optimizer.deferred_step import UpdateResult
from megatron_async.optimizer.delay_compensation import compensate_delay_
from megatron_async.optimizer.masters import find_known_masters
from megatron_async.pipeline.runtime import AsyncPipeline, PipelineOptions
from tests.distributed.exactness_cases import Case, learning_rate
from tests.models import Stage, build_stages, cross_entropy, tied_pairs
from tests.oracle import Oracle, OracleConfig, Record


def oracle_records(case: Case) -> list[Record]:
    """The records of all updates."""
    config = OracleConfig(
        schedule=case.schedule,  # type: ignore[arg-type]
        ef_coefficient=case.ef,
        delay_compensation=case.compensation,
        weight_prediction=case.prediction,
        lr_discount_iters=case.discount,
        sync_start=case.sync_start,
        sync_cooldown=case.sync_cooldown,
        batches=case.updates,
        lr=lambda batch: learning_rate(case.optimizer, batch),
        dtype=getattr(torch, case.dtype),
        replicas=case.replicas,
        per_token=case.per_token,
        fault=case.fault,  # type: ignore[arg-type]
        **case.optimizer_settings,
    )
    oracle = Oracle(
        build_stages(case.spec, case.oracle_stages),
        cross_entropy,
        config,
        tied=tied_pairs(case.spec, case.oracle_stages),
        # One rounding, as the pipeline adds the stages' norms; Megatron's all-reduce leaves the order to the backend.
        sum_across_stages=lambda squares: torch.tensor(math.fsum(s.item() for s in squares), dtype=torch.float64),
    )
    count = case.microbatches * case.replicas
    records = [oracle.step([case.microbatch(k, i) for i in range(count)]) for k in range(case.updates)]
    return [merged(record) for record in records] if case.simulated > 1 else records


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


Labelled = list[tuple[str, torch.Tensor]]


def pack(tensors: Labelled) -> torch.Tensor:
    """The bytes of all tensors, one after the other."""
    return torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for _, t in tensors])


def layout(tensors: Labelled) -> list[tuple[str, int]]:
    """Label and number of bytes of each tensor."""
    return [(label, t.numel() * t.element_size()) for label, t in tensors]


def zero_unless(counts: bool, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if counts else torch.zeros_like(tensor)


def merged(record: Record) -> Record:
    """The record of all stages as that of a single one, which simulates them."""

    def merge(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for stage in stages for name, value in stage.items()}]

    return replace(
        record,
        **{field: merge(getattr(record, field)) for field in ("gradients", "newest", "read_next", "masters")},
        optimizer_state=merge(record.optimizer_state),
    )


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
            (f"{name} read next", record.read_next[stage][name]),
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

    def read(self, update: int, label: str, dtype: torch.dtype) -> torch.Tensor:
        """One of the oracle's tensors, flat."""
        start = 0
        for found, size in self.layouts[update]:
            if found == label:
                return self.data[update][start : start + size].clone().view(dtype)
            start += size
        raise KeyError(label)

    def differences(self, update: int, found: Labelled) -> list[str]:
        """Labels of what differs from the oracle in any byte."""
        if layout(found) == self.layouts[update]:
            ours, oracles = pack(found), self.data[update]
            if torch.equal(ours, oracles):
                return []
            sizes = [size for _, size in self.layouts[update]]
            pairs = zip(self.layouts[update], ours.split(sizes), oracles.split(sizes), strict=True)
            return [label for (label, _), mine, other in pairs if not torch.equal(mine, other)]
        return ["what there is to compare"]


class Comparison:
    """Compares every update of the pipeline with the oracle's, byte for byte."""

    def __init__(self, case: Case, parts: Parts, records: StageRecords) -> None:
        self.case = case
        self.parts = parts
        self.records = records
        self.differences: list[str] = []
        self.compared = 0
        self.parameters = sorted(parts.model.module.stage.named_parameters(), key=lambda entry: entry[0])
        self.losses: dict[int, torch.Tensor] = {}
        self.pipeline: AsyncPipeline | None = None

    def watch(self, pipeline: AsyncPipeline) -> None:
        """Compare the updates of a pipeline from here on."""
        self.pipeline = pipeline
        self.masters = {id(m.parameter): m for m in pipeline.updates.masters}
        self.positions = {id(p): i for i, p in enumerate(pipeline.versions.parameters)}
        pipeline.updates.on_complete.append(self)

    def synchronous(self, update: int, norm: float) -> None:
        """Compare an update that Megatron has made itself. Its gradients are scaled and its loss is as ever."""
        self.masters = {id(m.parameter): m for m in find_known_masters(self.parts.optimizer)}
        result = UpdateResult(update, norm, skipped=False)
        found: Labelled = [("norm", self._norm(result)), ("losses", self._losses(update, counts=True))]
        for name, parameter in self.parameters:
            _, master, state = self._optimizer_side(update, name, parameter)
            gradient = self.records.read(update, f"{name} gradient", torch.float32)
            found += [(f"{name} gradient", gradient), (f"{name} newest", parameter.data)]
            found += [(f"{name} read next", parameter.data), (f"{name} master", master)]
            found += [(f"{name} {key}", state[key]) for key in sorted(state)]
        self._compare(update, found)

    def __call__(self, result: UpdateResult) -> None:
        assert self.pipeline is not None
        # The pipeline counts from its own start.
        result = replace(result, update=result.update + self.case.sync_start)
        update, counts = result.update, not result.skipped
        versions = self.pipeline.versions
        newest, read_next = versions.tensors(versions.newest), versions.tensors_read(versions.newest)
        if self.case.is_synchronous(update + 1) and update + 1 < self.case.updates:
            read_next = newest
        found: Labelled = [("norm", self._norm(result)), ("losses", self._losses(update, counts))]
        for name, parameter in self.parameters:
            i = self.positions[id(parameter)]
            gradient, master, state = self._optimizer_side(update, name, parameter)
            found += [
                (f"{name} gradient", zero_unless(counts, gradient)),
                (f"{name} newest", newest[i]),
                (f"{name} read next", read_next[i]),
                (f"{name} master", master),
            ]
            found += [(f"{name} {key}", state[key]) for key in sorted(state)]
        self._compare(update, found)

    def _compare(self, update: int, found: Labelled) -> None:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.differences += [f"update {update}, stage {stage}: {d}" for d in self.records.differences(update, found)]
        self.compared += 1

    def _norm(self, result: Any) -> torch.Tensor:
        norm = zero_unless(not result.skipped, torch.tensor(result.grad_norm, dtype=torch.float64))
        oracles = self.records.read(result.update, "norm", torch.float64)
        if not self.case.norm_is_exact and torch.allclose(norm, oracles, rtol=1e-6, atol=0.0):
            return oracles
        return norm

    def _losses(self, update: int, counts: bool) -> torch.Tensor:
        """All losses of the batch; those of other ranks are the oracle's."""
        losses = self.records.read(update, "losses", torch.float32)
        own = self.losses.pop(update, None)
        if own is not None:
            first = self.case.microbatches * own_replica(self.case)
            losses[first : first + self.case.microbatches] = own
        return zero_unless(counts, losses)

    def _optimizer_side(
        self, update: int, name: str, parameter: torch.nn.Parameter
    ) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
        """Gradient, master and optimizer state; what other ranks hold of a sharded one is the oracle's."""
        master = self.masters.get(id(parameter))
        gradient = None if self.pipeline is None else self.pipeline.updates.gradients.of(parameter)
        if master is not None and master.shard is None:
            return gradient, master.weight, self._state(master.optimized)

        def whole(key: str, own: torch.Tensor | None) -> torch.Tensor:
            values = self.records.read(update, f"{name} {key}", torch.float32)
            if own is not None and own.dim() == 0:
                return own
            if own is not None:
                assert master is not None
                master.part_of(values).copy_(own)
            return values

        state = {} if master is None else self._state(master.optimized)
        keys = [label.removeprefix(f"{name} ") for label, _ in self.records.layouts[update]]
        keys = [key for key in keys if key in ("exp_avg", "exp_avg_sq", "step")]
        weight = None if master is None else master.weight
        return whole("gradient", gradient), whole("master", weight), {key: whole(key, state.get(key)) for key in keys}

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        for base in self.parts.optimizer.chained_optimizers:
            if parameter in base.optimizer.state:
                return {k: v for k, v in base.optimizer.state[parameter].items() if isinstance(v, torch.Tensor)}
        return {}

    def remember(self, batch: int, losses: list[dict[str, torch.Tensor]]) -> None:
        if losses:
            self.losses[batch] = torch.stack([entry["loss"].float() for entry in losses])


def own_replica(case: Case) -> int:
    """Which replica's data this rank trains on."""
    return int(parallel_state.get_data_parallel_rank()) if case.replicas > 1 else 0


def live_bytes() -> int:
    """Bytes of all tensors that are alive in this process, each storage once."""
    while gc.collect():  # what a cycle held may itself be in a cycle
        pass
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_of_the_table(pipeline: AsyncPipeline) -> int:
    """What the contract allows on this rank, in bytes: its memory table, with Megatron's padding."""
    elements = sum(buffer.numel for buffer in pipeline.model.buffers)
    masters = pipeline.updates.masters
    own = sum(m.weight.numel() for m in masters)
    weight = pipeline.versions.parameters[0].element_size()
    waiting = sum(kept.numel() for _, kept in pipeline.updates.gradients._copies)
    replicas = pipeline.model.buffers[0].data_parallel_world_size if masters[0].shard is not None else 1
    assert waiting == elements // replicas
    state = sum(
        value.numel() * value.element_size()
        for base in pipeline.updates.optimizer.chained_optimizers
        for values in base.optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    optimizer = pipeline.updates.optimizer.config.optimizer
    if optimizer != "soap":  # which keeps four square matrices a parameter as well
        moments = {"adan": 4, "mars": 3}.get(optimizer, 2)
        assert state <= 4 * moments * own + 4 * len(masters)  # Adam's step counters
    return 2 * weight * elements + 4 * elements + 4 * own + state + 4 * waiting


@dataclass(frozen=True)
class Finding:
    """What a case found on one rank: differences from the oracle, and bytes of tensors that live between two steps."""

    case: Case
    compared: int
    differences: list[str]
    persistent: int
    table: int


def run_case(case: Case, records: StageRecords) -> Finding:
    """Train all batches of the case."""
    finding, alive = train(case, records)
    return replace(finding, persistent=alive - live_bytes()) if case.counts_bytes else finding


def train(case: Case, records: StageRecords) -> tuple[Finding, int]:
    """Train all batches of the case; the second value is the bytes of all tensors that are alive at the end."""
    parts = build_parts(case)
    comparison = Comparison(case, parts, records)
    pipeline: AsyncPipeline | None = None
    first = case.microbatches * own_replica(case)
    data = (case.microbatch(k, first + i) for k in range(case.updates) for i in range(case.microbatches))
    for k in range(case.updates):
        parts.model.zero_grad_buffer()
        if case.is_synchronous(k):
            if pipeline is not None:
                pipeline.hand_back()
                pipeline = comparison.pipeline = None
            losses, norm = synchronous_step(case, parts, data)
            comparison.remember(k, losses)
            comparison.synchronous(k, norm)
            set_learning_rate(case, parts, k + 1)
            continue
        if pipeline is None:
            pipeline = parts.pipeline(case)
            comparison.watch(pipeline)
            SABOTAGES[case.sabotage](pipeline)
        drains = k + 1 == case.updates or case.is_synchronous(k + 1)
        losses = pipeline.forward_backward(
            forward_step_func=forward_step_of(case),
            data_iterator=data,
            num_microbatches=case.microbatches,
            next_num_microbatches=None if drains else case.microbatches,
            seq_length=case.spec.sequence,
            micro_batch_size=case.spec.micro_batch,
        )
        comparison.remember(k, losses)
        pipeline.step()
        set_learning_rate(case, parts, k + 1)
        if case.complete_early and k % 3 == 0:
            pipeline.bind_newest()
    table = 0
    if pipeline is not None:
        pipeline.complete()
        # Closed first: the threads of a process group hold the tensors of its last operation for a moment longer.
        pipeline.close()
        table = bytes_of_the_table(pipeline)
    finding = Finding(case, comparison.compared, comparison.differences, 0, table)
    parts.model.module.input_tensor = None  # the last activation: Megatron's models keep it until the next
    return finding, live_bytes() if case.counts_bytes else 0


def set_learning_rate(case: Case, parts: Parts, batch: int) -> None:
    """As Megatron's scheduler does: the rate of the next batch, before the deferred step has run."""
    for group in parts.optimizer.param_groups:
        group["lr"] = learning_rate(case.optimizer, batch)


def _no_rebinding(pipeline: AsyncPipeline) -> None:
    """Backwards run on whatever version is bound."""
    executor, bind = pipeline.executor, pipeline.versions.bind
    original = executor._handlers

    def backward(action: Any) -> None:
        pipeline.versions.bind = lambda batch: None  # type: ignore[method-assign]
        executor._backward(action)
        pipeline.versions.bind = bind  # type: ignore[method-assign]

    executor._handlers = {op: backward if op.value == "backward" else f for op, f in original.items()}


def _write_into_live_buffer(pipeline: AsyncPipeline) -> None:
    """The new version also lands in the buffer that the graphs in flight read."""
    versions = pipeline.versions
    end_write = versions.end_write

    def overwrite(version: int, arriving: Any = ()) -> None:
        written = versions.tensors(version - 2)  # its buffer, which holds the new version by now
        for target, source in zip(versions.tensors(version - 1), written, strict=True):
            target.copy_(source)
        end_write(version, arriving)

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
    pipeline.versions.bind = lambda batch: pipeline.versions.bind_newest()  # type: ignore[method-assign]


def _not_reduced(pipeline: AsyncPipeline) -> None:
    """The copy is made of what this replica alone has accumulated."""
    gradients = pipeline.updates.gradients
    take = gradients.take

    def too_early() -> None:
        local = [source * 0.5 for source, _ in gradients._copies]
        take()
        for (_, kept), source in zip(gradients._copies, local, strict=True):
            kept.copy_(source)

    gradients.start_reduction = lambda: None  # type: ignore[method-assign]
    gradients.is_reduced = lambda: True  # type: ignore[method-assign]
    gradients.take = too_early  # type: ignore[method-assign]


def _not_gathered(pipeline: AsyncPipeline) -> None:
    """Every replica computes with the shard that it has stepped and with old weights elsewhere."""
    assert pipeline.updates._parameter_gather is not None
    pipeline.updates._parameter_gather.start = lambda flat: []  # type: ignore[method-assign]


def _a_token_too_many(pipeline: AsyncPipeline) -> None:
    """The last stage counts one token that is not there."""
    begin = pipeline.updates.begin

    def miscounted(*, per_token: bool, tokens: torch.Tensor | None) -> None:
        begin(per_token=per_token, tokens=None if tokens is None else tokens + 1)

    pipeline.updates.begin = miscounted  # type: ignore[method-assign]


def _compensated_too_early(pipeline: AsyncPipeline) -> None:
    """The gradient of the tied weight is corrected as long as it is only this stage's part."""
    updates = pipeline.updates
    find = updates._find_uncompensated

    def at_once() -> None:
        find()
        for gradient, newest, read in updates._uncompensated:
            compensate_delay_(gradient, newest, read, updates.delay_compensation)
        updates._uncompensated.clear()

    updates._find_uncompensated = at_once  # type: ignore[method-assign]


def _hand_back_x(pipeline: AsyncPipeline) -> None:
    """The synchronous phase begins with the corrected weights."""
    pipeline._make_plain_iterate = lambda: pipeline.versions.tensors(pipeline.versions.newest)  # type: ignore[method-assign]


def _no_discount(pipeline: AsyncPipeline) -> None:
    """Every stage steps with the whole learning rate."""
    pipeline.updates._lr_discount_iters = 0


SABOTAGES: dict[str | None, Callable[[AsyncPipeline], None]] = {
    None: lambda pipeline: None,
    "no rebinding before the backward": _no_rebinding,
    "written into a live buffer": _write_into_live_buffer,
    "learning rate of the next batch": _current_learning_rate,
    "error feedback drops u_0": _first_update_without_feedback,
    "newest weights": _one_version_too_new,
    "gradients taken before they are reduced": _not_reduced,
    "shards are not gathered": _not_gathered,
    "a token too many": _a_token_too_many,
    "compensated before the tied sum": _compensated_too_early,
    "hands back x": _hand_back_x,
    "no discount": _no_discount,
}
