"""The weight-stashing policy: which version of the weights is bound to the model, and who may write one.

A parameter with a delay of D updates is read by batch k as x_{max(k-D, 0)}, in forward and backward, and has D+1
buffers: two under 2bw-async. It is *bound* to one of them by pointing ``param.data`` at it. Autograd does not make that
safe by itself, and the two ways an operator can remember a weight differ: one that saves the *leaf* (Megatron's own
linear layers) sees whatever the parameter is bound to when its backward runs, one that saves a *view* (``F.linear`` on
CPU keeps ``weight.t()``) keeps the old storage. Hence the two rules of this module: bind the version of the forward
again before its backward, and never write a buffer that a live graph reads.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_async.observe.trace import NO_TRACE, Trace
from megatron_async.pipeline.plan import read_version


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage of one version.

    Attributes:
        tensors: One a parameter; those of parameters that have no such version are not used.
        flat: The contiguous buffers that the tensors are views of, where Megatron has such.
    """

    tensors: Sequence[torch.Tensor]
    flat: Sequence[torch.Tensor] = ()


class _Line:
    """The parameters of one delay, and their D+1 sets of buffers, newest first."""

    def __init__(self, delay: int, parameters: Sequence[torch.Tensor], buffers: Iterable[Storage]) -> None:
        self.delay = delay
        self.parameters = parameters
        self.buffers = deque(buffers)
        self.bound: Sequence[torch.Tensor] = self.buffers[0].tensors

    def at(self, version: int, newest: int) -> Sequence[torch.Tensor]:
        if not newest - self.delay <= version <= newest:
            kept = list(range(newest - self.delay, newest + 1))
            raise KeyError(f"weight version {version} is not in memory, only {kept}")
        return self.buffers[newest - version].tensors

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors is self.bound:
            return
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor
        self.bound = tensors


