"""Traces: the file that viewers load, the window of steps, nested time, the clocks."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.errors import ConfigurationError
from megatron_async.observe import timeline
from megatron_async.observe import trace as traces
from megatron_async.observe.clocks import DeviceClock, HostClock, make_clock, offset_of
from megatron_async.observe.timeline import Span, StageTrace, account, innermost, steady_window, whole_batches
from megatron_async.observe.trace import NO_TRACE, SPANS, Trace, check_directory

CPU = torch.device("cpu")


class Ticks:
    """A clock that a test moves, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def mark(self) -> int:
        return self.now

    def resolve(self, marks: list[int]) -> list[int]:
        return list(marks)


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


def make(folder: Path, ticks: Ticks | None = None, **settings: Any) -> Trace:
    defaults: dict[str, Any] = {"rank": 3, "stage": 2, "first_step": 1, "steps": 1, "device": CPU, "clock": ticks}
    return Trace(folder, **defaults | settings)


def spans_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def record(trace: Trace, ticks: Ticks, name: str, nanoseconds: int, **arguments: int) -> None:
    with trace.span(name, **arguments):
        ticks.now += nanoseconds


def test_off_costs_no_object(tmp_path: Path) -> None:
    later = make(tmp_path, first_step=5)
    contexts = {id(t.span(name, batch=i, microbatch=1)) for t in (NO_TRACE, later) for i, name in enumerate(SPANS)}
    assert len(contexts) == 1
    with NO_TRACE.span("step"), NO_TRACE.span("norm wait"):
        pass
    NO_TRACE.next_step()
    NO_TRACE.close()


def test_file(tmp_path: Path, ticks: Ticks) -> None:
    trace = make(tmp_path, ticks)
    record(trace, ticks, "forward", 1500, batch=3, microbatch=1, version=2)
    with trace.span("step", batch=2, version=3):
        ticks.now += 500
        record(trace, ticks, "norm wait", 2001, batch=2)
    record(trace, ticks, "send", 0, batch=3, microbatch=1, version=-1)
    trace.next_step()
    assert trace.path == tmp_path / "trace-rank-00003.json"
    assert [path.name for path in tmp_path.iterdir()] == ["trace-rank-00003.json"]
    assert spans_of(trace.path) == [
        {
            "name": "forward",
            "cat": "compute",
            "ph": "X",
            "ts": 1000.0,
            "dur": 1.5,
            "pid": 3,
            "tid": 0,
            "args": {"batch": 3, "microbatch": 1, "version": 2},
        },
        {
            "name": "step",
            "cat": "compute",
            "ph": "X",
            "ts": 1001.5,
            "dur": 2.501,
            "pid": 3,
            "tid": 0,
            "args": {"batch": 2, "version": 3},
        },
        {
            "name": "norm wait",
            "cat": "communication",
            "ph": "X",
            "ts": 1002.0,
            "dur": 2.001,
            "pid": 3,
            "tid": 1,
            "args": {"batch": 2},
        },
        {
            "name": "send",
            "cat": "communication",
            "ph": "X",
            "ts": 1004.001,
            "dur": 0.0,
            "pid": 3,
            "tid": 1,
            "args": {"batch": 3, "microbatch": 1},
        },
    ]


