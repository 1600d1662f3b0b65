"""What communication needs on a CUDA device besides process groups; on CPU it does nothing.

NCCL runs every operation on a stream of its own that first waits for the stream which is current when the operation is
issued, and ``Work.wait()`` lets the current stream, not the host, wait for it. The host runs ahead of the device, so
"the current stream" is everything that was queued so far, and two things would be too late:

- a receive posted from the compute stream would start when the computation queued before it ends. Its buffer is
  therefore allocated, and it is posted, on a side stream that has nothing queued;
- the gathered gradient norm, read by ``tolist()`` on the compute stream, would stop the host until everything queued
  there is done. It is copied to pinned memory on a side stream instead, and the host waits for that copy alone.

Not run on a GPU yet.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist


class SideStream:
    """Calling it gives a context in which work is issued beside the computation.

    Memory allocated inside belongs to the side stream. A tensor that the computation uses must be handed over, or the
    allocator could give its memory to the side stream again while the computation still reads it.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = _new_stream(device) if device.type == "cuda" else None

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """The context."""
        return contextlib.nullcontext() if self._stream is None else _current(self._stream)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses a tensor that was allocated inside.

        The contents are safe by another rule: the caller has waited, on the current stream, for the operation that
        writes them.
        """
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class HostCopy:
    """The result of a collective, on its way to the host.

    Args:
        work: The collective.
        result: The tensor that it writes; it is kept until the copy is there.
    """

    def __init__(self, work: dist.Work, result: torch.Tensor) -> None:
        self._work = work
        self._result = result
        self._event: torch.cuda.Event | None = None
        if result.device.type == "cuda":
            with _current(_host_copy_stream(result.device)):
                work.wait()  # the side stream waits, neither the host nor the computation
                self._host = torch.empty_like(result, device="cpu", pin_memory=True)
                self._host.copy_(result, non_blocking=True)
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()  # type: ignore[no-untyped-call]

    def join(self) -> torch.Tensor:
        """Wait for the result.

        Returns:
            A CPU tensor of the shape and dtype of ``result``.
        """
        if self._event is None:
            self._work.wait()
            return self._result
        self._event.synchronize()
        return self._host


@contextlib.contextmanager
def _current(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.stream(stream):  # type: ignore[no-untyped-call]
        yield


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_host_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


def _host_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a device, made at first use."""
    if device not in _host_copy_streams:
        _host_copy_streams[device] = _new_stream(device)
    return _host_copy_streams[device]