class WeightVersions:
    """The versions of the weights of one stage, as many as their delays need and no more.

    Every parameter has D+1 buffers of its own dtype and shape. The first is the storage that the parameter had when
    this object was made, so that nothing that was loaded or initialized moves.

    Attributes:
        parameters: The parameters.
        delays: D of each.
        newest: Number of the newest version, v. A parameter has the versions v-D to v.
        home: The storage that the parameters had when this object was made.

    Args:
        parameters: The trainable parameters of the stage, each once, and whatever else changes with an update. Their
            current values are version 0 and, as copies, the versions before it.
        delays: D of each parameter; 1 for all by default.
        copies: Storage of the copies, one for each further buffer, which holds the values of the parameters; None to
            allocate it.
        flat: The contiguous buffers that the parameters are views of; none by default.
        trace: Where the time goes that a version is waited for.

    Raises:
        ValueError: If a parameter appears twice, or the copies are not as many as the delays need.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        delays: Sequence[int] | None = None,
        *,
        copies: Sequence[Storage] | None = None,
        flat: Sequence[torch.Tensor] = (),
        trace: Trace = NO_TRACE,
    ) -> None:
        self.parameters = list(parameters)
        if len({id(p) for p in self.parameters}) != len(self.parameters):
            raise ValueError("a parameter appears twice: tied weights must be given once")
        self.delays = [1] * len(self.parameters) if delays is None else list(delays)
        self.newest = 0
        deepest = max(self.delays, default=0)
        # `.data` and not `.detach()`: writes to a buffer must not count as in-place changes of the parameter, whose
        # version counter autograd compares. This module's own bookkeeping takes the place of that check.
        storages = [Storage([p.data for p in self.parameters], flat)]
        if copies is None:
            copies = [self._copy(storages[0], version) for version in range(1, deepest + 1)]
        storages += copies
        if len(storages) != deepest + 1:
            raise ValueError(f"{len(copies)} copies for delays of up to {deepest} updates")
        self._lines: list[_Line] = []
        self._positions: list[list[int]] = []
        for delay in sorted(set(self.delays)):
            positions = [i for i, d in enumerate(self.delays) if d == delay]
            mine = [Storage([s.tensors[i] for i in positions], s.flat) for s in storages[: delay + 1]]
            self._lines.append(_Line(delay, [self.parameters[i] for i in positions], mine))
            self._positions.append(positions)
        self.home = storages[0].tensors
        self._live: Counter[int] = Counter()
        self._arriving: dict[int, Sequence[dist.Work]] = {}
        self._trace = trace

    def _copy(self, storage: Storage, version: int) -> Storage:
        """A copy of the tensors that have a buffer number ``version``."""
        return Storage([t.clone() if version <= d else t for t, d in zip(storage.tensors, self.delays, strict=True)])

    def tensors(self, version: int) -> list[torch.Tensor]:
        """The buffers of ``version``, in the order of :attr:`parameters`. Read them; writing has its own door.

        Raises:
            KeyError: If that version of a parameter is not in memory.
        """
        return self._merge([self._at(line, version) for line in self._lines])

    def tensors_read(self, batch: int) -> list[torch.Tensor]:
        """The buffers that ``batch`` reads, in the order of :attr:`parameters`.

        Raises:
            KeyError: If a version is not in memory.
        """
        return self._merge([self._at(line, read_version(batch, line.delay)) for line in self._lines])

    def _at(self, line: _Line, version: int) -> Sequence[torch.Tensor]:
        found = line.at(version, self.newest)
        if version in self._arriving:
            with self._trace.span("parameter wait", version=version):
                for work in self._arriving.pop(version):
                    work.wait()
        return found

    def tensors_of_age(self, age: int) -> list[torch.Tensor]:
        """The buffers of version newest - ``age``, in the order of :attr:`parameters`.

        Where a parameter has no such version, because its delay is smaller, its oldest one.
        """
        return self._merge([self._at(line, self.newest - min(age, line.delay)) for line in self._lines])

    @torch.no_grad()
    def resume(self, newest: int, weights: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Go on from versions that another run of the pipeline has left. Before anything has been read or written.

        Args:
            newest: Number of the newest version.
            weights: By age, versions to put in the place of the current ones, as :meth:`tensors_of_age` gave them.
        """
        for age, tensors in weights.items():
            for line, positions in zip(self._lines, self._positions, strict=True):
                if age <= line.delay:
                    torch._foreach_copy_(list(line.buffers[age].tensors), [tensors[i] for i in positions])
        self.newest = newest

    def _merge(self, parts: list[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        merged = list(self.home)
        for positions, part in zip(self._positions, parts, strict=True):
            for i, tensor in zip(positions, part, strict=True):
                merged[i] = tensor
        return merged

    def bind(self, batch: int) -> None:
        """Point every parameter at the version that ``batch`` reads. Free if they do already."""
        for line in self._lines:
            line.bind(self._at(line, read_version(batch, line.delay)))

    def bind_newest(self) -> None:
        """Point every parameter at its newest version. Free if they do already."""
        for line in self._lines:
            line.bind(self._at(line, self.newest))

    def bind_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Point the parameters at storage of the caller's, until another binding."""
        for line, positions in zip(self._lines, self._positions, strict=True):
            line.bind([tensors[i] for i in positions])

    def bound(self) -> list[int]:
        """The version that each parameter points at, found by its storage.

        Raises:
            RuntimeError: If one points at none of its versions.
        """
        found = [0] * len(self.parameters)
        for line, positions in zip(self._lines, self._positions, strict=True):
            for number, (i, parameter) in enumerate(zip(positions, line.parameters, strict=True)):
                storages = [s.tensors[number].data_ptr() for s in line.buffers]
                if parameter.data_ptr() not in storages:
                    raise RuntimeError("a parameter points at storage that is none of its versions")
                found[i] = self.newest - storages.index(parameter.data_ptr())
        return found

    def acquire(self, batch: int) -> None:
        """Bind the versions of ``batch`` for a forward whose graph will live until :meth:`release`."""
        self.bind(batch)
        self._live[batch] += 1

    def release(self, batch: int) -> None:
        """A backward has consumed its graph of ``batch``.

        Raises:
            RuntimeError: If no graph of that batch is live.
        """
        if self._live[batch] < 1:
            raise RuntimeError(f"no live graph of batch {batch} reads the weights")
        self._live[batch] -= 1

    def begin_write(self, version: int) -> list[torch.Tensor]:
        """The buffers to write ``version`` = newest + 1 into: those of the oldest version of each parameter.

        The version that they held is gone from here on; :meth:`end_write` makes the new one readable.

        Raises:
            RuntimeError: If the version is not the next one, or a live graph still reads the buffers.
        """
        if version != self.newest + 1:
            raise RuntimeError(f"cannot write weight version {version}: the next one is {self.newest + 1}")
        # Batch k is the last to read x_{k-D}, whatever D: the buffers are free when all batches up to k are done.
        readers = sum(count for batch, count in self._live.items() if batch <= self.newest)
        if readers:
            raise RuntimeError(
                f"cannot write weight version {version} over its predecessors: {readers} live graph(s) still read them"
            )
        self._live = +self._live  # drops the batches that are done
        oldest = []
        for line in self._lines:
            oldest.append(self._at(line, self.newest - line.delay))
            if line.bound is oldest[-1]:
                line.bind(self._at(line, self.newest))
        return self._merge(oldest)

    def flat_buffers_to_write(self) -> Sequence[torch.Tensor]:
        """The contiguous buffers of the tensors that :meth:`begin_write` gives, where all delays are equal."""
        (line,) = self._lines
        return line.buffers[-1].flat

    def end_write(self, version: int, arriving: Sequence[dist.Work] = ()) -> None:
        """The buffers of :meth:`begin_write` now hold ``version``, as soon as ``arriving`` has been waited for."""
        for line in self._lines:
            line.buffers.rotate(1)
        if arriving:
            self._arriving[version] = arriving
        self.newest = version

    def repeat_newest(self, change: Callable[[list[torch.Tensor]], None] = lambda tensors: None) -> None:
        """Make version newest + 1 equal to the newest: the update between them was skipped.

        Args:
            change: Given the buffers of the new version, to change what is no weight.
        """
        version = self.newest + 1
        target = self.begin_write(version)
        torch._foreach_copy_(target, self.tensors(self.newest))
        change(target)
        self.end_write(version)

    def return_home(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Leave values in the storage that the parameters had when this object was made, and bind that for good.

        Args:
            tensors: The values; None for the newest version.
        """
        values = self.tensors(self.newest) if tensors is None else tensors
        torch._foreach_copy_(list(self.home), list(values))
        self.bind_to(self.home)

    def nbytes(self) -> int:
        """Bytes of all versions."""
        return sum(t.numel() * t.element_size() for line in self._lines for s in line.buffers for t in s.tensors)
