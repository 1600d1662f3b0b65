"""The weight-stashing policy: which version of the weights is bound to the model, and who may write one.

Two buffers hold the versions x_{k-1} and x_k. A parameter is *bound* to one of them by pointing ``param.data`` at it.
Autograd does not make that safe by itself, and the two ways an operator can remember a weight differ: one that saves
the *leaf* (Megatron's own linear layers) sees whatever the parameter is bound to when its backward runs, one that saves
a *view* (``F.linear`` on CPU keeps ``weight.t()``) keeps the old storage. Hence the two rules of this module: bind the
version of the forward again before its backward, and never write a buffer that a live graph reads.
"""

from collections.abc import Iterable

import torch


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

    Raises:
        ValueError: If a parameter appears twice.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], newest: int = 0) -> None:
        self.parameters = list(parameters)
        if len({id(p) for p in self.parameters}) != len(self.parameters):
            raise ValueError("a parameter appears twice: tied weights must be given once")
        # `.data` and not `.detach()`: writes to a buffer must not count as in-place changes of the parameter, whose
        # version counter autograd compares. This module's own bookkeeping takes the place of that check.
        current = [p.data for p in self.parameters]
        self._buffers = {newest: current, newest - 1: [t.clone() for t in current]}
        self._readers = {newest: 0, newest - 1: 0}
        self.newest = newest
        self.bound = newest

    def tensors(self, version: int) -> list[torch.Tensor]:
        """The buffers of ``version``, in the order of :attr:`parameters`. Read them; writing has its own door.

        Raises:
            KeyError: If that version is not in memory.
        """
        if version not in self._buffers:
            raise KeyError(f"weight version {version} is not in memory, only {sorted(self._buffers)}")
        return self._buffers[version]

    def bind(self, version: int) -> None:
        """Point every parameter at ``version``. Free if it is bound already."""
        if version == self.bound:
            return
        self.bind_to(self.tensors(version))
        self.bound = version

    def bind_to(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Point parameters at other storage for the time of an optimizer step; None leaves a parameter alone.

        Call :meth:`rebind` afterwards.
        """
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            if tensor is not None:
                parameter.data = tensor

    def rebind(self) -> None:
        """Undo :meth:`bind_to`."""
        self.bind_to(self.tensors(self.bound))

    def acquire(self, version: int) -> None:
        """Bind ``version`` for a forward whose graph will live until :meth:`release`."""
        self.bind(version)
        self._readers[version] += 1

    def release(self, version: int) -> None:
        """A backward has consumed its graph of ``version``.

        Raises:
            RuntimeError: If no graph of that version is live.
        """
        if self._readers.get(version, 0) < 1:
            raise RuntimeError(f"no live graph reads weight version {version}")
        self._readers[version] -= 1

    def begin_write(self, version: int) -> list[torch.Tensor]:
        """The buffers to write ``version`` = newest + 1 into: those of the version two before it.

        The version that they held is gone from here on; :meth:`end_write` makes the new one readable.

        Raises:
            RuntimeError: If the version is not the next one, or a live graph still reads the buffers.
        """
        if version != self.newest + 1:
            raise RuntimeError(f"cannot write weight version {version}: the next one is {self.newest + 1}")
        oldest = self.newest - 1
        if self._readers[oldest]:
            raise RuntimeError(
                f"cannot write weight version {version} over version {oldest}: "
                f"{self._readers[oldest]} live graph(s) still read it"
            )
        if self.bound == oldest:
            self.bind(self.newest)
        return self._buffers[oldest]

    def end_write(self, version: int) -> None:
        """The buffers of :meth:`begin_write` now hold ``version``."""
        oldest = self.newest - 1
        self._buffers[version] = self._buffers.pop(oldest)
        self._readers[version] = self._readers.pop(oldest)
        self.newest = version

    def repeat_newest(self) -> None:
        """Make version newest + 1 equal to the newest: the update between them was skipped."""
        version = self.newest + 1
        target = self.begin_write(version)
        torch._foreach_copy_(target, self.tensors(self.newest))
        self.end_write(version)

    def nbytes(self) -> int:
        """Bytes of both versions."""
        return sum(t.numel() * t.element_size() for buffer in self._buffers.values() for t in buffer)
