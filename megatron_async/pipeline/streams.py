"""What communication needs on a CUDA device besides process groups; on CPU it does nothing.

NCCL runs every operation on a stream of its own that first waits for the stream which is current when the operation is
issued, and ``Work.wait()`` lets the current stream, not the host, wait for it. The host runs ahead of the device, so
"the current stream" is everything that was queued so far. What must not wait for that is issued on a side stream:

- a receive that is posted early. From the compute stream it would start when the computation queued before it ends;
- what follows a background reduction (the norm after the sum of a tied gradient). On the compute stream it would run
  when the host asks for it, or stop the computation until the reduction is there;
- the copy of gathered numbers to the host. ``tolist()`` on the compute stream would stop the host until everything
  queued there is done; an event on the side stream stops it for that copy alone.

Not run on a GPU yet.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist


class SideStream:
    """Calling it gives a context in which work is issued beside the computation.

    Memory allocated inside belongs to the side stream. A tensor that the computation uses must be handed over, or the
    allocator could give its memory to the side stream again while the computation still reads it. The other way round,
    the caller keeps what the side stream reads until that is done.

    Attributes:
        is_real: Whether there is a device whose streams order the work; else the host does it, in the order of calls.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_real = device.type == "cuda"
        self._device = device
        self._stream = _new_stream(device) if self.is_real else None

    def __call__(self, *, after_computation: bool = False) -> contextlib.AbstractContextManager[None]:
        """The context.

        Args:
            after_computation: Whether what is issued inside starts after what is queued on the current stream by now.
        """
        if self._stream is None:
            return contextlib.nullcontext()
        if after_computation:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return _current(self._stream)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses a tensor that was allocated inside.

        The contents are safe by another rule: the caller has waited, on the current stream, for the operation that
        writes them.
        """
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._device))


class HostCopy:
    """The result of a collective, on its way to the host. On CUDA it is made on a side stream.

    Args:
        work: The collective.
        result: The tensor that it writes; it is kept until the copy is there.
    """

    def __init__(self, work: dist.Work, result: torch.Tensor) -> None:
        self._work = work
        self._result = result
        self._event: torch.cuda.Event | None = None
        if result.device.type == "cuda":
            work.wait()  # the side stream waits, neither the host nor the computation
            self._host = torch.empty_like(result, device="cpu", pin_memory=True)
            self._host.copy_(result, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()  # type: ignore[no-untyped-call]

    def join(self) -> torch.Tensor:
        """Wait for the result. On CUDA all work that the side stream had before it is done then as well.

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
