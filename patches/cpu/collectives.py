"""The collectives that NCCL takes and gloo refuses, made from those that gloo has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.patches.replacement import Replacement


class Works:
    """Several collectives in flight, waited for as one.

    Args:
        works: What the asynchronous calls returned.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        """Waits for all of them and returns True."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Returns True if none is in flight any more."""
        return all(work.is_completed() for work in self._works)


def _all_gather_uneven(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if all(slot.numel() == tensor_list[0].numel() for slot in tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        rank = dist.get_rank(group)
        if tensor_list[rank].data_ptr() != tensor.data_ptr():
            tensor_list[rank].copy_(tensor)
        # Every rank knows every size, so all of them leave the empty slots out.
        works = [
            dist.broadcast(slot, group=group, group_src=source, async_op=True)
            for source, slot in enumerate(tensor_list)
            if slot.numel()
        ]
        if async_op:
            return Works(works)
        Works(works).wait()
        return None

    return all_gather


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(group: dist.ProcessGroup | None = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    return barrier


REPLACEMENTS = (
    Replacement(
        module="torch.distributed",
        attribute="all_gather",
        replace=_all_gather_uneven,
        reason="the layer-wise distributed optimizer gathers shards of unequal size, which gloo refuses",
    ),
    Replacement(
        module="torch.distributed",
        attribute="barrier",
        replace=_barrier,
        reason="Megatron names the device of the barrier, and that is none that gloo knows",
    ),
)
