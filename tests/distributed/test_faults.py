"""Faults in runs of Megatron's training loop on two stages; fault_cases.py says which.

MEGATRON_ASYNC_FAULTS=20 tries that many random points of each kind; the default keeps the suite short.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.fault_cases import Fault, faults
from tests.distributed.ranks import run_alone

FAULTS = list(faults(random.Random(20261201)))
DEADLY = [fault for fault in FAULTS if fault.kind != "not a number"]
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder: Path = tmp_path_factory.mktemp("faults")
    return run_alone("tests.distributed.fault_worker", folder, timeout=120 + 40 * len(FAULTS))


def losses(found: Found, name: str) -> list[float]:
    """Losses of a run as the last stage reported them."""
    return [entry["lm loss"] for entry in found[name]["ranks"][1]["iterations"]]


def test_the_reference_runs(found: Found) -> None:
    assert found["reference"]["status"] == [0, 0]
    assert len(losses(found, "reference")) == 10


@pytest.mark.parametrize("fault", DEADLY, ids=lambda fault: fault.name)
def test_the_others_end_with_an_error(found: Found, fault: Fault) -> None:
    outcome = found[fault.name]
    assert not outcome["hung"]
    for rank, status in enumerate(outcome["status"]):
        assert status == (-9 if rank == fault.rank and fault.kind.startswith("killed") else 1)
        assert status == -9 or "Error" in outcome["logs"][rank]


@pytest.mark.parametrize("fault", DEADLY, ids=lambda fault: fault.name)
def test_the_last_complete_checkpoint_resumes_exactly(found: Found, fault: Fault) -> None:
    outcome, resumed = found[fault.name], f"{fault.name}, resumed"
    assert found[resumed]["status"] == [0, 0]
    assert outcome["checkpoint"] in range(0, 10, 2)
    assert losses(found, resumed) == losses(found, "reference")[outcome["checkpoint"] :]
    assert [r["weights"] for r in found[resumed]["ranks"]] == [r["weights"] for r in found["reference"]["ranks"]]


def test_a_failed_save_leaves_the_checkpoint_before(found: Found) -> None:
    (fault,) = (fault for fault in FAULTS if fault.kind == "full disk")
    assert found[fault.name]["checkpoint"] == fault.iteration - 2
    assert "CheckpointException" in found[fault.name]["logs"][0]


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.kind == "not a number"], ids=lambda fault: fault.name)
def test_a_gradient_that_is_not_a_number_skips_the_update_on_every_stage(found: Found, fault: Fault) -> None:
    outcome = found[fault.name]
    assert outcome["status"] == [0, 0]
    trained = losses(found, fault.name)
    assert len(trained) == 10
    # Batch k + 2 is the first to read what update k would have made.
    assert trained[: fault.point + 2] == losses(found, "reference")[: fault.point + 2]
    assert trained[fault.point + 2 :] != losses(found, "reference")[fault.point + 2 :]
    assert trained == pytest.approx(losses(found, "reference"), rel=0.2)
    said = f"iteration {fault.point + 1}: update skipped, gradient norm nan"
    assert said in found[fault.name]["said"][1]
    # Each stage learnt of it: the last iteration that was skipped is the same, and so is the learning rate after it.
    first, last = (rank["iterations"] for rank in outcome["ranks"])
    assert [entry["lr"] for entry in first] == [entry["lr"] for entry in last]


def test_a_truncated_checkpoint_is_named(found: Found) -> None:
    for log in found["truncated"]["logs"]:
        assert "the checkpoint cannot be read, it may be incomplete" in log
        assert "choose another one with --ckpt-step, there are those of iterations 2, 4, 6, 8, 10" in log
    assert found["truncated"]["status"] == [1, 1]
    assert found["truncated, the one before"]["status"] == [0, 0]


def test_an_empty_data_set_is_named(found: Found) -> None:
    assert found["no data"]["status"] == [1, 1]
    assert "--data-path: the dataset" in found["no data"]["logs"][0]
    assert "is empty" in found["no data"]["logs"][0]
