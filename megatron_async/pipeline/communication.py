"""Stage-to-stage messages: sends that are never waited for on the critical path, receives that are posted early.

Activations and gradients travel in two process groups of their own. The forward-only schedule of an evaluation can
therefore use Megatron's pipeline group while a prefetched activation is still on the wire, and on NCCL the two
directions of a pair of stages do not queue behind each other.

On CUDA a receive is posted on a side stream (streams.py), so that it starts when the message is there and not when the
computation queued before it ends; the computation alone waits for it. A send is issued from the compute stream, whose
result it needs; its tensor is kept until the device has sent it.
"""

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_async.pipeline.groups import new_group_like
from megatron_async.pipeline.streams import SideStream


class _Channel:
    """One direction of messages between this stage and a neighbour, in the order in which they are posted."""

    def __init__(self, group: dist.ProcessGroup, peer: int, side: SideStream) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer = peer
        self._side = side
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._receives: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        # A tensor of its own: the schedule frees the storage of an output tensor right after it is sent.
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._peer, group=self._group)
        assert work is not None
        self._sends.append((work, tensor))

    def post_receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        with self._side():
            tensor = torch.empty(shape, dtype=dtype, device=device)
            work = dist.irecv(tensor, self._peer, group=self._group)
        assert work is not None
        self._receives.append((work, tensor))

    def receive(self) -> torch.Tensor:
        if not self._receives:
            raise RuntimeError("a message is consumed whose receive was not posted: the plan is wrong")
        work, tensor = self._receives.popleft()
        work.wait()
        self._side.hand_over(tensor)
        return tensor

    def drop_oldest_send(self) -> None:
        """Drop a send that is known to have arrived. gloo does not say that it is done until it is waited for."""
        self._sends.popleft()[0].wait()

    def drop_sends(self, keep: int) -> None:
        """Drop all but the last ``keep`` sends."""
        while len(self._sends) > keep:
            self.drop_oldest_send()

    def settle(self) -> None:
        self.drop_sends(keep=0)
        for work, _ in self._receives:
            work.wait()

    def drop_receives(self) -> None:
        self._receives.clear()

    def close(self) -> None:
        self._group = None


class StageCommunicator:
    """Messages of one stage with its neighbours.

    Args:
        pp_group: The pipeline-parallel group of this rank; ranks are in stage order.
        dtype: Type of activations and gradients on the wire (``config.pipeline_dtype``).
        device: Device that tensors are received on.
        timeout: Timeout of the two new groups; None for PyTorch's default.
        unconfirmed_gradients: How many of the gradients sent last may not have arrived
            (:meth:`~megatron_async.pipeline.plan.Schedule.unconfirmed_gradients`).
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        dtype: torch.dtype | None,
        device: torch.device,
        timeout: timedelta | None = None,
        unconfirmed_gradients: int = 2,
    ) -> None:
        self.stage = pp_group.rank()
        self.stages = pp_group.size()
        self._dtype = dtype
        self._device = device
        self._side = SideStream(device)
        self._unconfirmed_gradients = unconfirmed_gradients
        self._channels: list[_Channel] = []
        self._groups: list[dist.ProcessGroup] = []
        if self.stages == 1:
            return
        if dtype is None:
            raise ValueError("config.pipeline_dtype must be set when there is more than one pipeline stage")
        ranks = dist.get_process_group_ranks(pp_group)
        for direction in ("activations", "gradients"):
            self._groups.append(new_group_like(pp_group, direction, timeout))
        forward, backward = self._groups
        if self.stage > 0:
            self._activations_in = self._channel(forward, ranks[self.stage - 1])
            self._gradients_out = self._channel(backward, ranks[self.stage - 1])
        if self.stage < self.stages - 1:
            self._activations_out = self._channel(forward, ranks[self.stage + 1])
            self._gradients_in = self._channel(backward, ranks[self.stage + 1])

    def _channel(self, group: dist.ProcessGroup, peer: int) -> _Channel:
        channel = _Channel(group, peer, self._side)
        self._channels.append(channel)
        return channel

    def post_receive_activation(self, shape: tuple[int, ...]) -> None:
        """Start receiving the next stage input, of ``shape`` (sequence, microbatch, hidden)."""
        assert self._dtype is not None
        self._activations_in.post_receive(shape, self._dtype, self._device)

    def post_receive_gradient(self, shape: tuple[int, ...]) -> None:
        """Start receiving the next output gradient, of ``shape`` (sequence, microbatch, hidden)."""
        assert self._dtype is not None
        self._gradients_in.post_receive(shape, self._dtype, self._device)

    def receive_activation(self) -> torch.Tensor:
        """Wait for the stage input posted first; it requires a gradient."""
        return self._activations_in.receive().requires_grad_()

    def receive_gradient(self) -> torch.Tensor:
        """Wait for the output gradient posted first."""
        gradient = self._gradients_in.receive()
        # It was computed from the activation that was sent first.
        self._activations_out.drop_oldest_send()
        return gradient

    def send_activation(self, tensor: torch.Tensor) -> None:
        """Start sending a stage output to the next stage."""
        self._activations_out.send(tensor)

    def send_gradient(self, tensor: torch.Tensor) -> None:
        """Start sending an input gradient to the stage before."""
        self._gradients_out.send(tensor)
        self._gradients_out.drop_sends(keep=self._unconfirmed_gradients)

    def settle(self) -> None:
        """Wait until every posted message has arrived; received ones stay ready to be consumed."""
        for channel in self._channels:
            channel.settle()

    def discard(self) -> None:
        """Wait for every posted message, then forget what was received and not consumed."""
        self.settle()
        for channel in self._channels:
            channel.drop_receives()

    def close(self) -> None:
        """Wait for what is on the wire and give the two groups back. The communicator is unusable afterwards."""
        self.discard()
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        while self._groups:
            # No reference may be left: a gloo group keeps its threads, which wake every few milliseconds.
            dist.destroy_process_group(self._groups.pop())
