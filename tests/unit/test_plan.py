"""Plans of all schedules: an independent simulation runs them and watches every rule of the contract."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

import pytest

from megatron_async.pipeline.plan import (
    SCHEDULES,
    Action,
    Op,
    PipeDream,
    Schedule,
    TwoBufferedWeights,
    WPipe,
    make_schedule,
    run_steps,
)


def plans(
    stages: int, batches: list[int], factor: int, schedule: type[Schedule] = TwoBufferedWeights
) -> list[list[Action]]:
    """The whole plan of every stage, for batches of the given numbers of microbatches."""
    result = []
    for stage in range(stages):
        made = schedule(stages, stage, factor)
        result.append([action for step in run_steps(batches) for action in made.actions(step)])
    return result


class Violation(AssertionError):
    pass


def check(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


# The contract's table: age in updates of the weights that stage s of p reads.
DELAYS = {
    TwoBufferedWeights: lambda s, p: 1,
    PipeDream: lambda s, p: p - 1 - s,
    WPipe: lambda s, p: int(s < p // 2),
}


class Stage:
    """Executes the actions of one stage, as far as messages and results of others allow."""

    def __init__(
        self,
        number: int,
        plan: list[Action],
        stages: int,
        batches: list[int],
        in_flight_bound: int,
        unconfirmed: int,
        delay: int,
    ) -> None:
        self.delay = delay
        self.number, self.plan, self.stages, self.batches = number, deque(plan), stages, batches
        self.bound, self.unconfirmed = in_flight_bound, unconfirmed
        self.live: deque[tuple[int, int, int]] = deque()
        self.buffers = {-age: "x_0" for age in range(delay + 1)}  # version -> content; those before x_0 are copies
        self.newest = 0
        self.gradients_sent = 0
        self.confirmed = 0  # gradients that the stage before had consumed when it sent the last input
        self.posted = {Op.RECEIVE_ACTIVATION: deque(), Op.RECEIVE_GRADIENT: deque()}
        self.forwards: Counter[tuple[int, int]] = Counter()
        self.backwards: Counter[tuple[int, int]] = Counter()
        self.begun: set[int] = set()
        self.taken: set[int] = set()
        self.completed: set[int] = set()
        self.most_in_flight = 0

    def run(self, world: World) -> bool:
        """Run actions until one has to wait; whether any ran."""
        ran = False
        while self.plan and self._can_run(self.plan[0], world):
            getattr(self, "_" + self.plan[0].op.name.lower())(self.plan.popleft(), world)
            ran = True
        return ran

    def _can_run(self, action: Action, world: World) -> bool:
        key = (action.batch, action.microbatch)
        if action.op is Op.FORWARD and self.number > 0:
            return world.activations[self.number].arrived(key)
        if action.op is Op.BACKWARD and self.number < self.stages - 1:
            return world.gradients[self.number].arrived(key)
        if action.op is Op.COMPLETE_UPDATE:
            # The norm of a batch needs every stage's gradients, and starts when they have been taken.
            return all(action.batch in stage.taken for stage in world.stages)
        return True

    def _receive_activation(self, action: Action, world: World) -> None:
        self.posted[action.op].append((action.batch, action.microbatch))

    _receive_gradient = _receive_activation

    def _consume(self, op: Op, action: Action, channel: Channel) -> int:
        key = (action.batch, action.microbatch)
        check(bool(self.posted[op]) and self.posted[op][0] == key, f"{key} is consumed, posted is {self.posted[op]}")
        self.posted[op].popleft()
        return channel.take(key)

    def _forward(self, action: Action, world: World) -> None:
        if self.number > 0:
            self.confirmed = self._consume(Op.RECEIVE_ACTIVATION, action, world.activations[self.number])
        check(action.version == max(action.batch - self.delay, 0), f"forward reads {action}")
        check(action.version in self.buffers, f"{action} reads a version that is not in memory: {self.buffers}")
        self.forwards[action.batch, action.microbatch] += 1
        self.live.append((action.batch, action.microbatch, action.version))
        self.most_in_flight = max(self.most_in_flight, len(self.live))
        check(len(self.live) <= self.bound, f"{len(self.live)} microbatches in flight on stage {self.number}")

    def _send_activation(self, action: Action, world: World) -> None:
        check(self.live[-1][:2] == (action.batch, action.microbatch), "sends what it has just computed")
        world.activations[self.number + 1].put((action.batch, action.microbatch), sum(self.backwards.values()))

    def _backward(self, action: Action, world: World) -> None:
        if self.number < self.stages - 1:
            self._consume(Op.RECEIVE_GRADIENT, action, world.gradients[self.number])
        check(bool(self.live), "a backward without a forward")
        batch, microbatch, version = self.live.popleft()
        check((batch, microbatch) == (action.batch, action.microbatch), "backwards in the order of forwards")
        check(version == action.version, "the backward reads the version of its forward")
        self.backwards[batch, microbatch] += 1
        check(batch == 0 or batch - 1 in self.taken, f"batch {batch} accumulates on top of batch {batch - 1}")

    def _send_gradient(self, action: Action, world: World) -> None:
        self.gradients_sent += 1
        if action.batch < len(self.batches) - 1:  # the last batch drains: nothing confirms its gradients
            kept = self.gradients_sent - self.unconfirmed
            check(self.confirmed >= kept, f"{action}: {self.confirmed} gradients have arrived for sure, not {kept}")
        world.gradients[self.number - 1].put((action.batch, action.microbatch))

    def _begin_update(self, action: Action, world: World) -> None:
        k = action.batch
        check(k not in self.begun, f"update {k} begins twice")
        check(k == 0 or k - 1 in self.completed, f"update {k} begins before update {k - 1} is complete")
        done = [self.backwards[k, i] for i in range(self.batches[k])]
        check(all(n == 1 for n in done), f"update {k} begins before the last backward")
        check(not any(n for (b, _), n in self.backwards.items() if b > k), f"batch {k + 1} accumulates already")
        self.begun.add(k)

    def _take_gradients(self, action: Action, world: World) -> None:
        k = action.batch
        check(k in self.begun and k not in self.taken, f"gradients of batch {k} are taken")
        self.taken.add(k)

    def _complete_update(self, action: Action, world: World) -> None:
        k = action.batch
        check(k in self.taken and k not in self.completed, f"update {k} is not pending")
        check(action.version == k + 1 == self.newest + 1, f"{action} writes the wrong version")
        overwritten = self.newest - self.delay
        check(all(v != overwritten for *_, v in self.live), f"{action} overwrites x_{overwritten}, which is read")
        del self.buffers[overwritten]
        self.buffers[k + 1] = f"x_{k + 1}"
        self.newest = k + 1
        check(len(self.buffers) == self.delay + 1, "no more versions than the delay needs")
        self.completed.add(k)


class Channel:
    """Messages between two stages, in order, each with what its sender had consumed by then."""

    def __init__(self) -> None:
        self.queue: deque[tuple[int, int]] = deque()
        self.consumed: deque[int] = deque()

    def put(self, key: tuple[int, int], consumed: int = 0) -> None:
        self.queue.append(key)
        self.consumed.append(consumed)

    def arrived(self, key: tuple[int, int]) -> bool:
        return bool(self.queue)

    def take(self, key: tuple[int, int]) -> int:
        found = self.queue.popleft()
        check(found == key, f"message {found} arrives where {key} is expected")
        return self.consumed.popleft()


class World:
    def __init__(
        self,
        plan: list[list[Action]],
        batches: list[int],
        factor: int,
        schedule: type[Schedule] = TwoBufferedWeights,
    ) -> None:
        p = len(plan)
        bounds = [factor * (p - 1 - s) + 1 for s in range(p)]
        unconfirmed = [schedule(p, s, factor).unconfirmed_gradients() for s in range(p)]
        delays = [DELAYS[schedule](s, p) for s in range(p)]
        self.stages = [Stage(s, plan[s], p, batches, bounds[s], unconfirmed[s], delays[s]) for s in range(p)]
        self.activations = [Channel() for _ in range(p)]
        self.gradients = [Channel() for _ in range(p)]

    def run(self) -> None:
        while any(stage.run(self) for stage in self.stages):
            pass
        waiting = {s.number: s.plan[0] for s in self.stages if s.plan}
        check(not waiting, f"deadlock: {waiting}")

    def audit(self, batches: list[int]) -> None:
        every = {(k, i) for k, m in enumerate(batches) for i in range(m)}
        for stage in self.stages:
            check(stage.forwards == Counter(every), "every microbatch forward once")
            check(stage.backwards == Counter(every), "every microbatch backward once")
            check(stage.begun == set(range(len(batches))), "every update begins")
            # The last update is completed by whoever asks for the result: the run ends with its begin.
            check(stage.completed == set(range(len(batches) - 1)), "every update but the last completes")
            check(not any(stage.posted.values()), "nothing posted is left over")
        check(not any(c.queue for c in self.activations + self.gradients), "nothing sent is left over")


def simulate(
    plan: list[list[Action]], batches: list[int], factor: int, schedule: type[Schedule] = TwoBufferedWeights
) -> World:
    world = World(plan, batches, factor, schedule)
    world.run()
    world.audit(batches)
    return world


STAGES = (1, 2, 3, 4, 5, 8, 16, 64)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("stages", STAGES)
def test_plan_keeps_the_contract(stages: int, factor: int) -> None:
    least = factor * (stages - 1) + 1
    for m in sorted({least, least + 1, 2 * stages + 1, 4 * stages} - set(range(least))):
        world = simulate(plans(stages, [m] * 4, factor), [m] * 4, factor)
        most = [s.most_in_flight for s in world.stages]
        assert most == [factor * (stages - 1 - s) + 1 for s in range(stages)]
        assert most == [TwoBufferedWeights(stages, s, factor).in_flight() for s in range(stages)]


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("schedule", [PipeDream, WPipe])
def test_plans_of_other_delays_keep_the_contract(schedule: type[Schedule], stages: int, factor: int) -> None:
    least = factor * (stages - 1) + 1
    for m in (least, least + 1, 4 * stages):
        batches = [m] * (stages + 3)
        world = simulate(plans(stages, batches, factor, schedule), batches, factor, schedule)
        assert [s.most_in_flight for s in world.stages] == [factor * (stages - 1 - s) + 1 for s in range(stages)]


def test_delays() -> None:
    assert [PipeDream(4, s).delays for s in range(4)] == [(3,), (2,), (1,), (0,)]
    assert [WPipe(4, s).delays for s in range(4)] == [(1,), (1,), (0,), (0,)]
    assert [WPipe(3, s).delays for s in range(3)] == [(1,), (0,), (0,)]
    assert [TwoBufferedWeights(4, s).delays for s in range(4)] == [(1,)] * 4


def test_a_single_stage_has_the_delays_of_those_it_simulates() -> None:
    assert make_schedule("pipedream", 1, 0, simulated_stages=4).delays == (3, 2, 1, 0)
    assert make_schedule("wpipe", 1, 0, simulated_stages=2).delays == (1, 0)
    schedule = make_schedule("pipedream", 1, 0, simulated_stages=4)
    # Some weights are as new as possible: the update is complete before the first forward.
    assert _told(schedule, 2) == [
        *(("t", 1, -1), ("c", 1, -1), ("f", 2, 0), ("b", 2, 0), ("f", 2, 1), ("b", 2, 1), ("b", 2, -1)),
    ]
    with pytest.raises(ValueError, match="2 stages cannot simulate 4"):
        make_schedule("pipedream", 2, 0, simulated_stages=4)


@pytest.mark.parametrize("factor", [1, 2])
def test_one_gradient_less_could_be_on_its_way_still(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoBufferedWeights, "unconfirmed_gradients", lambda self: factor)
    with pytest.raises(Violation, match="have arrived for sure"):
        simulate(plans(4, [8] * 4, factor), [8] * 4, factor)


@pytest.mark.parametrize("factor", [1, 2])
def test_batches_of_different_sizes(factor: int) -> None:
    batches = [7, 7, 9, 12, 8, 7]
    simulate(plans(4, batches, factor), batches, factor)


def test_a_run_of_one_batch() -> None:
    for stages in (1, 2, 5):
        simulate(plans(stages, [stages], 1), [stages], 1)


def _told(schedule: Schedule, microbatches: int) -> list[tuple[str, int, int]]:
    """First letter of the operation, batch and microbatch of the computations and updates of a steady step."""
    step = list(run_steps([microbatches] * 4))[2]
    told = (Op.FORWARD, Op.BACKWARD, Op.TAKE_GRADIENTS, Op.COMPLETE_UPDATE, Op.BEGIN_UPDATE)
    return [(a.op.name[0].lower(), a.batch, a.microbatch) for a in schedule.actions(step) if a.op in told]


def test_the_steady_state_has_no_warm_up() -> None:
    """Stage 1 of 4 with 6 microbatches: w = 2. Update 1 can be completed at slots 2 to 4."""
    schedule = TwoBufferedWeights(4, 1)
    assert _told(schedule, 6) == [
        *(("f", 2, 2), ("t", 1, -1), ("b", 2, 0), ("f", 2, 3), ("b", 2, 1), ("f", 2, 4), ("b", 2, 2), ("c", 1, -1)),
        *(("f", 2, 5), ("b", 2, 3), ("f", 3, 0), ("b", 2, 4), ("f", 3, 1), ("b", 2, 5), ("b", 2, -1)),
    ]


def test_without_slack_an_update_completes_just_before_its_result_is_read() -> None:
    assert _told(TwoBufferedWeights(4, 1), 4) == [
        *(("f", 2, 2), ("t", 1, -1), ("b", 2, 0), ("f", 2, 3), ("b", 2, 1), ("c", 1, -1)),
        *(("f", 3, 0), ("b", 2, 2), ("f", 3, 1), ("b", 2, 3), ("b", 2, -1)),
    ]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("kind", list(DELAYS))
def test_stopping_between_steps_leaves_only_messages_that_are_posted(kind: type[Schedule], stages: int) -> None:
    """After any step: what was sent and not consumed is what the receiver has posted."""
    for factor in (1, 2):
        batches = [2 * stages] * 3
        for cut in (1, 2):
            cut_plans = []
            for stage in range(stages):
                schedule = kind(stages, stage, factor)
                steps = list(run_steps(batches))[:cut]
                cut_plans.append([a for step in steps for a in schedule.actions(step)])
            world = World(cut_plans, batches, factor, kind)
            world.run()
            for s in range(1, stages):
                assert list(world.activations[s].queue) == list(world.stages[s].posted[Op.RECEIVE_ACTIVATION])
                if kind is not WPipe:
                    assert len(world.activations[s].queue) == factor
            assert not any(c.queue for c in world.gradients)


# Negative controls: each wrong plan must be caught by the audit above.


def _swap(plan: list[Action], first: Op, second: Op) -> list[Action]:
    """Exchange the first neighbouring pair (first, second)."""
    for i in range(len(plan) - 1):
        if plan[i].op is first and plan[i + 1].op is second:
            return [*plan[:i], plan[i + 1], plan[i], *plan[i + 2 :]]
    raise AssertionError("no such pair")


def _late_take(plan: list[Action]) -> list[Action]:
    """Take the gradients of batch 1 after the first backward of batch 2 instead of before."""
    return _swap(plan, Op.TAKE_GRADIENTS, Op.BACKWARD)


def _early_completion(plan: list[Action]) -> list[Action]:
    """Complete update 0 before the backwards of batch 0 that still read x_{-1}... of batch 1 instead of batch 2."""
    begin = next(i for i, a in enumerate(plan) if a.op is Op.BEGIN_UPDATE and a.batch == 1)
    complete = next(i for i, a in enumerate(plan) if a.op is Op.COMPLETE_UPDATE and a.batch == 1)
    moved = plan[complete]
    rest = [*plan[:complete], *plan[complete + 1 :]]
    return [*rest[: begin - 2], moved, *rest[begin - 2 :]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plan: [a for a in plan if a != plan[-2]],
        lambda plan: [*plan, replace(plan[0])],
        lambda plan: [replace(a, version=a.batch) if a.op is Op.FORWARD else a for a in plan],
        lambda plan: [replace(a, version=a.version + 1) if a.op is Op.BACKWARD else a for a in plan],
        lambda plan: [a for a in plan if a.op is not Op.RECEIVE_ACTIVATION],
        lambda plan: [a for a in plan if a.op is not Op.COMPLETE_UPDATE],
        lambda plan: _swap(plan, Op.BACKWARD, Op.SEND_GRADIENT)[1:],
        lambda plan: [a for a in plan if a.op is not Op.TAKE_GRADIENTS],
        _late_take,
        _early_completion,
    ],
    ids=[
        "lost action",
        "repeated",
        "fresh",
        "other backward",
        "no receive",
        "no update",
        "lost head",
        "no take",
        "late take",
        "too early",
    ],
)
def test_a_wrong_plan_is_caught(spoil) -> None:  # type: ignore[no-untyped-def]
    plan = plans(3, [5] * 4, 1)
    plan[1] = spoil(plan[1])
    with pytest.raises((Violation, IndexError, KeyError)):
        simulate(plan, [5] * 4, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 1), "stages must be at least 1"),
        ((2, 2, 1), "stage must be in 0..1"),
        ((2, -1, 1), "stage must be in 0..1"),
        ((2, 0, 3), "warmup_factor must be 1 or 2"),
    ],
)
def test_arguments_out_of_range(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwoBufferedWeights(*arguments)


def test_too_few_microbatches() -> None:
    for factor, least in ((1, 4), (2, 7)):
        schedule = TwoBufferedWeights(4, 0, factor)
        assert schedule.minimum_microbatches() == least
        (step,) = run_steps([least - 1])
        with pytest.raises(ValueError, match=f"at least {least} microbatches"):
            list(schedule.actions(step))


def test_registry() -> None:
    assert isinstance(make_schedule("2bw-async", 2, 0), TwoBufferedWeights)
    assert set(SCHEDULES) == {"2bw-async", "pipedream", "wpipe"}
    with pytest.raises(ValueError, match="unknown schedule 'gpipe'"):
        make_schedule("gpipe", 2, 0)
