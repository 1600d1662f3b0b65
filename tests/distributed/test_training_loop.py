"""The asynchronous pipeline inside Megatron's own training loop, on 1, 2 and 4 stages.

Three launches train about thirty small models with scripts/pretrain_gpt.py; see loop_runs.py for what they are.
"""

from __future__ import annotations

import math

import pytest

from tests.distributed.loop_runs import STOCK, everywhere, mitigated
from tests.distributed.runs import Runs, evaluations, iterations, losses, scalars, weights

EXACT = [(name, stages) for name in everywhere("", 1) if name != "tied and clipped" for stages in (2, 4)]
EXACT += [(name, 2) for name in mitigated("", 1)]


def test_every_run_ends_well(launches: dict[str, Runs]) -> None:
    for runs in launches.values():
        for name, ranks in runs.items():
            assert [rank["status"] for rank in ranks] == [0] * len(ranks), name
            assert all(math.isfinite(loss) for loss in losses(runs, name)), name


@pytest.mark.parametrize(("name", "stages"), EXACT)
def test_losses_equal_those_of_one_stage(launches: dict[str, Runs], name: str, stages: int) -> None:
    """Untied weights and no clipping: the arithmetic is the same, so are the bytes."""
    one, more = launches["pp1"], launches[f"pp{stages}"]
    assert losses(more, name) == losses(one, name)
    assert evaluations(more, name) == evaluations(one, name)


@pytest.mark.parametrize("stages", [2, 4])
def test_losses_with_tied_weights_and_clipping_are_close(launches: dict[str, Runs], stages: int) -> None:
    """One stage adds both uses of a tied weight for each microbatch, and rounds the norm in another place."""
    name = "tied and clipped"
    one, more = losses(launches["pp1"], name), losses(launches[f"pp{stages}"], name)
    assert one[:2] == more[:2]  # before the first update is read
    assert more == pytest.approx(one, rel=2e-3)
    assert more != one


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", ["pipedream", "wpipe"])
def test_simulated_delays_are_those_of_the_pipeline(launches: dict[str, Runs], schedule: str, stages: int) -> None:
    name = f"{schedule} of {stages}"
    simulated, real = launches["pp1"], launches[f"pp{stages}"]
    assert losses(simulated, name) == losses(real, name)
    assert evaluations(simulated, name) == evaluations(real, name)
    # Negative control: other delays give other losses. (wpipe delays the same half, whatever the number of stages.)
    other = {"pipedream": f"pipedream of {6 - stages}", "wpipe": f"pipedream of {stages}"}[schedule]
    if (schedule, stages) != ("wpipe", 2):  # two stages have the same delays under both
        assert losses(simulated, other) != losses(real, name)