def check_viewers_format(content: dict[str, Any]) -> None:
    """What the JSON object form of the Trace Event Format asks of complete and metadata events."""
    assert set(content) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    before = float("-inf")
    for event in content["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            (kind,) = event["args"]
            assert {"process_name": "name", "thread_name": "name"}.get(event["name"], "sort_index") == kind
            continue
        assert isinstance(event["ts"], float)
        assert isinstance(event["dur"], float)
        assert event["dur"] >= 0
        assert event["ts"] >= before
        before = event["ts"]


def test_format_and_names(tmp_path: Path) -> None:
    trace = make(tmp_path)
    for name in SPANS:
        with trace.span(name, batch=0):
            pass
    trace.close()
    content = json.loads(trace.path.read_text())
    check_viewers_format(content)
    names = [
        (e["name"], e["tid"], e["args"].get("name")) for e in content["traceEvents"] if e["name"].endswith("_name")
    ]
    assert names == [
        ("process_name", 0, "stage 2 (rank 3)"),
        ("thread_name", 0, "compute"),
        ("thread_name", 1, "communication"),
    ]
    lanes = {e["name"]: e["tid"] for e in content["traceEvents"] if e["ph"] == "X"}
    assert lanes == SPANS


def test_reader_knows_every_span() -> None:
    assert set(timeline.KINDS) == set(SPANS)


@pytest.mark.parametrize(
    ("first", "steps", "run", "expected"),
    [(1, 1, 6, [1]), (1, 3, 6, [1, 2, 3]), (3, 2, 6, [3, 4]), (5, 4, 6, [5, 6]), (6, 1, 6, [6])],
)
def test_window(tmp_path: Path, ticks: Ticks, first: int, steps: int, run: int, expected: list[int]) -> None:
    trace = make(tmp_path, ticks, first_step=first, steps=steps)
    for step in range(1, run + 1):
        assert trace.step == step
        record(trace, ticks, "forward", 1000, batch=step)
        # Written once, when the window closes and not before.
        assert trace.path.exists() == (step > first + steps - 1)
        trace.next_step()
    trace.close()
    assert [event["args"]["batch"] for event in spans_of(trace.path)] == expected
    other = json.loads(trace.path.read_text())["otherData"]
    assert (other["first_step"], other["last_step"]) == (expected[0], expected[-1])


def test_close_writes_once(tmp_path: Path, ticks: Ticks) -> None:
    trace = make(tmp_path, ticks, steps=9)
    record(trace, ticks, "forward", 1000, batch=0)
    trace.close()
    trace.path.unlink()
    record(trace, ticks, "forward", 1000, batch=1)
    trace.close()
    trace.next_step()
    assert not trace.path.exists()


def test_closed_before_the_window_it_stays_closed(tmp_path: Path, ticks: Ticks) -> None:
    trace = make(tmp_path, ticks, first_step=2)
    trace.close()
    trace.next_step()
    record(trace, ticks, "forward", 1000, batch=1)
    trace.next_step()
    assert not trace.path.exists()


@pytest.mark.parametrize(("rank", "warnings"), [(0, 1), (3, 0)])
def test_no_traced_step_is_said_once(
    tmp_path: Path, rank: int, warnings: int, recwarn: pytest.WarningsRecorder
) -> None:
    trace = make(tmp_path, rank=rank, first_step=3)
    trace.next_step()
    trace.close()
    trace.close()
    assert len(recwarn) == warnings
    assert all("ended in step 2 of this run" in str(w.message) for w in recwarn)
    assert not trace.path.exists()


def test_span_of_a_failure_is_recorded(tmp_path: Path, ticks: Ticks) -> None:
    trace = make(tmp_path, ticks)

    def lose() -> None:
        with trace.span("receive wait"):
            ticks.now += 7000
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        lose()
    trace.close()
    assert [event["dur"] for event in spans_of(trace.path)] == [7.0]


@pytest.mark.parametrize("settings", [{"first_step": 0}, {"steps": 0}])
def test_impossible_window(tmp_path: Path, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make(tmp_path, **settings)


def test_a_file_that_cannot_be_written_does_not_end_training(tmp_path: Path, ticks: Ticks) -> None:
    trace = make(tmp_path / "folder", ticks)
    (tmp_path / "folder").write_text("in the way")
    with pytest.warns(UserWarning, match=re.escape(str(trace.path))):
        trace.next_step()
    assert trace.step == 2


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        traces.write_json(path, {"not": object()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_check_directory(tmp_path: Path) -> None:
    check_directory("--async-trace", tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"--async-trace .*file.* cannot be written") as error:
        check_directory("--async-trace", tmp_path / "file")
    assert "name a directory" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_check_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigurationError, match="Permission denied"):
        check_directory("--async-trace", tmp_path)


# Clocks


def test_host_clock() -> None:
    clock = make_clock(CPU)
    assert isinstance(clock, HostClock)
    marks = [clock.mark() for _ in range(3)]
    assert clock.resolve(marks) == sorted(marks)


class FakeDevice:
    """A stream that runs behind the host: what is queued takes device time, and only waiting moves the host there.

    All times in nanoseconds of one true time line; reading the host's clock takes 10.
    """

    def __init__(self) -> None:
        self.host = 5_000_000
        self.stream = 5_000_000
        self.synchronizations = 0

    def read_host(self) -> int:
        self.host += 10
        return self.host

    def queue(self, nanoseconds: int) -> None:
        self.stream = max(self.stream, self.host) + nanoseconds

    def wait(self, until: int) -> None:
        self.synchronizations += 1
        self.host = max(self.host, until)

    def make_event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    """torch.cuda.Event, as far as traces use it: times are there once it was recorded and has been passed."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.time: int | None = None

    def record(self, stream: Any = None) -> None:
        self.device.queue(0)
        self.time = self.device.stream

    def synchronize(self) -> None:
        assert self.time is not None
        self.device.wait(self.time)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.time is not None
        assert end.time is not None
        for event in (self, end):
            if event.time > self.device.host:
                raise RuntimeError("the device has not passed the event")
        return (end.time - self.time) * 1e-6


def test_device_clock() -> None:
    """Spans have the times of the stream, not of the host that queued the work."""
    device = FakeDevice()
    clock = DeviceClock(CPU, device.make_event, device.read_host)
    marks, truth = [], []
    for nanoseconds in (300_000, 0, 40_000, 2_000_000):
        marks.append(clock.mark())
        truth.append(max(device.stream, device.host))
        device.queue(nanoseconds)
        device.host += 100  # the host runs ahead
    marks.append(clock.mark())
    truth.append(device.stream)
    assert device.synchronizations == 0
    assert device.host < truth[-1] - 2_000_000
    found = clock.resolve(marks)
    assert device.synchronizations > 0
    # Within the bracket of two readings of the host's clock.
    assert all(abs(a - b) <= 20 for a, b in zip(found, truth, strict=True))
    assert [b - a for a, b in itertools.pairwise(found)] == [300_000, 0, 40_000, 2_000_000]
    assert clock.resolve([]) == []


def test_trace_of_a_device(tmp_path: Path) -> None:
    """Nothing is waited for while the window is open; the file holds the stream's times."""
    device = FakeDevice()
    clock = DeviceClock(CPU, device.make_event, device.read_host)
    trace = make(tmp_path, clock=clock, steps=2)
    for batch in range(2):
        with trace.span("forward", batch=batch):
            device.queue(1_000_000)
        with trace.span("step", batch=batch):
            device.queue(10_000)
            with trace.span("norm wait", batch=batch):
                device.queue(250_000)
        assert device.synchronizations == 0
        trace.next_step()
    content = json.loads(trace.path.read_text())
    check_viewers_format(content)
    spans = spans_of(trace.path)
    assert [span["name"] for span in spans] == ["forward", "step", "norm wait"] * 2
    assert [span["dur"] for span in spans] == pytest.approx([1000, 260, 250] * 2, abs=2e-3)
    assert spans[3]["ts"] - spans[0]["ts"] == pytest.approx(1260, abs=2e-3)


def test_offsets() -> None:
    readings = [("a", [100, 200, 300]), ("a", [103, 204, 305]), ("b", [1100, 1290, 1301]), ("b", [1101, 1201, 1301])]
    assert offset_of("a", readings) == (0, 100)
    # Differences 1000, 1090, 1001, 1001, 1001, 1001: one late reading does not count.
    assert offset_of("b", readings) == (1001, 100)


# Accounting


def stage_of(spans: list[Span]) -> StageTrace:
    return StageTrace(0, 0, sorted(spans, key=lambda span: (span.start, -span.end)))


NESTED = [
    Span("forward", 1.0, 4.0, 0, 0),
    Span("receive wait", 4.0, 5.0, 0, 0),
    Span("step", 5.0, 9.0, 0),
    Span("norm wait", 5.5, 7.5, 0),
    Span("reduction wait", 6.0, 6.5, 0),
    Span("parameter wait", 8.0, 8.25),
    Span("send", 9.5, 10.0, 0, 0),
]


def test_innermost() -> None:
    pieces = [(start, end, span.name) for start, end, span in innermost(NESTED)]
    assert pieces == [
        (1.0, 4.0, "forward"),
        (4.0, 5.0, "receive wait"),
        (5.0, 5.5, "step"),
        (5.5, 6.0, "norm wait"),
        (6.0, 6.5, "reduction wait"),
        (6.5, 7.5, "norm wait"),
        (7.5, 8.0, "step"),
        (8.0, 8.25, "parameter wait"),
        (8.25, 9.0, "step"),
        (9.5, 10.0, "send"),
    ]


def random_spans(start: float, end: float, depth: int, draw: Callable[[], float]) -> Iterator[Span]:
    """Properly nested spans, in order."""
    cursor = start
    while cursor < end:
        cursor += draw() * (end - start) / 4
        stop = cursor + draw() * (end - start) / 2
        if stop > end:
            return
        yield Span("step", cursor, stop)
        if depth:
            yield from random_spans(cursor, stop, depth - 1, draw)
        cursor = stop


def test_pieces_cover_what_the_spans_cover() -> None:
    generator = torch.Generator().manual_seed(1)
    spans = list(random_spans(0.0, 1.0, 3, lambda: float(torch.rand((), generator=generator))))
    assert len(spans) > 10
    pieces = list(innermost(spans))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(pieces))
    outer = [s for s in spans if not any(o is not s and o.start <= s.start and s.end <= o.end for o in spans)]
    assert sum(end - start for start, end, _ in pieces) == pytest.approx(sum(s.end - s.start for s in outer))
    for start, end, span in pieces:
        middle = (start + end) / 2
        assert span is max((s for s in spans if s.start <= middle <= s.end), key=lambda s: s.start)


def test_fractions() -> None:
    found = account(stage_of(NESTED), 0.0, 10.0)
    # forward 3, step 0.5 + 0.5 + 0.75; norm 1.5, reduction 0.5, parameters 0.25; other 0..1 and 9..9.5
    assert (found.busy, found.receive, found.update, found.send) == pytest.approx((0.475, 0.1, 0.225, 0.05))
    assert found.other == pytest.approx(0.15)
    assert found.bubble == pytest.approx(0.525)


def test_fractions_of_a_part() -> None:
    """A window that cuts spans in two."""
    found = account(stage_of(NESTED), 3.0, 7.0)
    assert (found.busy, found.receive, found.update, found.send) == pytest.approx((0.375, 0.25, 0.375, 0.0))
    assert found.other == pytest.approx(0.0)
    with pytest.raises(ValueError, match="not after"):
        account(stage_of(NESTED), 3.0, 3.0)


def test_an_inner_span_that_is_rounded_beyond_its_outer_one() -> None:
    spans = [Span("step", 0.0, 1.0), Span("norm wait", 0.5, 1.0 + 1e-9), Span("forward", 1.0, 2.0)]
    assert [(s, e) for s, e, _ in innermost(spans)] == [(0.0, 0.5), (0.5, 1.0), (1.0, 2.0)]


def test_steady_window() -> None:
    """Batch 1 began before the trace, batch 4 has not ended: the ends of 1, 2 and 3 are known."""
    spans = [
        Span("backward", 10.0 * batch + i, 10.0 * batch + i + 1, batch, i) for batch in (1, 2, 3) for i in range(2)
    ]
    spans += [Span("backward", 40.0, 41.0, 4, 0), Span("forward", 35.0, 36.0, 4, 1)]
    other = StageTrace(1, 1, [span for span in spans if span.batch != 1])
    trace = stage_of(spans)
    assert whole_batches([trace]) == [1, 2, 3]
    assert whole_batches([trace, other]) == [2, 3]
    assert whole_batches([stage_of([])]) == []
    assert steady_window(trace, 1, 3) == (12.0, 32.0)
    with pytest.raises(ValueError, match="has not traced"):
        steady_window(other, 1, 3)
