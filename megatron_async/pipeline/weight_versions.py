"""The weight-stashing policy: which version of the weights is bound to the model, and who may write one.

Two buffers hold the versions x_{k-1} and x_k. A parameter is *bound* to one of them by pointing ``param.data`` at it.
Autograd does not make that safe by itself, and the two ways an operator can remember a weight differ: one that saves
the *leaf* (Megatron's own linear layers) sees whatever the parameter is bound to when its backward runs, one that saves
a *view* (``F.linear`` on CPU keeps ``weight.t()``) keeps the old storage. Hence the two rules of this module: bind the
version of the forward again before its backward, and never write a buffer that a live graph reads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_async.observe.trace import NO_TRACE, Trace


@dataclass(slots=True)
class _Version:
    """Storage of one version.

    Attributes:
        tensors: One a parameter.
        flat: The contiguous buffers that they are views of, where Megatron has such.
        readers: Live graphs that read it.
        arriving: What is still being gathered into it.
    """

    tensors: list[torch.Tensor]
    flat: list[torch.Tensor]
    readers: int = 0
    arriving: Sequence[dist.Work] = field(default_factory=tuple)


class WeightVersions:
    """Two versions of the weights of one stage, exactly.

    Every parameter has two buffers of its own dtype and shape. The first is the storage that the parameter had when
    this object was made, so that nothing that was loaded or initialized moves.

    Attributes:
        newest: Number of the newest version, v.
        bound: Number of the version that the parameters point at, v or v-1.

    Args:
        parameters: The trainable parameters of the stage, each once. Their current values become version ``newest``
            and, as a copy, version ``newest - 1``.
        newest: Number of the version that the parameters hold now.
        second: Storage of the copy, one tensor a parameter that holds its values; None to allocate it.
        flat: The contiguous buffers that the parameters are views of, and those of ``second``; none by default.
        trace: Where the time goes that a version is waited for.

    Raises:
        ValueError: If a parameter appears twice.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        newest: int = 0,
        *,
        second: list[torch.Tensor] | None = None,
        flat: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], []),
        trace: Trace = NO_TRACE,
    ) -> None:
        self.parameters = list(parameters)
        if len({id(p) for p in self.parameters}) != len(self.parameters):
            raise ValueError("a parameter appears twice: tied weights must be given once")
        # `.data` and not `.detach()`: writes to a buffer must not count as in-place changes of the parameter, whose
        # version counter autograd compares. This module's own bookkeeping takes the place of that check.
        current = [p.data for p in self.parameters]
        if second is None:
            second = [t.clone() for t in current]
        self._versions = {newest: _Version(current, flat[0]), newest - 1: _Version(second, flat[1])}
        self.newest = newest
        self.bound = newest
        self._trace = trace

    def tensors(self, version: int) -> list[torch.Tensor]:
        """The buffers of ``version``, in the order of :attr:`parameters`. Read them; writing has its own door.

        Raises:
            KeyError: If that version is not in memory.
        """
        found = self._find(version)
        if found.arriving:
            with self._trace.span("parameter wait", version=version):
                for work in found.arriving:
                    work.wait()
            found.arriving = ()
        return found.tensors

    def flat_buffers(self, version: int) -> list[torch.Tensor]:
        """The contiguous buffers of ``version`` (newest + 1: of the version that is being written).

        Raises:
            KeyError: If that version is not in memory.
        """
        return self._find(self.newest - 1 if version == self.newest + 1 else version).flat

    def _find(self, version: int) -> _Version:
        if version not in self._versions:
            raise KeyError(f"weight version {version} is not in memory, only {sorted(self._versions)}")
        return self._versions[version]

    def bind(self, version: int) -> None:
        """Point every parameter at ``version``. Free if it is bound already."""
        if version == self.bound:
            return
        for parameter, tensor in zip(self.parameters, self.tensors(version), strict=True):
            parameter.data = tensor
        self.bound = version

    def acquire(self, version: int) -> None:
        """Bind ``version`` for a forward whose graph will live until :meth:`release`."""
        self.bind(version)
        self._versions[version].readers += 1

    def release(self, version: int) -> None:
        """A backward has consumed its graph of ``version``.

        Raises:
            RuntimeError: If no graph of that version is live.
        """
        found = self._versions.get(version)
        if found is None or found.readers < 1:
            raise RuntimeError(f"no live graph reads weight version {version}")
        found.readers -= 1

    def begin_write(self, version: int) -> list[torch.Tensor]:
        """The buffers to write ``version`` = newest + 1 into: those of the version two before it.

        The version that they held is gone from here on; :meth:`end_write` makes the new one readable.

        Raises:
            RuntimeError: If the version is not the next one, or a live graph still reads the buffers.
        """
        if version != self.newest + 1:
            raise RuntimeError(f"cannot write weight version {version}: the next one is {self.newest + 1}")
        oldest = self.newest - 1
        readers = self._versions[oldest].readers
        if readers:
            raise RuntimeError(
                f"cannot write weight version {version} over version {oldest}: {readers} live graph(s) still read it"
            )
        if self.bound == oldest:
            self.bind(self.newest)
        return self.tensors(oldest)

    def end_write(self, version: int, arriving: Sequence[dist.Work] = ()) -> None:
        """The buffers of :meth:`begin_write` now hold ``version``, as soon as ``arriving`` has been waited for."""
        written = self._versions.pop(self.newest - 1)
        written.arriving = arriving
        self._versions[version] = written
        self.newest = version

    def repeat_newest(self) -> None:
        """Make version newest + 1 equal to the newest: the update between them was skipped."""
        version = self.newest + 1
        target = self.begin_write(version)
        torch._foreach_copy_(target, self.tensors(self.newest))
        self.end_write(version)

    def nbytes(self) -> int:
        """Bytes of both versions."""
        return sum(t.numel() * t.element_size() for version in self._versions.values() for t in version.tensors)
