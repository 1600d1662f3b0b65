"""The pipeline against the oracle, byte for byte: gradients, weight versions, masters, optimizer state, norm, losses.

Four ranks are started once; see exactness_worker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.exactness_cases import Case, byte_cases, equal_cases, unequal_cases
from tests.distributed.ranks import run_cases

EQUAL = [Case(**case).name for case in equal_cases()]
UNEQUAL = [Case(**case).name for case in unequal_cases()]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("exactness")
    return run_cases(4, "tests.distributed.exactness_worker", folder, timeout=1200)


def test_names_are_unique() -> None:
    assert len(set(EQUAL + UNEQUAL)) == len(EQUAL) + len(UNEQUAL)


@pytest.mark.parametrize("name", EQUAL)
def test_equals_the_oracle(findings: dict[str, Any], name: str) -> None:
    found = findings[name]
    assert found["compared"] == found["expected"] >= 9
    assert found["differences"] == []


@pytest.mark.parametrize("name", UNEQUAL)
def test_negative_control_is_seen(findings: dict[str, Any], name: str) -> None:
    found = findings[name]
    assert found["compared"] == found["expected"]
    assert found["differences"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_error_feedback_keeps_no_byte(findings: dict[str, Any], stages: int, optimizer: str, dtype: str) -> None:
    """Every tensor that is alive between two steps, counted on every rank, with and without feedback."""
    names = [
        Case(stages=stages, microbatches=2 * stages + 1, optimizer=optimizer, ef=c, dtype=dtype).name
        for c in (0.0, 1.0)
    ]
    without, feedback = (sorted(findings[name]["bytes"]) for name in names)
    assert feedback == without
    assert min(without) > 0


@pytest.mark.parametrize("name", sorted(case.name for case in byte_cases()))
def test_memory_is_that_of_the_table(findings: dict[str, Any], name: str) -> None:
    """Every tensor that is alive between two steps, on every rank: less than 64 bytes more than the table allows."""
    found = findings[name]
    for counted, allowed in zip(found["bytes"], found["table"], strict=True):
        assert allowed > 10_000
        assert 0 <= counted - allowed < 64