def test_synchronous_phases(launches: dict[str, Runs]) -> None:
    """The first iterations are those of a synchronous run; x and z are one while training is synchronous."""
    runs = launches["pp1"]
    evaluated = evaluations(runs, "phases")
    halves = evaluated[: len(evaluated) // 2 * 2]
    x, z = halves[::2], halves[1::2]
    assert x[0] != z[0]  # at iteration 5, in the asynchronous phase
    assert x[1:] == z[1:]  # at iteration 10, after the cooldown
    assert losses(runs, "phases")[:3] != losses(runs, "adam")[:3]
    assert losses(runs, "phases")[:1] == losses(runs, "adam")[:1]


def test_iterations_can_be_skipped(launches: dict[str, Runs]) -> None:
    """Their data are read and thrown away."""
    runs = launches["pp1"]
    assert iterations(runs, "skips 5 and 6") == [1, 2, 3, 4, 7, 8, 9, 10]


def test_batches_can_grow(launches: dict[str, Runs]) -> None:
    """The first batch of another size is prefetched while the last one of the old size runs."""
    runs = launches["pp2"]
    assert iterations(runs, "grows") == list(range(1, 11))
    assert losses(runs, "grows") != losses(runs, "adam")


@pytest.mark.parametrize("name", ["compensated", "predicted"])
def test_mitigations_change_the_run(launches: dict[str, Runs], name: str) -> None:
    runs = launches["pp1"]
    plain = {"compensated": "adam", "predicted": "muon with feedback"}[name]
    assert losses(runs, name)[0] == losses(runs, plain)[0]
    assert losses(runs, name) != losses(runs, plain)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_doubled_warm_up_changes_no_number(launches: dict[str, Runs], stages: int) -> None:
    runs = launches[f"pp{stages}"]
    assert losses(runs, "adam, warm-up 2") == losses(runs, "adam")
    assert weights(runs, "adam, warm-up 2") == weights(runs, "adam")


def test_the_delay_is_there(launches: dict[str, Runs]) -> None:
    """Batches 0 and 1 read the same weights; a synchronous run sees the first update one batch earlier."""
    runs = launches["pp2"]
    synchronous, asynchronous = losses(runs, "1f1b"), losses(runs, "dropout")
    assert synchronous[0] == asynchronous[0]
    assert synchronous[2] != asynchronous[2]


@pytest.mark.parametrize(
    ("changed", "plain"),
    [
        ("evaluated every 2", "plain"),
        ("logged every 5", "plain"),
        ("logged every 5, again", "plain"),
        ("dropout, evaluated every 3", "dropout"),
        ("dropout, recomputed", "dropout"),
    ],
)
def test_the_trajectory_does_not_change(launches: dict[str, Runs], changed: str, plain: str) -> None:
    """Evaluation and logging complete an update early; recomputation runs the forward again."""
    runs = launches["pp2"]
    assert losses(runs, changed) == losses(runs, plain)
    assert weights(runs, changed) == weights(runs, plain)


def test_gradients_per_token(launches: dict[str, Runs]) -> None:
    """All tokens count and all batches are equal: the mean per token is the mean per microbatch, rounded elsewhere."""
    runs = launches["pp2"]
    assert losses(runs, "per token")[:2] == pytest.approx(losses(runs, "plain")[:2], rel=1e-6)
    assert losses(runs, "per token") == pytest.approx(losses(runs, "plain"), rel=2e-3)
    norms = [[entry["norm"] for entry in runs[name][-1]["iterations"]] for name in ("per token", "plain")]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


@pytest.mark.parametrize(
    ("changed", "plain"),
    [
        ("replicas, evaluated", "replicas"),
        ("replicas, hooks", "replicas"),
        ("replicas, sharded, overlaps", "replicas, sharded"),
    ],
)
def test_overlaps_change_no_number(launches: dict[str, Runs], changed: str, plain: str) -> None:
    runs = launches["pp4"]
    assert losses(runs, changed) == losses(runs, plain)
    assert weights(runs, changed) == weights(runs, plain)


@pytest.mark.parametrize(
    ("name", "reference", "bound"),
    [
        ("replicas", "one replica", 2e-3),
        ("replicas, sharded", "replicas", 2e-3),
        ("replicas, sharded, bf16", "replicas, bf16", 5e-3),
    ],
)
def test_replicas_train_as_one(launches: dict[str, Runs], name: str, reference: str, bound: float) -> None:
    """The same batches, clipped, with sums in another order."""
    runs = launches["pp4"]
    assert losses(runs, name) == pytest.approx(losses(runs, reference), rel=bound)
    norms = [[entry["norm"] for entry in runs[run][-1]["iterations"]] for run in (name, reference)]
    assert norms[0][:2] == pytest.approx(norms[1][:2], rel=1e-5 if "bf16" not in name else 1e-2)


@pytest.mark.parametrize("name", ["replicas", "replicas, sharded", "replicas, sharded, bf16"])
def test_replicas_hold_equal_weights(launches: dict[str, Runs], name: str) -> None:
    """Ranks are ordered with the replicas of a stage side by side."""
    digests = weights(launches["pp4"], name)
    assert digests[0] == digests[1] != digests[2] == digests[3]


def test_dropout_is_on(launches: dict[str, Runs]) -> None:
    assert losses(launches["pp2"], "dropout") != losses(launches["pp2"], "plain")


@pytest.mark.parametrize(
    ("name", "iterations"),
    # A signal or a time-out travels with the next update that begins, and is known to all ranks when it is complete.
    [("exits at 6", 6), ("terminated in 4", 5), ("out of time", 1)],
)
def test_an_exit_is_a_prefix_of_the_run(launches: dict[str, Runs], name: str, iterations: int) -> None:
    """Planned, by a signal, and by a time limit, while forwards of the next batch have already run."""
    runs = launches["pp2"]
    assert losses(runs, name) == losses(runs, "plain")[:iterations]


def test_norms_are_reported_for_the_logged_iterations(launches: dict[str, Runs]) -> None:
    """Elsewhere the norm is not known yet, and Megatron gets none rather than another iteration's."""
    every = [entry["norm"] for entry in launches["pp2"]["plain"][-1]["iterations"]]
    fifth = [entry["norm"] for entry in launches["pp2"]["logged every 5"][-1]["iterations"]]
    assert all(norm is not None for norm in every)
    logged = (0, 4, 9)
    assert [fifth[i] for i in logged] == [every[i] for i in logged]
    assert all(norm is None for i, norm in enumerate(fifth) if i not in logged)


def test_late_norms_reach_tensorboard_under_their_own_iteration(
    launches: dict[str, Runs], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = next(tmp_path_factory.getbasetemp().glob("loop*/tensorboard"))
    written = scalars(folder, "grad-norm")
    every = [entry["norm"] for entry in launches["pp2"]["plain"][-1]["iterations"]]
    assert written == pytest.approx(dict(enumerate(every, start=1)), rel=1e-6)


def test_learning_rates_are_megatrons(launches: dict[str, Runs]) -> None:
    runs = launches["pp2"]
    rates = [[entry["lr"] for entry in runs[name][-1]["iterations"]] for name in ("dropout", "1f1b")]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) == len(rates[0])


@pytest.mark.parametrize("name", STOCK)
def test_megatrons_own_schedule_is_untouched(launches: dict[str, Runs], name: str) -> None:
    runs = launches["pp2"]
    without = f"{name}, without the plugin"
    assert losses(runs, name) == losses(runs, without)
    assert evaluations(runs, name) == evaluations(runs, without)
    assert weights(runs, name) == weights(runs, without)
    assert [e["norm"] for e in runs[name][-1]["iterations"]] == [e["norm"] for e in runs[without][-1]["iterations"]]
