"""Reads the traces of a run back, and says where the time of every stage went."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATTERN = "trace-rank-*.json"

RECEIVE, UPDATE, SEND, BUSY = "receive wait", "update wait", "send", "busy"
KINDS = {
    "forward": BUSY,
    "backward": BUSY,
    "step": BUSY,
    "begin update": BUSY,
    "send": SEND,
    "receive wait": RECEIVE,
    "reduction wait": UPDATE,
    "norm wait": UPDATE,
    "parameter wait": UPDATE,
}
"""What the time of a span counts as."""


class UnreadableTrace(ValueError):
    """A folder does not hold the traces of one run."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that a rank did. ``start`` and ``end`` are in seconds, on the time line of the whole run."""

    name: str
    start: float
    end: float
    batch: int | None = None
    microbatch: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class StageTrace:
    """What one rank of a stage did, in order of the starts of spans; a span that contains others comes first."""

    stage: int
    rank: int
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class Fractions:
    """Where the time of a stage went, as fractions of it that add up to 1.

    Attributes:
        busy: Forwards, backwards and the optimizer's own work.
        receive: Waiting for activations and gradients of the neighbours.
        update: Waiting for gradient norm, gradient reduction and new weights.
        send: Sending activations and gradients.
        other: Nothing of these: the training loop, the logger, the data loader, idleness without a name.
    """

    busy: float
    receive: float
    update: float
    send: float
    other: float

    @property
    def bubble(self) -> float:
        """What is not busy."""
        return 1.0 - self.busy


def read_traces(directory: Path, replica: int = 0) -> list[StageTrace]:
    """The traces of one pipeline, by stage.

    Args:
        directory: Folder that ``--async-trace`` has filled.
        replica: Which of the ranks of every stage to take, in order of their numbers (data- and tensor-parallel peers).

    Raises:
        UnreadableTrace: If there is no such folder or replica, or it holds no traces, or something else, or the traces
            of several runs.
    """
    if not directory.is_dir():
        raise UnreadableTrace(f"{directory} is not a folder; give the folder that --async-trace has filled")
    files = sorted(directory.glob(PATTERN))
    if not files:
        raise UnreadableTrace(
            f"{directory} holds no {PATTERN}; train with --async-trace {directory} past --async-trace-start"
        )
    origins = set()
    by_stage: dict[int, list[StageTrace]] = defaultdict(list)
    for path in files:
        content = _read(path)
        origins.add(content["otherData"].get("origin_ns"))
        trace = _to_trace(content, path)
        by_stage[trace.stage].append(trace)
    if len(origins) > 1:
        raise UnreadableTrace(f"{directory} holds traces of {len(origins)} runs; trace into an empty folder")
    fewest = min(len(traces) for traces in by_stage.values())
    if not 0 <= replica < fewest:
        raise UnreadableTrace(f"{directory} has {fewest} rank(s) of a stage, there is no replica {replica}")
    return [sorted(by_stage[stage], key=lambda trace: trace.rank)[replica] for stage in sorted(by_stage)]


def _read(path: Path) -> dict[str, Any]:
    foreign = UnreadableTrace(f"{path} was not written by --async-trace")
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnreadableTrace(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("otherData"), dict):
        raise foreign
    if content["otherData"].get("producer") != "megatron_async":
        raise foreign
    return content


def _to_trace(content: dict[str, Any], path: Path) -> StageTrace:
    try:
        spans = [
            Span(
                event["name"],
                event["ts"] * 1e-6,
                (event["ts"] + event["dur"]) * 1e-6,
                *(event["args"].get(key) for key in ("batch", "microbatch", "chunk")),
            )
            for event in content["traceEvents"]
            if event["ph"] == "X"
        ]
        spans.sort(key=lambda span: (span.start, -span.end))
        trace = StageTrace(int(content["otherData"]["stage"]), int(content["otherData"]["rank"]), spans)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableTrace(f"{path} was not written by --async-trace: {error!r}") from None
    unknown = {span.name for span in spans} - set(KINDS)
    if unknown:
        raise UnreadableTrace(f"{path} holds spans of unknown names: {', '.join(sorted(unknown))}")
    return trace


def innermost(spans: Iterable[Span]) -> Iterator[tuple[float, float, Span]]:
    """Cut nested spans into pieces that do not overlap, each of the innermost span there.

    Args:
        spans: In order of their starts, outer ones first, as in :class:`StageTrace`.

    Yields:
        (start, end, span) in order of time; no piece is empty.
    """
    stack: list[tuple[Span, float]] = []  # with the end: no span reaches beyond the one around it
    cursor = 0.0

    def leave(until: float) -> Iterator[tuple[float, float, Span]]:
        nonlocal cursor
        while stack and stack[-1][1] <= until:
            span, end = stack.pop()
            if end > cursor:
                yield cursor, end, span
                cursor = end

    for span in spans:
        yield from leave(span.start)
        if stack and span.start > cursor:
            yield cursor, span.start, stack[-1][0]
        cursor = max(cursor, span.start) if stack else span.start
        stack.append((span, min(span.end, stack[-1][1]) if stack else span.end))
    yield from leave(float("inf"))


def whole_batches(stages: list[StageTrace]) -> list[int]:
    """Batches of which every stage has traced all backwards, in order: their ends are known."""
    found: set[int] | None = None
    for trace in stages:
        backwards: dict[int, set[tuple[int | None, int | None]]] = defaultdict(set)
        for span in trace.spans:
            if span.name == "backward" and span.batch is not None:
                backwards[span.batch].add((span.microbatch, span.chunk))
        most = max((len(done) for done in backwards.values()), default=0)
        whole = {batch for batch, done in backwards.items() if len(done) == most}
        found = whole if found is None else found & whole
    return sorted(found or ())


def steady_window(trace: StageTrace, first: int, last: int) -> tuple[float, float]:
    """Time of a stage from the end of batch ``first`` to the end of batch ``last``, each with its last backward.

    Raises:
        ValueError: If one of the batches has no backward in the trace.
    """
    ends = [
        max((span.end for span in trace.spans if span.name == "backward" and span.batch == batch), default=None)
        for batch in (first, last)
    ]
    start, end = ends
    if start is None or end is None:
        raise ValueError(f"stage {trace.stage} has not traced batches {first} and {last}")
    return start, end


def account(trace: StageTrace, start: float, end: float) -> Fractions:
    """Where the time of a stage went between ``start`` and ``end``. Nested time counts once, for the innermost span.

    Raises:
        ValueError: If ``end`` is not after ``start``.
    """
    if end <= start:
        raise ValueError(f"the window ends at {end} s, not after its start at {start} s")
    spent = dict.fromkeys((BUSY, RECEIVE, UPDATE, SEND), 0.0)
    for begin, stop, span in innermost(trace.spans):
        inside = min(stop, end) - max(begin, start)
        if inside > 0:
            spent[KINDS[span.name]] += inside
    busy, receive, update, send = (value / (end - start) for value in spent.values())
    return Fractions(busy, receive, update, send, max(0.0, 1.0 - (busy + receive + update + send)))
