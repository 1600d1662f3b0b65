"""What all ranks must agree on in a step, in one small all-gather in the background."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_async.pipeline.groups import new_group_like
from megatron_async.pipeline.streams import HostCopy


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the ranks have told each other.

    Attributes:
        norm: l2 norm of all gradients, as they were when the agreement started; NaN if one of them is not finite.
        tokens: Sum of the numbers of tokens.
        requests: Union of the requests, a bit each.
    """

    norm: float
    tokens: float
    requests: int


class Agreement:
    """One all-gather of three numbers a rank: squared gradient norm, number of tokens, requests.

    With experts there are two squared norms: that of the experts, and that of everything else, which adds up over other
    ranks.

    Every rank gathers the numbers of all ranks and adds the squares with one rounding (``math.fsum``): the result does
    not depend on backend, rank order, or the number of stages a norm is split over beyond the per-stage sums. The
    numbers travel as fp64, which holds an fp32 square, a token count and a few bits exactly.

    Args:
        norm_groups: For each part of the gradients the ranks whose squares add up.
        everyone: The ranks that have to agree; each of ``norm_groups`` is a part of them or all of them.
        timeout: Timeout of the group made here; None for PyTorch's default.
    """

    def __init__(
        self, norm_groups: Sequence[dist.ProcessGroup], everyone: dist.ProcessGroup, timeout: timedelta | None = None
    ) -> None:
        # A group of its own, since a stage that waits for a tied gradient joins later than others do: on a shared
        # group that would change the order of collectives.
        self._group: dist.ProcessGroup | None = new_group_like(everyone, "agreement", timeout)
        ranks = dist.get_process_group_ranks(self._group)
        counted = [set(dist.get_process_group_ranks(group)) for group in norm_groups]
        self._counted = [[i for i, rank in enumerate(ranks) if rank in members] for members in counted]
        self._size = len(ranks)
        self._copy: HostCopy | None = None

    def start(self, squared_norm: torch.Tensor, tokens: torch.Tensor | None, requests: int) -> None:
        """Tell the other ranks. On CUDA this is called on a side stream, which then waits for their answer.

        Args:
            squared_norm: fp32, one element for each of the groups: this rank's part of the squared norm.
            tokens: Number of tokens that this rank alone counts, one element; None for 0.
            requests: Bits that this rank requests.
        """
        own = squared_norm.new_zeros(len(self._counted) + 2, dtype=torch.float64)
        own[:-2] = squared_norm
        if tokens is not None:
            own[-2:-1] = tokens
        if requests:
            own[-1] = requests
        gathered = own.new_empty(own.numel() * self._size)
        work = dist.all_gather_single(gathered, own, group=self._group, async_op=True)
        assert work is not None
        self._copy = HostCopy(work, gathered)

    def join(self) -> Agreed:
        """Wait for what the other ranks have told."""
        if self._copy is None:
            raise RuntimeError("the agreement was not started")
        *squares, tokens, requests = self._copy.join().view(self._size, -1).t().tolist()
        self._copy = None
        counted = [part[i] for part, ranks in zip(squares, self._counted, strict=True) for i in ranks]
        norm = math.fsum(counted) ** 0.5 if all(map(math.isfinite, counted)) else math.nan
        union = 0
        for bits in requests:
            union |= int(bits)
        return Agreed(norm, math.fsum(tokens), union)

    def close(self) -> None:
        """Give the process group back."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
