"""Process groups of our own, with the ranks of Megatron's."""

from datetime import timedelta

import torch.distributed as dist


def new_group_like(group: dist.ProcessGroup, description: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """A new group with the ranks and the backend of ``group``. Every rank of the job must call it, in the same order.

    Not through ``use_local_synchronization``: that names a group by the number of groups that a rank has, which
    differs between stages, so that their ranks would wait for each other under different names.

    Args:
        group: A group that this rank belongs to; the ranks of the job are divided into such groups.
        description: Shown in PyTorch's logs and time-outs.
        timeout: Timeout of its operations; None for PyTorch's default.
    """
    mine = tuple(dist.get_process_group_ranks(group))
    everyones: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    backend = dist.get_backend(group)
    found: dist.ProcessGroup | None = None
    for ranks in sorted({r for r in everyones if r is not None}):
        made = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=f"megatron_async {description}")
        if ranks == mine:
            found = made
    assert found is not None
    return found
