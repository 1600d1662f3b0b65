"""Saved and resumed runs in Megatron's training loop, on 1, 2 and 4 stages; checkpoint_runs.py says what they are."""

from __future__ import annotations

import pytest

from tests.distributed.checkpoint_runs import KINDS, SABOTAGED_SAVES, SABOTAGES, resumed_at
from tests.distributed.runs import Runs, evaluations, iterations, losses, weights

RESUMED = [("pp2", kind, iteration) for kind in KINDS for iteration in resumed_at(kind)]
RESUMED += [("pp2", "grows", iteration) for iteration in (4, 5)]
RESUMED += [("pp4", f"replicas {dtype}", 6) for dtype in ("fp32", "bf16")]


def assert_continues(runs: Runs, name: str, whole: str) -> None:
    """A resumed run has the losses of the whole run from there on, and ends with its weights, byte for byte."""
    first = iterations(runs, name)[0]
    assert first > 1
    assert iterations(runs, name) == iterations(runs, whole)[first - 1 :]
    assert losses(runs, name) == losses(runs, whole)[first - 1 :]
    assert evaluations(runs, name)[-2:] == evaluations(runs, whole)[-2:]
    assert weights(runs, name) == weights(runs, whole)


@pytest.mark.parametrize(("launch", "kind", "iteration"), RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(
    launches: dict[str, Runs], launch: str, kind: str, iteration: int
) -> None:
    runs = launches[launch]
    assert iterations(runs, f"{kind}: from {iteration}")[0] == iteration + 1
    assert_continues(runs, f"{kind}: from {iteration}", f"{kind}: saved")


def test_saving_changes_nothing(launches: dict[str, Runs]) -> None:
    """With a checkpoint in every iteration, dropout, and forwards of the next batch in flight."""
    runs = launches["pp2"]
    assert losses(runs, "adam: saved") == losses(runs, "adam: not saved")
    assert weights(runs, "adam: saved") == weights(runs, "adam: not saved")


def test_an_evaluation_without_training(launches: dict[str, Runs]) -> None:
    runs = launches["pp2"]
    name = "grows: only evaluated"
    assert iterations(runs, name) == []
    assert len(evaluations(runs, name)) == 2


def test_what_a_signal_leaves_resumes_exactly(launches: dict[str, Runs]) -> None:
    runs = launches["pp2"]
    assert losses(runs, "adam: terminated in 4") == losses(runs, "adam: saved")[:5]
    assert_continues(runs, "adam: after the signal", "adam: saved")


@pytest.mark.parametrize("name", SABOTAGES)
def test_an_inexact_resume_is_seen(launches: dict[str, Runs], name: str) -> None:
    runs = launches["pp2"]
    assert iterations(runs, name) == iterations(runs, "adam: from 4")
    # Without what was there before, the first batch reads other weights.
    assert losses(runs, name)[0] != losses(runs, "adam: from 4")[0]


@pytest.mark.parametrize("kind", SABOTAGED_SAVES)
def test_an_inexact_save_is_seen(launches: dict[str, Runs], kind: str) -> None:
    runs = launches["pp2"]
    assert losses(runs, f"{kind}: saved") == losses(runs, "adam: saved")
    assert losses(runs, f"{kind}: from 4") != losses(runs, "adam: from 4")


@pytest.mark.parametrize(
    ("resumed", "switched"),
    [
        ("sync: goes on asynchronously", "sync: switches"),
        ("async: goes on synchronously", "async: switches"),
    ],
)
def test_a_checkpoint_of_one_mode_starts_the_other(launches: dict[str, Runs], resumed: str, switched: str) -> None:
    """As if the run had switched there without a checkpoint: the model is z, the optimizer's own iterate."""
    assert_continues(launches["pp2"], resumed, switched)


def test_fine_tuning_starts_anew_from_the_plain_iterate(launches: dict[str, Runs]) -> None:
    runs = launches["pp2"]
    name = "async: fine-tuned"
    assert iterations(runs, name)[0] == 1
    # The first batch reads what was saved as the model, in both modes. The second is where they part.
    synchronous = losses(runs, f"{name} synchronously")
    assert losses(runs, name)[0] == synchronous[0]
    assert losses(runs, name)[2] != synchronous[2]


def test_parts_can_be_left_out(launches: dict[str, Runs]) -> None:
    runs = launches["pp2"]
    assert_continues(runs, "async: from 5", "async: saved")
    # There is no dropout, so no random number is drawn.
    assert_continues(runs, "async: without random state", "async: saved")
    # The pipeline starts from the weights: it lacks momentum, and the older weights.
    assert iterations(runs, "async: without optimizer")[0] == 6
    assert losses(runs, "async: without optimizer")[0] != losses(runs, "async: from 5")[0]


@pytest.mark.parametrize(
    ("launch", "resumed", "saved_in", "saved"),
    [
        ("pp2", "one stage: goes on on two", "pp1", "one stage: saved"),
        ("pp4", "two stages: goes on on four", "pp2", "two stages: saved"),
    ],
)
def test_another_number_of_stages_goes_on(
    launches: dict[str, Runs], launch: str, resumed: str, saved_in: str, saved: str
) -> None:
    """Untied and unclipped: the arithmetic is the same."""
    assert iterations(launches[launch], resumed) == [7, 8, 9, 10]
    assert losses(launches[launch], resumed) == losses(launches[saved_in], saved)[6:]


def test_other_delays_start_the_pipeline_anew(launches: dict[str, Runs]) -> None:
    """A checkpoint of pipedream has no weights for 2bw-async, but optimizer, schedule and data go on."""
    runs = launches["pp2"]
    name = "pipedream: goes on with 2bw-async"
    assert iterations(runs, name) == [7, 8, 9, 10]
    assert losses(runs, name) != losses(runs, "pipedream: from 6")
    assert losses(runs, name) == pytest.approx(losses(runs, "pipedream: from 6"), rel=0.05)
