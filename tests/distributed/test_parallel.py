"""Tensor parallelism and experts in Megatron's training loop; parallel_runs.py says what the runs are."""

from __future__ import annotations

import pytest

from tests.distributed.runs import Runs, losses, norms, weights

TENSOR_PARALLEL = {"adam": 1e-6, "muon": 1e-3, "adam bf16": 2e-3}
"""Runs on two tensor-parallel ranks, and how far their losses may be from those on one: sums in another order."""


@pytest.mark.parametrize("name", [*TENSOR_PARALLEL, "sync"])
def test_stages_change_nothing_under_tensor_parallelism(launches: dict[str, Runs], name: str) -> None:
    """Two stages of two tensor-parallel ranks have the losses of one, byte for byte."""
    assert losses(launches["pp4"], f"tp2: {name}") == losses(launches["pp2"], f"tp2: {name}")


@pytest.mark.parametrize(("name", "bound"), TENSOR_PARALLEL.items())
def test_tensor_parallel_ranks_train_as_one(launches: dict[str, Runs], name: str, bound: float) -> None:
    one, two = launches["pp1"], launches["pp4"]
    assert losses(two, f"tp2: {name}") == pytest.approx(losses(one, f"tp1: {name}"), rel=bound)
    # What every rank has is counted once, and what is cut among them once each.
    first = 1e-5 if "bf16" not in name else 1e-2
    assert norms(two, f"tp2: {name}")[0] == pytest.approx(norms(one, f"tp1: {name}")[0], rel=first)
    # Negative control: a synchronous run is further away than that.
    if name == "adam":
        assert losses(two, "tp2: sync") != pytest.approx(losses(one, "tp1: adam"), rel=bound)


def test_a_tensor_parallel_run_resumes_exactly(launches: dict[str, Runs]) -> None:
    """Tied, clipped, with sequence parallelism and dropout, which every rank draws for itself."""
    runs = launches["pp4"]
    saved, resumed = "tp2, tied, clipped: saved", "tp2, tied, clipped: from 5"
    assert losses(runs, resumed) == losses(runs, saved)[5:]
    assert weights(runs, resumed) == weights(runs, saved)
    assert len(set(weights(runs, saved))) == 4


def test_tokens_are_counted_once(launches: dict[str, Runs]) -> None:
    """All tokens count and all batches are equal: the mean per token is the mean per microbatch, rounded elsewhere."""
    runs = launches["pp4"]
    assert losses(runs, "tp2, per token") == pytest.approx(losses(runs, "tp2, tied, clipped: saved"), rel=2e-3)
    assert norms(runs, "tp2, per token")[0] == pytest.approx(norms(runs, "tp2, tied, clipped: saved")[0], rel=1e-5)


def test_tensor_parallel_replicas(launches: dict[str, Runs]) -> None:
    """Data-parallel replicas of a stage of two tensor-parallel ranks; ranks 0 and 1 are the first replica."""
    runs = launches["pp4"]
    assert losses(runs, "tp2, replicas, sharded") == pytest.approx(losses(runs, "tp2, replicas"), rel=1e-4)
    for name in ("tp2, replicas", "tp2, replicas, sharded"):
        first, second, *other = weights(runs, name)
        assert [first, second] == other
        assert first != second
