"""Streams beside the computation: nothing on CPU; on CUDA, by stand-ins, the calls and their order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.pipeline.streams import HostCopy, SideStream

CUDA = torch.device("cuda", 0)


class Device:
    """Notes what is asked of CUDA, with the stream that is current then."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current = "compute"

    def note(self, *what: Any) -> None:
        self.calls.append((self.current, *what))

    def make_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(name="side", wait_stream=lambda other: self.note("side waits for", other))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def event(self) -> Any:
        return SimpleNamespace(record=lambda: self.note("record"), synchronize=lambda: self.note("host waits"))


class Tensor:
    """A CUDA tensor, or its pinned copy."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = CUDA
        self._device, self.name = device, name

    def record_stream(self, stream: Any) -> None:
        self._device.note("record_stream", self.name, stream)

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        self._device.note("copy", source.name, self.name, non_blocking)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Stream", device.make_stream)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    return device


def test_on_cpu_nothing_happens() -> None:
    side = SideStream(torch.device("cpu"))
    tensor = torch.ones(2)
    with side(after_computation=True):
        side.hand_over(tensor)
    assert not side.is_real
    waited = []
    copy = HostCopy(SimpleNamespace(wait=lambda: waited.append(True)), tensor)  # type: ignore[arg-type]
    assert not waited
    assert copy.join() is tensor
    assert waited


def test_what_is_issued_inside_does_not_wait_for_the_computation(device: Device) -> None:
    side = SideStream(CUDA)
    assert side.is_real
    with side():
        device.note("receive")
    assert device.calls == [("side", "receive")]
    assert device.current == "compute"


def test_unless_it_reads_its_results(device: Device) -> None:
    with SideStream(CUDA)(after_computation=True):
        device.note("norm")
    assert device.calls == [("compute", "side waits for", "compute"), ("side", "norm")]


def test_a_received_tensor_is_recorded_on_the_stream_that_uses_it(device: Device) -> None:
    SideStream(CUDA).hand_over(Tensor(device, "activation"))  # type: ignore[arg-type]
    assert device.calls == [("compute", "record_stream", "activation", "compute")]


def test_the_host_waits_for_one_copy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = Tensor(device, "pinned")
    made: list[dict[str, Any]] = []

    def empty_like(_: Any, **kwargs: Any) -> Tensor:
        made.append(kwargs)
        return pinned

    monkeypatch.setattr(torch, "empty_like", empty_like)
    work = SimpleNamespace(wait=lambda: device.note("wait for the collective"))
    with SideStream(CUDA)():
        copy = HostCopy(work, Tensor(device, "gathered"))  # type: ignore[arg-type]
    assert copy.join() is pinned  # type: ignore[comparison-overlap]
    assert made == [{"device": "cpu", "pin_memory": True}]
    assert device.calls == [
        ("side", "wait for the collective"),
        ("side", "copy", "gathered", "pinned", True),
        ("side", "record"),
        ("compute", "host waits"),
    ]
