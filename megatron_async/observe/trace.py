"""Traces: what a rank did in a few training steps, as JSON for Perfetto and chrome://tracing.

Spans are opened everywhere in the pipeline, in every step. Outside of the traced steps, and without a trace, opening
one hands out a context that does nothing.

Source of the format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import contextlib
import json
import tempfile
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.errors import ConfigurationError
from megatron_async.observe.clocks import Clock, find_offset, make_clock

COMPUTE, COMMUNICATION = 0, 1
LANES = {COMPUTE: "compute", COMMUNICATION: "communication"}
SPANS = {
    "forward": COMPUTE,
    "backward": COMPUTE,
    "step": COMPUTE,
    "begin update": COMPUTE,
    "send": COMMUNICATION,
    "receive wait": COMMUNICATION,
    "reduction wait": COMMUNICATION,
    "norm wait": COMMUNICATION,
    "parameter wait": COMMUNICATION,
}
"""Names of spans, and the lane that each is drawn in."""

_Arguments = tuple[int | None, int | None, int | None, int | None]
_Record = tuple[str, Any, Any, _Arguments]

_NOTHING = contextlib.nullcontext()


class Trace:
    """Records the spans of one rank during a window of training steps, and writes them when the window closes.

    The steps of a run are counted from 1 by :meth:`next_step`. What is recorded in the window is what runs between the
    ends of two steps, whatever batch it belongs to: forwards of the next batch as well.

    Attributes:
        step: Number of the training step that runs now.
        path: The file that is written.

    Args:
        directory: Where the file goes; made if it is missing.
        rank: Global rank of this process.
        stage: Its pipeline stage.
        first_step: Number of the first training step that is traced, at least 1.
        steps: How many are traced, at least 1.
        device: Where the work runs.
        clock: What times are read from; None for the clock of ``device``.

    Raises:
        ValueError: If ``first_step`` or ``steps`` is below 1.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        rank: int,
        stage: int,
        first_step: int,
        steps: int,
        device: torch.device,
        clock: Clock | None = None,
    ) -> None:
        if first_step < 1 or steps < 1:
            raise ValueError(f"first_step and steps must be at least 1, got {first_step} and {steps}")
        self.step = 1
        self.path = Path(directory) / f"trace-rank-{rank:05d}.json"
        self._rank, self._stage = rank, stage
        self._first_step, self._last_step = first_step, first_step + steps - 1
        self._clock = clock or make_clock(device)
        self._device = device
        self._offset, self._origin = 0, 0
        self._is_open = first_step == 1
        self._is_finished = False
        self._records: list[_Record] = []

    def span(
        self,
        name: str,
        *,
        batch: int | None = None,
        microbatch: int | None = None,
        version: int | None = None,
        chunk: int | None = None,
    ) -> contextlib.AbstractContextManager[None, None]:
        """A context whose time is recorded while the window is open. Spans may be nested.

        Args:
            name: One of :data:`SPANS`.
            batch: Number of the batch that it is done for, from 0.
            microbatch: Number of the microbatch in its batch, from 0.
            version: Number of the weight version that is read, or written; negative for none.
            chunk: Number of the model chunk on this stage, where a stage has several.
        """
        if not self._is_open:
            return _NOTHING
        return _Span(self._clock.mark, self._records, name, (batch, microbatch, version, chunk))

    def next_step(self) -> None:
        """A training step has ended: open the window, or close it and write the file, if it is time."""
        self.step += 1
        if self.step == self._first_step and not self._is_finished:
            self._is_open = True
        elif self._is_open and self.step > self._last_step:
            self._finish()

    def align(self, group: dist.ProcessGroup) -> None:
        """Agree with the other ranks on one time line. All ranks of ``group`` call it, once, before the first step.

        Without it the times of ranks on different machines cannot be compared.

        Args:
            group: All ranks that write traces; the first one's clock counts.
        """
        self._offset, self._origin = find_offset(group)

    def close(self) -> None:
        """Training ends: write what the window holds, if it is still open. A second call does nothing."""
        if self._is_open:
            self._finish()
        elif not self._is_finished and self._rank == 0:
            warnings.warn(
                f"--async-trace: training ended in step {self.step} of this run, before the first traced step "
                f"{self._first_step}: nothing was written",
                stacklevel=2,
            )
        self._is_finished = True

    def _finish(self) -> None:
        self._is_open, self._is_finished = False, True
        records, self._records = self._records, []
        try:
            write_json(self.path, self._to_json(records))
        except OSError as error:
            # The directory was writable when training began. A full disk must not end a long run.
            warnings.warn(f"--async-trace: {self.path} cannot be written: {error}", stacklevel=2)

    def _to_json(self, records: list[_Record]) -> dict[str, Any]:
        """The trace, in the JSON object form of the format."""
        times = iter(self._clock.resolve([mark for _, start, end, _ in records for mark in (start, end)]))
        shift = self._offset + self._origin
        events: list[dict[str, Any]] = []
        for (name, _, _, arguments), start, end in zip(records, times, times, strict=True):
            events.append(
                {
                    "name": name,
                    "cat": LANES[SPANS[name]],
                    "ph": "X",
                    "ts": (start - shift) / 1000,
                    "dur": (end - start) / 1000,
                    "pid": self._rank,
                    "tid": SPANS[name],
                    "args": {
                        key: value
                        for key, value in zip(("batch", "microbatch", "version", "chunk"), arguments, strict=True)
                        if value is not None and value >= 0
                    },
                }
            )
        # Inner spans end first. In order of their starts, outer ones first, viewers and readers can nest them at once.
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        return {
            "traceEvents": self._names() + events,
            "displayTimeUnit": "ms",
            "otherData": {
                "producer": "megatron_async",
                "rank": self._rank,
                "stage": self._stage,
                "first_step": self._first_step,
                "last_step": min(self.step - 1, self._last_step),
                "device": self._device.type,
                "clock_offset_ns": self._offset,
                "origin_ns": self._origin,
            },
        }

    def _names(self) -> list[dict[str, Any]]:
        """Metadata: how viewers call the process and its lanes, and in which order they show them."""

        def name(kind: str, tid: int, **arguments: Any) -> dict[str, Any]:
            return {"name": kind, "ph": "M", "pid": self._rank, "tid": tid, "args": arguments}

        names = [
            name("process_name", COMPUTE, name=f"stage {self._stage} (rank {self._rank})"),
            name("process_sort_index", COMPUTE, sort_index=self._stage),
        ]
        for lane, called in LANES.items():
            names.append(name("thread_name", lane, name=called))
            names.append(name("thread_sort_index", lane, sort_index=lane))
        return names


