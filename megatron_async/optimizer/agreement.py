"""What all ranks must agree on in a step, in one small all-gather in the background."""

import math
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

    Every rank gathers the numbers of all ranks and adds the squares with one rounding (``math.fsum``): the result does
    not depend on backend, rank order, or the number of stages a norm is split over beyond the per-stage sums. The
    numbers travel as fp64, which holds an fp32 square, a token count and a few bits exactly.

    Args:
        norm_group: The ranks whose squares add up to the norm.
        everyone: The ranks that have to agree; ``norm_group`` is a part of it or all of it.
        timeout: Timeout of the group made here; None for PyTorch's default.
    """

    def __init__(
        self, norm_group: dist.ProcessGroup, everyone: dist.ProcessGroup, timeout: timedelta | None = None
    ) -> None:
        # A group of its own, since a stage that waits for a tied gradient joins later than others do: on a shared
        # group that would change the order of collectives.
        self._group: dist.ProcessGroup | None = new_group_like(everyone, "agreement", timeout)
        ranks = dist.get_process_group_ranks(self._group)
        counted = set(dist.get_process_group_ranks(norm_group))
        self._counted = [position for position, rank in enumerate(ranks) if rank in counted]
        self._size = len(ranks)
        self._copy: HostCopy | None = None

    def start(self, squared_norm: torch.Tensor, tokens: torch.Tensor | None, requests: int) -> None:
        """Tell the other ranks. On CUDA this is called on a side stream, which then waits for their answer.

        Args:
            squared_norm: fp32, one element: this rank's part of the squared norm.
            tokens: Number of tokens that this rank alone counts, one element; None for 0.
            requests: Bits that this rank requests.
        """
        own = squared_norm.new_zeros(3, dtype=torch.float64)
        own[:1] = squared_norm
        if tokens is not None:
            own[1:2] = tokens
        if requests:
            own[2] = requests
        gathered = own.new_empty(3 * self._size)
        work = dist.all_gather_single(gathered, own, group=self._group, async_op=True)
        assert work is not None
        self._copy = HostCopy(work, gathered)

    def join(self) -> Agreed:
        """Wait for what the other ranks have told."""
        if self._copy is None:
            raise RuntimeError("the agreement was not started")
        squares, tokens, requests = self._copy.join().view(self._size, 3).t().tolist()
        self._copy = None
        counted = [squares[i] for i in self._counted]
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
