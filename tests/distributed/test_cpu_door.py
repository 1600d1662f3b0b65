"""Megatron's own training loop behind the CPU door, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cpu_door.worker import RESUMED
from tests.distributed.ranks import run_cases

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU door stays shut where there is CUDA")

UPDATES, MICROBATCHES = 6, {"pipeline": 4}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(2, "tests.distributed.cpu_door.worker", tmp_path_factory.mktemp("cpu_door"), timeout=900)


@pytest.mark.parametrize("case", RESUMED)
def test_a_continued_run_equals_the_uninterrupted_one(found: dict[str, Any], case: str) -> None:
    whole, continued = found[case]["whole"], found[case]["continued"]
    microbatches = MICROBATCHES.get(case, 2)
    losses, rest = whole["train"][-1], continued["train"][-1]
    assert len(losses) == UPDATES * microbatches
    assert len(rest) == len(losses) // 2
    assert rest == losses[len(rest) :], "the losses of updates 4 to 6 differ"
    assert continued["weights"] == whole["weights"]


@pytest.mark.parametrize("case", RESUMED)
def test_it_learns_and_evaluates(found: dict[str, Any], case: str) -> None:
    whole, continued = found[case]["whole"], found[case]["continued"]
    microbatches = MICROBATCHES.get(case, 2)
    losses, evaluated = whole["train"][-1], whole["evaluated"][-1]
    assert sum(losses[-microbatches:]) < sum(losses[:microbatches]) - 0.2 * microbatches
    # Update 4, then the end on the validation set and on the test set.
    assert len(evaluated) == 3 * microbatches
    assert sum(evaluated[-microbatches:]) < sum(losses[:microbatches]) - 0.2 * microbatches
    assert continued["evaluated"] == whole["evaluated"]


def test_recomputed_dropout_is_that_of_the_forward(found: dict[str, Any]) -> None:
    assert found["recomputed"]["train"] == found["pipeline"]["whole"]["train"]
    assert found["recomputed"]["weights"] == found["pipeline"]["whole"]["weights"]


def test_both_expert_dispatchers_compute_the_same(found: dict[str, Any]) -> None:
    all_to_all, all_gather = found["experts"]["whole"], found["experts, all-gather"]
    for left, right in zip(all_to_all["train"], all_gather["train"], strict=True):
        assert left == pytest.approx(right, rel=1e-5)


def test_sequence_parallelism_changes_no_number(found: dict[str, Any]) -> None:
    tensor, sequence = found["tensor parallel"], found["sequence parallel"]
    assert len(tensor["train"][0]) == 3 * 4
    assert tensor["train"][0] == tensor["train"][1]
    for left, right in zip(tensor["train"], sequence["train"], strict=True):
        assert left == pytest.approx(right, rel=1e-5)


def test_uneven_gathers(found: dict[str, Any]) -> None:
    parts = [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0, 13.0, 14.0]]
    assert found["collectives"] == {
        "uneven": parts,
        "asynchronous": parts,
        "empty": [[], [7.0, 7.0]],
        "even": [[0.0, 0.0], [1.0, 1.0]],
    }


def test_nothing_of_megatron_is_compiled(found: dict[str, Any]) -> None:
    assert found["compiled"] == []
