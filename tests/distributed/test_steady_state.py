"""No stage waits for another in a training step, and nothing that is sent between ranks goes unseen.

One launch of four ranks trains small models in Megatron's loop, as four stages and as two stages of two replicas, and
records every operation between ranks; ``pytest -rP`` prints those of one steady step of each run. See steady_state.py
for how, steady_state_rules.py for the rule and steady_state_cases.py for the runs.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_cases
from tests.distributed.steady_state import Moment, Operation
from tests.distributed.steady_state_cases import ALL, CASES, LOGGED_STEP, RANKS, STEADY, Case
from tests.distributed.steady_state_rules import Course, courses, problem, table, violations

AGREEMENT = ("all_gather_single", "megatron_async agreement")
TIED = ("allreduce", "EMBEDDING_GROUP")
UPDATE = {"deferred_step.py _take", "agreement.py start"}
"""Where the sum of tied gradients and the agreement are issued."""

SHOWN = 5
"""The step whose table is printed."""

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    worker = "tests.distributed.steady_state_worker"
    return run_cases(RANKS, worker, tmp_path_factory.mktemp("steady_state"), 600)


def kind(operation: Operation) -> tuple[str, str]:
    return operation.name, operation.group


def of_step(course: Course, step: int) -> list[Operation]:
    """What a rank says to other stages in a step, and what it starts in the next because of that."""
    return [o for o in course.across(range(step, step + 2)) if course.origin(o).issued.step == step]


def function(where: str) -> str:
    """File and function of a call site."""
    location, name = where.split()
    return f"{Path(location).name.split(':')[0]} {name}"


def offenders(run: list[Course], steps: range) -> set[str]:
    """Functions that issue what makes a stage wait for another."""
    return {
        function(operation.where) for course in run for operation in course.across(steps) if problem(course, operation)
    }


def expected(case: Case, stage: int) -> Counter[tuple[str, str]]:
    """All that a stage says to other stages in a step."""
    last = case.stages - 1
    count = Counter({AGREEMENT: 1})
    if case.is_tied and stage in (0, last):
        count[TIED] = 1
    if stage > 0:
        count["recv", "megatron_async activations"] = count["send", "megatron_async gradients"] = case.microbatches
    if stage < last:
        count["send", "megatron_async activations"] = count["recv", "megatron_async gradients"] = case.microbatches
    return count


def test_every_run_ends_well(results: Results) -> None:
    for name in ALL:
        assert [rank["status"] for rank in results[name]] == [0] * RANKS, name
        assert [rank["stage"] for rank in results[name]] == sorted(
            list(range(ALL[name].stages)) * (RANKS // ALL[name].stages)
        )


@pytest.mark.parametrize("name", CASES)
def test_no_stage_waits_for_another(results: Results, name: str) -> None:
    run = courses(results[name])
    print(f"\n{name}, step k = {SHOWN}\n\n{table(run, SHOWN)}")
    found = [text for course in run for text in violations(course, STEADY)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", CASES)
def test_stages_exchange_messages_and_one_small_agreement(results: Results, name: str) -> None:
    """Nothing else is said across stages, so nothing that a later version of Megatron adds comes in unseen."""
    for course in courses(results[name]):
        for step in STEADY:
            assert Counter(map(kind, of_step(course, step))) == expected(CASES[name], course.stage), (course.rank, step)


@pytest.mark.parametrize("name", CASES)
def test_the_agreement_of_a_step_is_joined_in_the_next(results: Results, name: str) -> None:
    for course in courses(results[name]):
        for step in STEADY:
            joined = [o.waited and o.waited.step for o in of_step(course, step) if kind(o) == AGREEMENT]
            assert joined == [step + 1]


REPLICAS_ONLY = [name for name in CASES if name.startswith("replicas")]
"""Tensor and expert parallelism talk within a stage in the middle of its computation."""


@pytest.mark.parametrize("name", REPLICAS_ONLY)
def test_only_the_loss_is_waited_for_at_once_within_a_stage(results: Results, name: str) -> None:
    """And gradients are reduced over replicas beside the next batch."""
    for course in courses(results[name]):
        within = [o for o in course.operations if o.issued.step in STEADY and len(course.stages(o)) == 1 < len(o.ranks)]
        at_once = {function(o.where) for o in within if o.waited_where == o.where}
        assert at_once == ({"training.py train_step"} if course.stage == CASES[name].stages - 1 else set())
        reductions = [o for o in within if o.where.endswith("start_grad_sync")]
        assert reductions
        assert all(o.waited and o.waited.step == o.issued.step + 1 for o in reductions)


def test_new_weights_are_gathered_beside_a_backward(results: Results) -> None:
    """Of the slack that two microbatches more than stages leave, one half is for the all-gather."""
    for course in courses(results["replicas, distributed optimizer"]):
        gathers = [o for o in course.operations if o.where.endswith(" start_flat") and "parameter_gather" in o.where]
        steady = [o for o in gathers if o.issued.step in STEADY[:-2]]
        assert len(steady) >= len(STEADY[:-2])
        assert all(o.waited and o.waited.total - o.issued.total >= 1 for o in steady)


def test_a_logged_step_may_wait(results: Results) -> None:
    """It reads the norm, and Megatron's timers stand still; the steps before and after it wait for nothing."""
    run = courses(results["logged"])
    print(f"\na logged step, k = {LOGGED_STEP}\n\n{table(run, LOGGED_STEP)}")
    steps = range(LOGGED_STEP, LOGGED_STEP + 1)
    assert offenders(run, steps) == {*UPDATE, "timers.py start", "timers.py stop"}
    others = [range(STEADY.start, LOGGED_STEP), range(LOGGED_STEP + 1, STEADY.stop)]
    assert not [text for other in others for course in run for text in violations(course, other)]


