"""The delay audit: what was read and what was updated, found out from the weights themselves, against the plan."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.optimizer.deferred_step import UpdateResult
from megatron_async.pipeline.plan import Action, Op, read_version
from megatron_async.pipeline.runtime import AsyncPipeline


class AuditError(RuntimeError):
    """A forward, backward or update that is not what the plan says."""


class DelayAudit:
    """Watches a pipeline, and ends the run at the first forward, backward or update that is not as planned.

    Each time a stage has run a forward or a backward, the storage that every parameter points at tells the version that
    it has read, and a checksum over the bits of that storage tells whether it still holds what was written as that
    version. An update is counted where its version appears.

    Memory: 8 bytes a parameter tensor and version. Time: a pass over the weights and a device synchronization for each
    forward and backward. It changes no number.

    Args:
        pipeline: The pipeline, before its first step.
    """

    def __init__(self, pipeline: AsyncPipeline) -> None:
        self._pipeline = pipeline
        self._versions = pipeline.versions
        self._stage = pipeline.schedule.stage
        self._counts: Counter[str] = Counter()
        self._delays: Counter[int] = Counter()
        self._deepest = max(self._versions.delays)
        newest = self._versions.newest
        self._checksums = {
            newest - age: self._checksum(self._versions.tensors_of_age(age))
            for age in range(min(self._deepest, newest) + 1)
        }
        pipeline.executor.observer = self._observe
        pipeline.updates.on_complete.append(self._observe_update)

    def _observe(self, action: Action) -> None:
        if action.op not in (Op.FORWARD, Op.BACKWARD):
            return
        where = f"stage {self._stage}: {action.op.value} of batch {action.batch}, microbatch {action.microbatch}"
        planned = [read_version(action.batch, delay) for delay in self._versions.delays]
        if action.version != min(planned):
            raise AuditError(f"{where}: the plan says weight version {action.version}, the delay says {min(planned)}")
        found = self._versions.bound()
        for number, (version, other) in enumerate(zip(planned, found, strict=True)):
            if version != other:
                raise AuditError(f"{where} read version {other} of parameter {number}, planned is version {version}")
        expected = torch.stack([self._checksums[version][i] for i, version in enumerate(planned)])
        differing = (self._checksum([p.data for p in self._versions.parameters]) != expected).nonzero()
        if len(differing):
            number = int(differing[0])
            raise AuditError(
                f"{where}: the weights of parameter {number} are not those that were written as version "
                f"{planned[number]}"
            )
        self._counts[action.op.value] += 1
        if action.batch >= self._deepest:
            # Update k is applied to x_k: the weights that its gradient was taken at are so many updates older. The
            # first batches find no weights that are as old as they should be.
            self._delays.update({action.batch - version for version in planned})

    def _observe_update(self, result: UpdateResult) -> None:
        newest = self._versions.newest
        if newest != result.update + 1 or newest - 1 not in self._checksums:
            base = newest - 1
            raise AuditError(f"stage {self._stage}: update {result.update} was applied to weight version {base}")
        self._checksums[newest] = self._checksum(self._versions.tensors(newest))
        self._checksums.pop(newest - self._deepest - 1, None)
        self._counts["update"] += 1

    def _checksum(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """One number a tensor, int64: the sum of its elements as integers."""
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = [t.contiguous().view(integers[t.element_size()]) for t in tensors]
        return torch.stack([b.sum(dtype=torch.int64) for b in bits])

    def summary(self) -> dict[str, Any]:
        """What was checked on this stage."""
        return {"stage": self._stage, **self._counts, "delays": dict(sorted(self._delays.items()))}

    def report(self, wandb: Any = None) -> None:
        """Print what was checked on all stages, on the last rank of the job. All ranks must call it.

        Args:
            wandb: Where the figures go as a summary, on the rank that has it.
        """
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.summary())
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        stages = {entry["stage"]: entry for entry in found}
        print("> megatron_async: delay audit passed: what was read and updated is what was planned", flush=True)
        for stage, entry in sorted(stages.items()):
            delays = ", ".join(str(delay) for delay in entry["delays"])
            print(
                f">   stage {stage}: {entry.get('forward', 0)} forwards, {entry.get('backward', 0)} backwards, "
                f"{entry.get('update', 0)} updates; delays in updates: {delays}",
                flush=True,
            )
        if wandb is not None:
            for stage, entry in stages.items():
                for name, value in entry.items():
                    if name != "stage":
                        wandb.run.summary[f"delay audit/stage {stage}/{name}"] = str(value)
