"""Gradients on their way from the accumulation buffers to a deferred step."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from megatron_async.optimizer.masters import Master


class Gradients:
    """Reduces the gradients of a batch over data-parallel replicas in the background, and keeps the result.

    The accumulation buffers are Megatron's and belong to the next batch from its first backward on. So the reduced
    gradients are copied out before: all of them, or, with the distributed optimizer, the shard that this rank updates.
    That copy is the only memory used here: 4 bytes a parameter, 4/d with the distributed optimizer over d replicas.

    Args:
        model: The DDP-wrapped model of the stage.
        finalize: Finishes what concerns the gradients within the stage: Megatron's own finalization.
        masters: The masters of the optimizer.
        tied: This stage's copy of a weight that another stage holds too.
    """

    def __init__(
        self, model: Any, finalize: Callable[[], None], masters: list[Master], tied: torch.Tensor | None = None
    ) -> None:
        self._model = model
        self._finalize = finalize
        self._masters = masters
        self._zero_grad_buffer: Callable[[], None] = model.zero_grad_buffer
        self._bucket_groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._views = self._allocate(tied)
        self.has_peers = any(buffer.data_parallel_world_size > 1 for buffer in ddp_buffers(model))
        self._configs = [group.ddp_config for group in self._bucket_groups]
        if self.has_peers:
            self._reduce_in_background()

    def _allocate(self, tied: torch.Tensor | None) -> dict[torch.nn.Parameter, torch.Tensor]:
        of_parameter = {master.parameter: master for master in self._masters}
        views: dict[torch.nn.Parameter, torch.Tensor] = {}
        for buffer in ddp_buffers(self._model):
            sharded = buffer.ddp_config.use_distributed_optimizer
            for number, bucket in enumerate(buffer.buckets):
                places = {p: (start, end) for p, (start, end, of) in buffer.param_index_map.items() if of == number}
                if not sharded and any(p not in of_parameter for p in places):
                    # Whole parameters are shared out among the replicas. A tied one is summed over stages on all of
                    # them: its owners on the two stages may be different replicas.
                    for parameter, (start, end) in places.items():
                        if parameter in of_parameter or parameter is tied:
                            source = bucket.grad_data[start - bucket.offset : end - bucket.offset]
                            views[parameter] = self._keep(source).view(parameter.shape)
                    continue
                source = bucket.grad_data
                if sharded:
                    source = source.view(buffer.data_parallel_world_size, -1)[buffer.data_parallel_group.rank()]
                kept = self._keep(source)
                for parameter in places.keys() & of_parameter.keys():
                    inside = of_parameter[parameter].in_bucket
                    if inside is not None:
                        views[parameter] = kept[slice(*inside)]
                    else:
                        start, end = (place - bucket.offset for place in places[parameter])
                        views[parameter] = kept[start:end].view(parameter.shape)
        missing = [m for m in self._masters if m.parameter not in views]
        if missing:
            raise RuntimeError(f"{len(missing)} trainable parameter(s) have no gradient buffer")
        return views

    def _keep(self, source: torch.Tensor) -> torch.Tensor:
        kept = torch.empty_like(source, dtype=torch.float32)
        self._copies.append((source, kept))
        return kept

    def _reduce_in_background(self) -> None:
        """Let Megatron's bucket groups reduce asynchronously, whatever ``--overlap-grad-reduce`` says.

        That flag adds hooks that start the reduction of a bucket inside the last backward of a batch. Without it the
        reduction starts after that backward; either way it is only waited for when the gradients are taken.
        """
        for group in self._bucket_groups:
            group.ddp_config = copy.copy(group.ddp_config)
            group.ddp_config.overlap_grad_reduce = True

    def start_reduction(self) -> None:
        """Start the reduction of what has been accumulated. Waits for nothing."""
        if not self.has_peers:
            return
        for group in self._bucket_groups:
            if group.grad_reduce_handle is None:  # else a hook has started it inside the last backward
                group.start_grad_sync()

    def is_reduced(self) -> bool:
        """Whether :meth:`take` would not wait."""
        handles = [group.grad_reduce_handle for group in self._bucket_groups]
        return all(work.is_completed() for handle in handles if handle is not None for work in handle.works)

    @torch.no_grad()
    def take(self) -> None:
        """Finish the reduction, copy the gradients out, and empty the accumulation buffers."""
        self._finalize()
        for source, kept in self._copies:
            kept.copy_(source)
        self._zero_grad_buffer()

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The gradient of a parameter as it was taken, fp32, or this rank's shard of it; None if it has none."""
        return self._views.get(parameter)

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a scalar tensor."""
        for _, kept in self._copies:
            kept.mul_(factor)

    def attach(self) -> None:
        """Let the optimizer see the gradients."""
        for master in self._masters:
            master.optimized.grad = self._views[master.parameter]

    def detach(self) -> None:
        """Take them away: a backward would accumulate into the ``grad`` of an fp32 parameter."""
        for master in self._masters:
            master.optimized.grad = None

    def close(self) -> None:
        """Give Megatron's bucket groups back as they were."""
        for group, config in zip(self._bucket_groups, self._configs, strict=True):
            group.ddp_config = config


def ddp_buffers(model: Any) -> list[Any]:
    """Megatron's contiguous buffers of a DDP-wrapped model."""
    return [*model.buffers, *model.expert_parallel_buffers]
