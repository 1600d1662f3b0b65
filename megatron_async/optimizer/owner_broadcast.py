"""Sends new weights from the replica that has updated them to the others, in the background."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.pipeline.weight_versions import WeightVersions


class OwnerBroadcast:
    """Completes a weight version whose parameters belong each to one data-parallel replica.

    That is how Megatron's layer-wise distributed optimizer, of Muon and its kin, shares the work: whole matrices, since
    an orthogonalization needs all of one. Every replica broadcasts what it has. (Megatron gathers parts of unequal
    sizes, which NCCL can do and gloo cannot.)

    Memory: until the version is first read, a copy of the weights in the model's dtype.

    Args:
        optimizer: The layer-wise distributed optimizer.
        parameters: What there are versions of, in their order.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[torch.Tensor]) -> None:
        positions = {parameter: i for i, parameter in enumerate(parameters)}
        shares = ((optimizer.dp_cp, optimizer.dp_cp_params_list), (optimizer.expt_dp, optimizer.expt_dp_params_list))
        self._shares: list[tuple[dist.ProcessGroup, int, list[int]]] = []
        for group, of_ranks in shares:
            for owner, share in enumerate(of_ranks or ()):
                # A message for each type.
                for dtype in sorted({p.dtype for p in share}, key=str):
                    self._shares.append((group, owner, [positions[p] for p in share if p.dtype is dtype]))

    @torch.no_grad()
    def start(self, versions: WeightVersions, buffers: Sequence[torch.Tensor]) -> list[Any]:
        """Start to send a version of which this rank has written its parameters.

        Args:
            versions: The weight versions.
            buffers: Of the version, as :meth:`WeightVersions.begin_write` gave them.

        Returns:
            What has to be waited for before the version may be read.
        """
        return [self._send(group, owner, [buffers[i] for i in share]) for group, owner, share in self._shares]

    def _send(self, group: dist.ProcessGroup, owner: int, tensors: list[torch.Tensor]) -> "_Arrival":
        mine = group.rank() == owner
        if mine:
            flat = torch.cat([tensor.view(-1) for tensor in tensors])
        else:
            flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
        work = dist.broadcast(flat, group=group, group_src=owner, async_op=True)
        assert work is not None
        return _Arrival(work, flat, [] if mine else tensors)


class _Arrival:
    """A message that is copied to where it belongs when it is waited for."""

    def __init__(self, work: dist.Work, flat: torch.Tensor, targets: list[torch.Tensor]) -> None:
        self._work = work
        self._flat = flat
        self._targets = targets

    @torch.no_grad()
    def wait(self) -> None:
        self._work.wait()
        if self._targets:
            parts = torch.split(self._flat, [target.numel() for target in self._targets])
            torch._foreach_copy_([target.view(-1) for target in self._targets], list(parts))
