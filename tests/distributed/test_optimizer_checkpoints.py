"""Sharded checkpoints of every optimizer: a continued run equals the uninterrupted one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.optimizer_checkpoints_worker import CASES
from tests.distributed.ranks import run_cases


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("optimizer_checkpoints")
    return run_cases(2, "tests.distributed.optimizer_checkpoints_worker", folder, 600)


def halves(case: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of updates 4 to 6: of the whole run, and of the continued one."""
    whole, continued = case["whole"]["train"][-1], case["continued"]["train"][-1]
    return whole[len(whole) // 2 :], continued


@pytest.mark.parametrize("name", CASES)
def test_a_continued_run_equals_the_uninterrupted_one(found: dict[str, Any], name: str) -> None:
    whole, continued = halves(found[name])
    assert len(whole) >= 6
    assert continued == whole
    assert found[name]["continued"]["weights"] == found[name]["whole"]["weights"]


def test_state_that_is_lost_is_seen(found: dict[str, Any]) -> None:
    whole, continued = halves(found["normuon, forgetful"])
    assert continued[:4] == whole[:4]  # before the first update of the continued run
    assert continued != whole


def test_another_pipeline_size_goes_on(found: dict[str, Any]) -> None:
    """Two replicas of one stage in place of two stages: the same batches, in two halves."""
    whole, _ = halves(found["soap"])
    replicas = found["soap, on one stage"]["train"]
    for update in range(3):
        mine = [loss for losses in replicas for loss in losses[2 * update : 2 * update + 2]]
        assert sum(mine) / 4 == pytest.approx(sum(whole[4 * update : 4 * update + 4]) / 4, rel=1e-3)
