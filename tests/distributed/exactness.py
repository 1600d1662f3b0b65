"""One case of the exactness test: the real pipeline, with Megatron's parts, beside the records of the oracle."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_async.optimizer.deferred_step import UpdateResult
from megatron_async.optimizer.masters import find_known_masters
from megatron_async.pipeline.runtime import AsyncPipeline
from tests.distributed.exactness_cases import Case, learning_rate
from tests.distributed.exactness_parts import Parts, build_parts, forward_step_of, synchronous_step
from tests.distributed.exactness_sabotages import SABOTAGES
from tests.models import build_stages, cross_entropy, tied_pairs
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