def test_what_blocks_is_seen(results: Results) -> None:
    """Megatron's own schedule, an update that is completed at once, and the two reductions of Megatron's train_step."""
    synchronous = courses(results["1f1b"])
    print(f"\n1f1b, step k = {SHOWN}\n\n{table(synchronous, SHOWN)}")
    sends, tied = "p2p_communication.py _batched_p2p_ops", "finalize_model_grads.py _allreduce_embedding_grad"
    norm, rerun = "clip_grads.py get_grad_norm_fp32", "rerun_state_machine.py _reduce_any"
    reductions = {
        "common_utils.py logical_and_across_model_parallel_group",
        "common_utils.py reduce_max_stat_across_model_parallel_group",
    }
    assert offenders(synchronous, STEADY) == {norm, tied, rerun, sends, *reductions}
    assert offenders(courses(results["stock reductions"]), STEADY) == reductions
    assert offenders(courses(results["logged in every step"]), STEADY) >= UPDATE


def test_nothing_escapes_the_recorder(results: Results) -> None:
    """What it saw equals what PyTorch's dispatcher saw, in whole runs and for each function of torch.distributed."""
    counted = [name for name, case in ALL.items() if case.counted]
    for rank in [rank for name in ["every operation", *counted] for rank in results[name]]:
        assert rank["counted"] == rank["dispatched"]
        assert sum(rank["counted"].values()) > 20
    for rank in results["every operation"]:
        assert not rank["unseen"]
        assert not rank["not waited"]
        bypass: Counter[str] = Counter(rank["counted with the bypass"]) - Counter(rank["dispatched"])
        assert "_c10d_functional::all_reduce" in bypass


BEGIN, SOON, LATE = Moment(4, 4, 16), Moment(5, 1, 17), Moment(5, 3, 19)
"""The end of a batch of four microbatches; after one and three backwards of the next."""


def made(name: str, ranks: list[int], issued: Moment, waited: Moment | None, **fields: Any) -> Operation:
    return Operation(name, "a group", ranks, "here", issued, waited, "there", **fields)


@pytest.mark.parametrize(
    ("operations", "harmless"),
    [
        ([made("allreduce", [0, 1, 2, 3], BEGIN, None)], True),
        ([made("allreduce", [0, 1, 2, 3], BEGIN, LATE)], True),
        ([made("allreduce", [0, 1, 2, 3], BEGIN, SOON)], False),  # stage 2 is two backwards ahead of stage 0
        ([made("allreduce", [0, 1, 2, 3], BEGIN, BEGIN)], False),
        ([made("allreduce", [0, 1, 2, 3], BEGIN, BEGIN, known_done=True)], True),
        ([made("allreduce", [2], BEGIN, BEGIN)], True),
        ([made("store.get", [0, 1, 2, 3], SOON, SOON)], False),
        ([made("monitored_barrier", [0, 1, 2, 3], SOON, SOON)], False),
        ([made("recv", [2, 1], SOON, SOON)], True),
        ([made("recv", [2, 0], SOON, SOON)], False),
        ([made("send", [2, 3], SOON, SOON)], False),
        # A chain is as old as its first part, if nobody was waited for in between.
        (
            [
                made("allreduce", [2, 0], BEGIN, SOON, known_done=True),
                made("allreduce", [0, 2], SOON, LATE, continues=0),
            ],
            True,
        ),
        ([made("allreduce", [2, 0], BEGIN, LATE), made("allreduce", [0, 2], LATE, LATE, continues=0)], False),
    ],
)
def test_the_rule(operations: list[Operation], harmless: bool) -> None:
    course = Course(2, 2, [0, 1, 2, 3], operations)
    assert (not violations(course, range(4, 6))) == harmless


@pytest.mark.parametrize(("heard_at", "harmless"), [(3, True), (9, False)])
def test_a_send_may_be_waited_for_when_it_was_answered(heard_at: int, harmless: bool) -> None:
    """Rank 1 sends to rank 0, which receives and answers; rank 1 waits for its send at its event 5."""
    run: list[Course] = []
    sent = made("send", [1, 0], SOON, SOON, issued_at=1, waited_at=5)
    heard = made("recv", [1, 0], SOON, SOON, issued_at=0, waited_at=heard_at)
    received = made("recv", [0, 1], SOON, SOON, issued_at=0, waited_at=2)
    answer = made("send", [0, 1], SOON, None, issued_at=3)
    run.append(Course(0, 0, [0, 1], [received, answer], run))
    run.append(Course(1, 1, [0, 1], [heard, sent], run))
    assert (not violations(run[1], range(4, 6))) == harmless


def test_sends_do_not_pile_up(results: Results) -> None:
    """gloo keeps a sent tensor until the send is waited for."""
    for name, case in CASES.items():
        for course in courses(results[name]):
            sends = [o for o in course.operations if o.name == "send" and o.issued.step in STEADY[:-2]]
            assert sends or case.stages == 1
            assert all(o.waited and o.waited.step <= o.issued.step + 1 for o in sends), name
