"""Tensor parallelism and experts in Megatron's training loop; parallel_runs.py says what the runs are."""

from __future__ import annotations

import pytest

from tests.distributed.parallel_runs import SABOTAGES, experts
from tests.distributed.runs import Runs, losses, norms, scalars, weights

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


@pytest.mark.parametrize("name", ["first stage", "last stage", "layout"])
def test_uneven_stages_train_as_one(launches: dict[str, Runs], name: str) -> None:
    assert losses(launches["pp2"], f"uneven: {name}") == losses(launches["pp1"], "tp1: adam")


EXPERTS = [name for name in experts("", "", []) if "logged" not in name]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_on_two_stages_train_as_on_one(launches: dict[str, Runs], name: str) -> None:
    """Counts of tokens, auxiliary losses and biases are those of the right batch: no byte of a loss differs."""
    assert losses(launches["pp2"], name) == losses(launches["pp1"], name)


def test_experts_on_four_stages_train_as_on_one(launches: dict[str, Runs]) -> None:
    assert losses(launches["pp4"], "moe: bias") == losses(launches["pp1"], "moe: bias")


@pytest.mark.parametrize(
    ("changed", "plain"),
    [
        ("moe: auxiliary losses, logged every 5", "moe: auxiliary losses"),
        ("moe: bias, recomputed", "moe: bias"),
        ("moe: bias, evaluated every 2", "moe: bias"),
    ],
)
def test_the_trajectory_of_experts_does_not_change(launches: dict[str, Runs], changed: str, plain: str) -> None:
    runs = launches["pp2"]
    assert losses(runs, changed) == losses(runs, plain)
    assert weights(runs, changed) == weights(runs, plain)


@pytest.mark.parametrize("name", SABOTAGES)
def test_statistics_of_another_batch_are_seen(launches: dict[str, Runs], name: str) -> None:
    runs = launches["pp2"]
    assert losses(runs, name)[:1] == losses(runs, "moe: bias")[:1]
    assert losses(runs, name) != losses(runs, "moe: bias")


def test_auxiliary_losses_are_logged_with_their_iteration(
    launches: dict[str, Runs], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """On two stages as on one; every fifth iteration their mean."""
    del launches
    (folder,) = (found for found in tmp_path_factory.getbasetemp().glob("loop*") if not found.is_symlink())
    for name in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss"):
        one, two = (scalars(folder / f"moe every pp{p}", name) for p in (1, 2))
        assert list(one) == list(range(1, 11))
        assert two == pytest.approx(one, rel=1e-6)
        assert len(set(one.values())) > 5
        fifth = scalars(folder / "moe fifth pp2", name)
        means = {1: [1], 5: [2, 3, 4, 5], 10: [6, 7, 8, 9, 10]}  # the first iteration is logged too
        assert fifth == pytest.approx({i: sum(one[j] for j in js) / len(js) for i, js in means.items()}, rel=1e-5)


def test_a_run_with_experts_resumes_exactly(launches: dict[str, Runs]) -> None:
    """With both versions of the biases."""
    runs = launches["pp2"]
    assert losses(runs, "moe: from 4") == losses(runs, "moe: saved")[4:]
    assert weights(runs, "moe: from 4") == weights(runs, "moe: saved")


@pytest.mark.parametrize("name", ["all-to-all", "all-gather, bf16", "sharded"])
def test_stages_change_nothing_under_expert_parallelism(launches: dict[str, Runs], name: str) -> None:
    assert losses(launches["pp4"], f"ep2: {name}") == losses(launches["pp2"], f"ep2: {name}")


@pytest.mark.parametrize("launch", ["pp2", "pp4"])
def test_expert_parallel_ranks_train_as_replicas(launches: dict[str, Runs], launch: str) -> None:
    """Clipped by a norm that counts the experts of both ranks, and everything else once."""
    runs = launches[launch]
    assert losses(runs, "ep2: clipped") == pytest.approx(losses(runs, "ep1: clipped"), rel=1e-3)
    assert norms(runs, "ep2: clipped")[:2] == pytest.approx(norms(runs, "ep1: clipped")[:2], rel=1e-4)


def test_matrices_that_replicas_share_are_updated_as_on_each(launches: dict[str, Runs]) -> None:
    """Muon with the distributed optimizer: whole matrices on replicas in turn, sent to the others in the background."""
    runs = launches["pp4"]
    for name in ("muon, sharded", "muon, sharded, overlaps"):
        assert losses(runs, name) == losses(runs, "muon, replicas")
        assert weights(runs, name) == weights(runs, "muon, replicas")
    assert norms(runs, "muon, sharded") == pytest.approx(norms(runs, "muon, replicas"), rel=1e-5)
    for launch in ("pp2", "pp4"):
        runs = launches[launch]
        assert losses(runs, "ep2: all-gather, bf16, sharded") == losses(runs, "ep2: all-gather, bf16")


def test_shared_matrices_with_a_tied_embedding(launches: dict[str, Runs]) -> None:
    """Clipped by a norm that all replicas make up together, which is rounded in another place."""
    runs = launches["pp4"]
    saved, resumed = (f"muon, sharded, tied, clipped: {what}" for what in ("saved", "from 5"))
    assert losses(runs, saved) == pytest.approx(losses(runs, "muon, replicas, tied, clipped"), rel=1e-3)
    assert norms(runs, saved) == pytest.approx(norms(runs, "muon, replicas, tied, clipped"), rel=2e-2)
    assert norms(runs, saved)[0] == pytest.approx(norms(runs, "muon, replicas, tied, clipped")[0], rel=1e-5)
    assert losses(runs, resumed) == losses(runs, saved)[5:]
    assert weights(runs, resumed) == weights(runs, saved)