class _NoTrace(Trace):
    """Never records."""

    def __init__(self) -> None:
        self.step = 1
        self._is_open = False

    def next_step(self) -> None:
        """Nothing to count."""

    def align(self, group: dist.ProcessGroup) -> None:
        """Nothing to align."""

    def close(self) -> None:
        """Nothing to write."""


NO_TRACE: Trace = _NoTrace()
"""Stands where a trace could be."""


class _Span:
    """One span that is being recorded."""

    __slots__ = ("_arguments", "_mark", "_name", "_records", "_start")

    def __init__(self, mark: Any, records: list[_Record], name: str, arguments: _Arguments) -> None:
        self._mark = mark
        self._records = records
        self._name = name
        self._arguments = arguments

    def __enter__(self) -> None:
        self._start = self._mark()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._records.append((self._name, self._start, self._mark(), self._arguments))


def check_directory(flag: str, directory: Path | str) -> None:
    """See to it that files can be written to ``directory``; make it if it is missing. Ranks may call it at once.

    Args:
        flag: Whose value it is.
        directory: The directory.

    Raises:
        ConfigurationError: If it cannot be made or written.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".written-"):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"{flag} {directory} cannot be written ({error.strerror or error}); name a directory that every "
            "rank can write, or drop the flag"
        ) from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(content))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
