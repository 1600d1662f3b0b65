"""Traces of real runs on two stages: every action of the plan in the traced steps, once, as it was planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async.observe.timeline import account, read_traces, steady_window, whole_batches
from megatron_async.pipeline.plan import Action, Op, TwoBufferedWeights, run_steps
from tests.distributed.ranks import torchrun
from tests.distributed.trace_cases import BATCHES, FIRST_STEP, MICROBATCHES, STAGES, STEPS, SYNCHRONOUS, WARMUP_FACTORS

Events = list[tuple[str, dict[str, int]]]
NAMES = {Op.SEND_ACTIVATION: "send", Op.SEND_GRADIENT: "send", Op.FORWARD: "forward", Op.BACKWARD: "backward"}
TRACED = range(FIRST_STEP - 1, FIRST_STEP - 1 + STEPS)
"""Batches that end in the traced steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("trace")
    done = torchrun(2, "-m", "tests.distributed.trace_worker", str(found), timeout=300)
    assert done.returncode == 0, done.stdout[-6000:]
    return found


def events_of(folder: Path, stage: int, *names: str) -> Events:
    content: dict[str, Any] = json.loads((folder / f"trace-rank-{stage:05d}.json").read_text())
    spans = [e for e in content["traceEvents"] if e["ph"] == "X" and e["name"] in names]
    assert all(e["dur"] >= 0 for e in spans)
    assert [e["ts"] for e in spans] == sorted(e["ts"] for e in spans)
    return [(e["name"], e["args"]) for e in spans]


def planned(stage: int, warmup_factor: int) -> Events:
    """What the plan has the stage do in the traced steps, in order."""

    def arguments(action: Action) -> dict[str, int]:
        version = {"version": action.version} if action.op in (Op.FORWARD, Op.BACKWARD) else {}
        return {"batch": action.batch, "microbatch": action.microbatch, **version}

    schedule = TwoBufferedWeights(STAGES, stage, warmup_factor)
    return [
        (NAMES[action.op], arguments(action))
        for step in run_steps([MICROBATCHES] * BATCHES)
        for action in schedule.actions(step)
        if step.batch in TRACED and action.op in NAMES
    ]


@pytest.mark.parametrize("factor", WARMUP_FACTORS)
@pytest.mark.parametrize("stage", range(STAGES))
def test_every_action_of_the_plan(folder: Path, stage: int, factor: int) -> None:
    expected = planned(stage, factor)
    assert events_of(folder / f"factor{factor}", stage, "forward", "backward", "send") == expected
    assert sum(name == "backward" for name, _ in expected) == STEPS * MICROBATCHES


@pytest.mark.parametrize("factor", WARMUP_FACTORS)
@pytest.mark.parametrize("stage", range(STAGES))
def test_every_message_is_waited_for_once(folder: Path, stage: int, factor: int) -> None:
    consumer = "forward" if stage else "backward"
    expected = [(e["batch"], e["microbatch"]) for name, e in planned(stage, factor) if name == consumer]
    found = [(e["batch"], e["microbatch"]) for _, e in events_of(folder / f"factor{factor}", stage, "receive wait")]
    assert found == expected


@pytest.mark.parametrize("factor", WARMUP_FACTORS)
@pytest.mark.parametrize("stage", range(STAGES))
def test_updates(folder: Path, stage: int, factor: int) -> None:
    """Update k begins at the end of step k, and steps in step k+1: a pipeline without a flush."""
    traces = folder / f"factor{factor}"
    assert [e["batch"] for _, e in events_of(traces, stage, "begin update")] == list(TRACED)
    steps = events_of(traces, stage, "step")
    assert steps == [("step", {"batch": k - 1, "version": k}) for k in TRACED]
    assert [e["batch"] for _, e in events_of(traces, stage, "norm wait")] == [k - 1 for k in TRACED]


@pytest.mark.parametrize("stage", range(STAGES))
def test_megatrons_schedule(folder: Path, stage: int) -> None:
    """1F1B: every forward and backward of the traced batches, in its order, and nothing of the evaluation between."""
    expected: Events = []
    for batch in TRACED:
        ahead = min(STAGES - 1 - stage, MICROBATCHES)
        order = [("forward", i) for i in range(ahead)]
        for i in range(MICROBATCHES):
            order += [("forward", ahead + i)] * (ahead + i < MICROBATCHES) + [("backward", i)]
        expected += [(name, {"batch": batch, "microbatch": i, "version": batch}) for name, i in order]
        expected += [
            ("reduction wait", {"batch": batch}),
            ("step", {"batch": batch, "version": batch + 1}),
            ("norm wait", {"batch": batch}),
        ]
    names = ("forward", "backward", "reduction wait", "step", "norm wait")
    assert events_of(folder / SYNCHRONOUS, stage, *names) == expected


@pytest.mark.parametrize("stage", range(STAGES))
def test_messages_of_megatrons_schedule(folder: Path, stage: int) -> None:
    """Each message is received once; what is received together with a send counts as a receive."""
    received = [(e["batch"], e["microbatch"]) for _, e in events_of(folder / SYNCHRONOUS, stage, "receive wait")]
    assert received == [(k, i) for k in TRACED for i in range(MICROBATCHES)]
    sent = [(e["batch"], e["microbatch"]) for _, e in events_of(folder / SYNCHRONOUS, stage, "send")]
    # The first activation of stage 0, the last gradient of stage 1; all others go out with a receive.
    assert sent == [(k, MICROBATCHES - 1 if stage else 0) for k in TRACED]


@pytest.mark.parametrize("name", [SYNCHRONOUS, *(f"factor{f}" for f in WARMUP_FACTORS)])
def test_one_time_line(folder: Path, name: str) -> None:
    """A gradient is received after it was made, an activation as well: on the clock that both ranks share."""
    stages = read_traces(folder / name)
    assert [trace.stage for trace in stages] == [0, 1]
    starts = {(s.batch, s.microbatch): s.start for s in stages[1].spans if s.name == "backward"}
    ends = {(s.batch, s.microbatch): s.end for s in stages[0].spans if s.name == "backward"}
    common = starts.keys() & ends.keys()
    assert len(common) == STEPS * MICROBATCHES
    assert all(starts[key] < ends[key] for key in common)
    forwards = {(s.batch, s.microbatch): s.end for s in stages[1].spans if s.name == "forward"}
    made = {(s.batch, s.microbatch): s.start for s in stages[0].spans if s.name == "forward"}
    assert all(made[key] < forwards[key] for key in made.keys() & forwards.keys())


@pytest.mark.parametrize("name", [SYNCHRONOUS, *(f"factor{f}" for f in WARMUP_FACTORS)])
def test_fractions_add_up(folder: Path, name: str) -> None:
    stages = read_traces(folder / name)
    assert whole_batches(stages) == list(TRACED)
    for trace in stages:
        found = account(trace, *steady_window(trace, TRACED[0], TRACED[-1]))
        parts = (found.busy, found.receive, found.update, found.send, found.other)
        assert sum(parts) == pytest.approx(1.0)
        assert 0 < found.busy < 1
        assert found.receive > 0
