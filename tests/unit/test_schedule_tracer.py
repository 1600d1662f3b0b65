"""The tracer of Megatron's own schedules, with stand-ins for Megatron's functions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.observe.trace import Trace
from megatron_async.patches.tracing import ScheduleTracer, tracing

NO_CHUNKS = SimpleNamespace(virtual_pipeline_model_parallel_size=None)
TWO_CHUNKS = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
NOTHING: dict[str, Any] = {
    "tensor_send_next": None,
    "tensor_send_prev": None,
    "recv_prev": False,
    "recv_next": False,
    "tensor_shape": (1,),
}
TENSOR = torch.ones(1)


@pytest.fixture
def tracer(tmp_path: Path) -> ScheduleTracer:
    found = ScheduleTracer()
    found.trace = Trace(tmp_path, rank=0, stage=0, first_step=1, steps=2, device=torch.device("cpu"))
    return found


def written(tracer: ScheduleTracer) -> list[tuple[str, dict[str, int]]]:
    tracer.trace.close()
    events = json.loads(tracer.trace.path.read_text())["traceEvents"]
    return [(e["name"], e["args"]) for e in events if e["ph"] == "X"]


def row(tracer: ScheduleTracer, attribute: str) -> Any:
    """What puts the replacement in the place of an original."""
    (found,) = [r for r in tracing(tracer) if r.attribute == attribute]
    return found.replace


def test_backwards_find_their_microbatch_in_any_order(tracer: ScheduleTracer) -> None:
    """Interleaved schedules: the output tensor is what a forward and its backward have in common."""
    made: list[Any] = [[torch.ones(1)], torch.ones(1), torch.ones(1)]
    outputs = iter(made)
    forward = row(tracer, "forward_step")(lambda *args, **kwargs: (next(outputs), torch.tensor(1)))
    backward = row(tracer, "backward_step")(lambda *args: None)
    for microbatch, chunk in ((0, 0), (1, 0), (0, 1)):
        forward("function", current_microbatch=microbatch, vp_stage=chunk)
    for output in (made[2], made[0], made[1]):
        backward(None, output, None, None)
    assert [(name, e["microbatch"], e["chunk"]) for name, e in written(tracer)] == [
        ("forward", 0, 0),
        ("forward", 1, 0),
        ("forward", 0, 1),
        ("backward", 0, 1),
        ("backward", 0, 0),
        ("backward", 1, 0),
    ]


def communicate(tracer: ScheduleTracer, communicator: Any, requests: Any = None, **kwargs: Any) -> Any:
    replaced = row(tracer, "P2PCommunicator._communicate")(lambda *args, **kwargs: ("prev", "next", requests))
    return replaced(communicator, **NOTHING | kwargs)


def test_messages_count_per_direction_and_batch(tracer: ScheduleTracer) -> None:
    step = row(tracer, "ChainedOptimizer.step")(lambda optimizer: None)
    for _ in range(2):
        communicate(tracer, NO_CHUNKS, recv_prev=True)
        communicate(tracer, NO_CHUNKS, tensor_send_next=TENSOR)
        communicate(tracer, NO_CHUNKS, recv_prev=True, tensor_send_prev=TENSOR)
        communicate(tracer, NO_CHUNKS, tensor_send_prev=TENSOR)
        step(None)
    found = [(name, e["batch"], e["microbatch"]) for name, e in written(tracer) if name != "step"]
    expected = [("receive wait", 0), ("send", 0), ("receive wait", 1), ("send", 1)]
    assert found == [(name, batch, i) for batch in range(2) for name, i in expected]


def test_messages_of_chunks_have_no_number(tracer: ScheduleTracer) -> None:
    communicate(tracer, TWO_CHUNKS, recv_prev=True, recv_next=True, tensor_send_next=TENSOR)
    assert written(tracer) == [("receive wait", {"batch": 0, "version": 0})]


def test_overlapped_messages_are_timed_when_they_are_waited_for(tracer: ScheduleTracer) -> None:
    waited: list[str] = []
    requests = {name: SimpleNamespace(wait=lambda n=name: waited.append(n)) for name in ("recv_prev", "send_next")}
    prev, following, handles = communicate(
        tracer, TWO_CHUNKS, requests, recv_prev=True, tensor_send_next=TENSOR, wait_on_reqs=False
    )
    assert (prev, following) == ("prev", "next")
    assert waited == []
    handles["send_next"].wait()
    handles["recv_prev"].wait()
    assert waited == ["send_next", "recv_prev"]
    assert [name for name, _ in written(tracer)] == ["send", "send", "receive wait"]


def test_an_evaluation_is_not_traced(tracer: ScheduleTracer) -> None:
    forward = row(tracer, "forward_step")(lambda *args, **kwargs: (TENSOR, torch.tensor(1)))
    with torch.no_grad():
        assert forward("function", current_microbatch=0)[0] is TENSOR
        assert communicate(tracer, NO_CHUNKS, recv_prev=True) == ("prev", "next", None)
    assert written(tracer) == []


@pytest.mark.parametrize("fails", [False, True])
def test_optimizers_inside_optimizers_are_one_step(tracer: ScheduleTracer, fails: bool) -> None:
    def step(optimizer: Any) -> str:
        if fails:
            raise FloatingPointError("overflow")
        return "done"

    inner = row(tracer, "FP32Optimizer.step")(step)
    outer = row(tracer, "ChainedOptimizer.step")(lambda optimizer: inner(optimizer))
    for batch in range(2):
        if fails:
            with pytest.raises(FloatingPointError):
                outer(None)
        else:
            assert outer(None) == "done"
        assert (tracer.batch, tracer.trace.step) == (batch + 1, batch + 2)
    assert written(tracer) == [("step", {"batch": k, "version": k + 1}) for k in (0, 0, 1, 1)]


@pytest.mark.parametrize("ends", [None, SystemExit(0)])
def test_training_makes_and_writes_the_trace(tracer: ScheduleTracer, ends: SystemExit | None) -> None:
    trace = tracer.trace
    made = ScheduleTracer(lambda: trace)

    def train() -> str:
        assert made.trace is trace
        if ends is not None:
            raise ends
        return "trained"

    replaced = row(made, "train")(train)
    assert not trace.path.exists()
    if ends is None:
        assert replaced() == "trained"
    else:
        with pytest.raises(SystemExit):
            replaced()
    assert trace.path.exists()
