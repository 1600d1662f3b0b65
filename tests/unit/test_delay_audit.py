"""The delay audit passes what is as planned and sees what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.delay.audit import AuditError, DelayAudit
from megatron_async.optimizer.deferred_step import UpdateResult
from megatron_async.pipeline.plan import Action, Op, make_schedule
from megatron_async.pipeline.weight_versions import WeightVersions
from tests.models import LeafLinear


class Run:
    """A pipeline reduced to what the audit looks at, and the actions of its only stage, one microbatch a batch."""

    def __init__(self, delays: list[int] | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.linear = LeafLinear(3, 2).to(dtype)
        self.versions = WeightVersions(self.linear.parameters(), delays)
        self.delays = self.versions.delays
        self.executor = SimpleNamespace(observer=None)
        self.updates = SimpleNamespace(on_complete=[])
        self.schedule = make_schedule("2bw-async", 1, 0)
        self.audit = DelayAudit(self)  # type: ignore[arg-type]

    def act(self, op: Op, batch: int, version: int | None = None) -> None:
        self.versions.bind(batch)
        oldest = max(batch - max(self.delays), 0)
        self.executor.observer(Action(op, batch, 0, oldest if version is None else version))

    def update(self, number: int, skipped: bool = False) -> None:
        if skipped:
            self.versions.repeat_newest()
        else:
            for tensor in self.versions.begin_write(self.versions.newest + 1):
                tensor.fill_(number + 1.0)
            self.versions.end_write(self.versions.newest + 1)
        for callback in self.updates.on_complete:
            callback(UpdateResult(number, 1.0, skipped))

    def batches(self, first: int, last: int) -> None:
        for k in range(first, last):
            self.act(Op.FORWARD, k)
            self.act(Op.BACKWARD, k)
            self.update(k, skipped=k == 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delays", [[1, 1], [0, 2], [3, 0]])
def test_a_run_as_planned_passes(delays: list[int], dtype: torch.dtype) -> None:
    run = Run(delays, dtype)
    run.batches(0, 6)
    summary = run.audit.summary()
    assert summary == {"stage": 0, "forward": 6, "backward": 6, "update": 6, "delays": dict(summary["delays"])}
    assert set(summary["delays"]) == set(delays)


def test_another_version_is_seen() -> None:
    run = Run()
    run.batches(0, 3)
    run.versions.bind_newest()
    with pytest.raises(AuditError, match=r"forward of batch 3, microbatch 0 read version 3 .*, planned is version 2"):
        run.executor.observer(Action(Op.FORWARD, 3, 0, 2))


def test_a_plan_of_another_delay_is_seen() -> None:
    run = Run()
    run.batches(0, 3)
    with pytest.raises(AuditError, match="the plan says weight version 3, the delay says 2"):
        run.act(Op.BACKWARD, 3, version=3)


def test_weights_that_were_written_over_are_seen() -> None:
    run = Run()
    run.batches(0, 3)
    with torch.no_grad():
        run.versions.tensors(2)[1][0] += 1.0
    with pytest.raises(AuditError, match="weights of parameter 1 are not those that were written as version 2"):
        run.act(Op.BACKWARD, 3)


def test_storage_of_no_version_is_seen() -> None:
    run = Run()
    run.versions.bind_to([p.data.clone() for p in run.linear.parameters()])
    with pytest.raises(RuntimeError, match="none of its versions"):
        run.executor.observer(Action(Op.FORWARD, 0, 0, 0))


def test_an_update_of_another_base_is_seen() -> None:
    run = Run()
    run.batches(0, 3)
    with pytest.raises(AuditError, match="update 5 was applied to weight version 3"):
        run.update(5)


def test_the_report_names_every_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.batches(0, 4)

    def gather(found: list[Any], own: Any) -> None:
        found[:] = [{**own, "stage": 1}, own]

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    wandb = SimpleNamespace(run=SimpleNamespace(summary={}))
    run.audit.report(wandb)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("what was read and updated is what was planned")
    assert lines[1:] == [f">   stage {s}: 4 forwards, 4 backwards, 4 updates; delays in updates: 1" for s in (0, 1)]
    assert wandb.run.summary["delay audit/stage 1/delays"] == "{1: 6}"
