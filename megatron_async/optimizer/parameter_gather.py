"""All-gathers the shards of a new weight version over data-parallel replicas, in the background."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.optimizer.gradients import ddp_buffers
from megatron_async.pipeline.weight_versions import Storage, WeightVersions


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Where a bucket lies in a flat buffer, and who holds a shard of it."""

    buffer: int
    start: int
    end: int
    group: dist.ProcessGroup


class ParameterGather:
    """Completes a weight version of which every data-parallel replica has written a shard (distributed optimizer).

    Args:
        model: The DDP-wrapped model, with Megatron's contiguous parameter buffers.
    """

    def __init__(self, model: Any) -> None:
        self._buckets = [
            _Bucket(number, bucket.offset, bucket.offset + bucket.param_data.numel(), buffer.data_parallel_group)
            for number, buffer in enumerate(parameter_buffers(model))
            for bucket in buffer.buckets
            if buffer.data_parallel_world_size > 1
        ]

    def start(self, versions: WeightVersions, buffers: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Start gathering a version of which this rank has written its shards.

        Args:
            versions: The weight versions.
            buffers: Of the version, as :meth:`WeightVersions.begin_write` gave them.

        Returns:
            What has to be waited for before the version may be read.
        """
        return self.start_flat(versions.flat_buffers_to_write())

    def start_flat(self, flat: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Start gathering flat buffers, laid out as the model's own."""
        works = []
        for bucket in self._buckets:
            whole = flat[bucket.buffer][bucket.start : bucket.end]
            shard = whole.view(bucket.group.size(), -1)[bucket.group.rank()]
            work = dist.all_gather_single(whole, shard, group=bucket.group, async_op=True)
            assert work is not None
            works.append(work)
        return works


def parameter_buffers(model: Any) -> list[Any]:
    """Megatron's buffers that hold parameters contiguously: those of the distributed optimizer."""
    return [buffer for buffer in ddp_buffers(model) if buffer.param_data is not None]


def make_copies(model: Any, parameters: list[torch.Tensor], count: int) -> list[Storage]:
    """Further sets of storage for the weights, laid out as the first: flat buffers where Megatron has them.

    Args:
        model: The DDP-wrapped model.
        parameters: What there are versions of.
        count: How many sets.
    """
    return [_copy(model, parameters) for _ in range(count)]


def _copy(model: Any, parameters: list[torch.Tensor]) -> Storage:
    views: dict[torch.Tensor, torch.Tensor] = {}
    flat = []
    for buffer in parameter_buffers(model):
        flat.append(buffer.param_data.clone())
        for parameter, (start, end, _) in buffer.param_index_map.items():
            views[parameter] = flat[-1][start:end].view(parameter.shape)
    return Storage([views[p] if p in views else p.data.clone() for p in parameters], flat)
