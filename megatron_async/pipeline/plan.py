"""What each pipeline stage does, in order: pure Python, and the one source of truth.

A schedule is a function that turns (stage, step) into an ordered list of :class:`Action`. The executor runs that list,
the simulator times it, the tests audit it, and pictures are drawn from it. Nothing here knows about tensors.

Symbols, as in the papers: ``p`` stages, ``s`` this stage, ``m`` microbatches a batch, batches ``k = 0, 1, 2, ...``.
Weight version ``v`` is x_v; update ``k`` makes x_{k+1}.

To add a schedule: write a subclass of :class:`Schedule` that yields the actions of one step, or one of
:class:`DelayedWeights` that says how old the weights are that a stage reads, and register it in :data:`SCHEDULES`. The
executor needs no change.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """One kind of work on a stage."""

    RECEIVE_ACTIVATION = "receive activation"
    """Post the receive of a stage input. It does not wait: the forward that consumes it does."""
    FORWARD = "forward"
    SEND_ACTIVATION = "send activation"
    RECEIVE_GRADIENT = "receive gradient"
    """Post the receive of an output gradient. The backward that consumes it waits."""
    BACKWARD = "backward"
    SEND_GRADIENT = "send gradient"
    BEGIN_UPDATE = "begin update"
    """Start the reduction of the batch's gradients over data-parallel replicas. Waits for nothing."""
    TAKE_GRADIENTS = "take gradients"
    """Take the reduced gradients out of the accumulation buffer, which the next backward needs, and start the norm.
    Waits at most for the reduction, which a forward has had the time of, and for no other stage."""
    COMPLETE_UPDATE = "complete update"
    """Join the norm, clip, step, write the new weight version, start its all-gather over data-parallel replicas."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's plan.

    Attributes:
        op: What to do.
        batch: Number of the global batch the work belongs to. For the update operations: number of the update.
        microbatch: Microbatch within ``batch``; -1 for the update operations.
        version: Weight version that is read (forward, backward), or written (complete update); -1 where none is.
    """

    op: Op
    batch: int
    microbatch: int = -1
    version: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step, as the training loop calls it: the backwards of one batch.

    Attributes:
        batch: Number k of the batch whose backwards run in this step.
        microbatches: Its number of microbatches, m.
        next_microbatches: The m of batch k+1, or None to drain: the step prefetches nothing, and afterwards the
            pipeline is empty.
        filled: Whether the step before has prefetched forwards of this batch (it did not drain).
        pending_update: Number of the update that has begun and is not complete when the step starts, or None.
    """

    batch: int
    microbatches: int
    next_microbatches: int | None
    filled: bool
    pending_update: int | None = None


class Schedule:
    """Generates the actions of one stage, step by step.

    Attributes:
        delays: Delay in updates of the weights that are read, one of each stage that this stage stands for: its own,
            or, where it simulates a pipeline alone, those of all simulated stages.

    Args:
        stages: Number of pipeline stages p, at least 1.
        stage: This stage s, 0 <= s < p.
        warmup_factor: See ``--async-warmup-factor``.
        simulated_stages: Number of stages of the pipeline whose delays a single stage reproduces; needs ``stages`` 1.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, stages: int, stage: int, warmup_factor: int = 1, simulated_stages: int = 1) -> None:
        if stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        if not 0 <= stage < stages:
            raise ValueError(f"stage must be in 0..{stages - 1}, got {stage}")
        if warmup_factor not in (1, 2):
            raise ValueError(f"warmup_factor must be 1 or 2, got {warmup_factor}")
        if simulated_stages < 1 or (simulated_stages > 1 and stages > 1):
            raise ValueError(f"{stages} stages cannot simulate {simulated_stages}: only a single one can")
        self.stages = stages
        self.stage = stage
        self.warmup_factor = warmup_factor
        self._delayed_stages = max(stages, simulated_stages)
        self.delays = (
            tuple(self.delay_of(s, simulated_stages) for s in range(simulated_stages))
            if simulated_stages > 1
            else (self.delay_of(stage, stages),)
        )

    @staticmethod
    def delay_of(stage: int, stages: int) -> int:
        """Delay D, in updates, of the weights that a stage of ``stages`` reads: batch k reads x_{max(k-D, 0)}."""
        raise NotImplementedError

    @property
    def is_first(self) -> bool:
        """Whether this stage reads the data."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.stages - 1

    def deepest_delay(self) -> int:
        """Largest delay of any stage of the pipeline, simulated ones among them."""
        return max(self.delay_of(stage, self._delayed_stages) for stage in range(self._delayed_stages))

    @classmethod
    def is_uniform(cls) -> bool:
        """Whether all stages of a pipeline have the same delay, whatever their number."""
        return len({cls.delay_of(stage, stages) for stages in (2, 3) for stage in range(stages)}) == 1

    def kind(self) -> str:
        """Which delays the parameters have: pipelines of one kind can go on from each other's weight versions."""
        names = {schedule: name for name, schedule in SCHEDULES.items()}
        name = names.get(type(self), type(self).__name__)
        return name if self.is_uniform() else f"{name} of {self._delayed_stages} stages"

    def some_stage_waits(self) -> bool:
        """Whether a stage of the pipeline reads weights that the update before has just made, and so waits for it."""
        return any(self.delay_of(stage, self.stages) == 0 for stage in range(self.stages))

    def version_read(self, batch: int) -> int:
        """Weight version that forwards and backwards of ``batch`` read: the oldest one, where delays are simulated."""
        return read_version(batch, max(self.delays))

    def in_flight(self) -> int:
        """Largest number of microbatches whose activations this stage holds at once."""
        raise NotImplementedError

    def unconfirmed_gradients(self) -> int:
        """Largest number of gradients sent of which this stage cannot know that the stage before has received them."""
        raise NotImplementedError

    def minimum_microbatches(self) -> int:
        """Smallest m of any batch that the schedule can run."""
        raise NotImplementedError

    def actions(self, step: Step) -> Iterator[Action]:
        """The ordered actions of one step."""
        raise NotImplementedError


def read_version(batch: int, delay: int) -> int:
    """Weight version that a batch reads under a delay of so many updates: x_{max(k-D, 0)}."""
    return max(batch - delay, 0)


class DelayedWeights(Schedule):
    """Stages that read weights of a fixed age and run ahead of the batch as far as that age allows.

    A stage whose weights are at least one update old prefetches: when step k starts, the first w forwards of batch k
    have already run, w = factor * (p-1-s). Then, for i = 0 ... m-1, a forward (of batch k while there are any,
    afterwards of batch k+1) and the backward of microbatch i of batch k. No flush, no barrier.

    The gradients of batch k-1 leave the accumulation buffer just before the first backward of batch k accumulates
    there; their reduction over data-parallel replicas has the time of the forward in between. The update k-1 can be
    completed from slot s+1 on (stage 0 ends a batch s backwards after stage s does, and the norm needs all stages), and
    must be at slot m-w, whose forward is the first to read the result. The middle is planned: half of the slack is for
    the all-gather of the norm before it, half for that of the new weights after it. With m = p there is no slack.

    A stage of delay 0 reads weights that the update before has just made. It completes that update, and so waits for
    all stages, before its first forward of a batch, and runs its w forwards ahead within the batch, as 1F1B does.

    Receives are posted one use ahead. At the end of a step, those are outstanding whose messages are sent within the
    same step, and all of those, so that a training loop that stops between two steps leaves nothing behind.
    """

    @property
    def warmup(self) -> int:
        """Forwards that run ahead of the first backward, w."""
        return self.warmup_factor * (self.stages - 1 - self.stage)

    @property
    def prefetch(self) -> int:
        """Forwards of the next batch that run in a step."""
        return self.warmup if self._prefetches(self.stage) else 0

    @property
    def waits_for_update(self) -> bool:
        """Whether a batch reads what the update of the batch before has made."""
        return min(self.delays) == 0

    def in_flight(self) -> int:
        """Largest number of microbatches whose activations this stage holds at once: w + 1."""
        return self.warmup + 1

    def unconfirmed_gradients(self) -> int:
        """Sent gradients that the stage before may not have received when the next one is sent, and that one.

        f + 1 in the steady state: the stage has run forward w + i when it sends gradient i. Its input was computed
        after the stage before, which runs f forwards further ahead, had run backward i - f - 1. A stage that does not
        prefetch runs no forward beside its last w backwards, which nothing confirms.
        """
        return self.warmup_factor + 1 + (self.warmup - self.prefetch)

    def minimum_microbatches(self) -> int:
        """m >= p, or m >= 2p-1 with a doubled warm-up: w may not reach beyond the next batch."""
        return self.warmup_factor * (self.stages - 1) + 1

    def actions(self, step: Step) -> Iterator[Action]:
        """The ordered actions of step k.

        Raises:
            ValueError: If a batch has too few microbatches.
        """
        for m in (step.microbatches, step.next_microbatches):
            if m is not None and m < self.minimum_microbatches():
                raise ValueError(f"the schedule needs at least {self.minimum_microbatches()} microbatches, got {m}")
        forwards = self._forwards(step)
        incoming = _Incoming(self._inputs(step, forwards), self._posted_ahead if step.filled else 0)
        pending = step.pending_update
        accumulated = pending
        completion = self._completion_slot(step.microbatches)

        def forward(batch: int, microbatch: int) -> Iterator[Action]:
            if not self.is_first:
                yield from incoming.post_until(batch, microbatch, ahead=0)
            yield Action(Op.FORWARD, batch, microbatch, self.version_read(batch))
            if not self.is_last:
                yield Action(Op.SEND_ACTIVATION, batch, microbatch)
            if not self.is_first:
                # After the send, which somebody waits for; long before the message is there.
                yield from incoming.post_until(batch, microbatch, ahead=1)

        if pending is not None and self.waits_for_update:
            yield Action(Op.TAKE_GRADIENTS, pending)
            yield self._complete(pending)
            accumulated = pending = None
        fill = self.warmup - (self.prefetch if step.filled else 0)
        for batch, microbatch in forwards[:fill]:
            yield from forward(batch, microbatch)
        queue = iter(forwards[fill:])
        if not self.is_last:
            yield Action(Op.RECEIVE_GRADIENT, step.batch, 0)
        for i in range(step.microbatches):
            if pending is not None and i == completion:
                yield self._complete(pending)
                pending = None
            following = next(queue, None)
            if following is not None:
                yield from forward(*following)
            if not self.is_last and i + 1 < step.microbatches:
                yield Action(Op.RECEIVE_GRADIENT, step.batch, i + 1)
            if accumulated is not None:
                yield Action(Op.TAKE_GRADIENTS, accumulated)
                accumulated = None
            yield Action(Op.BACKWARD, step.batch, i, self.version_read(step.batch))
            if not self.is_first:
                yield Action(Op.SEND_GRADIENT, step.batch, i)
        if not self.is_first and step.next_microbatches is not None:
            yield from incoming.post_rest()
        if pending is not None:
            yield self._complete(pending)
        yield Action(Op.BEGIN_UPDATE, step.batch)

    def _completion_slot(self, microbatches: int) -> int:
        """Number of backwards of a step that run before the pending update is completed."""
        earliest, latest = self.stage + 1, microbatches - self.warmup
        return latest - (latest - earliest) // 2

    def _complete(self, update: int) -> Action:
        return Action(Op.COMPLETE_UPDATE, update, version=update + 1)

    def _forwards(self, step: Step) -> list[tuple[int, int]]:
        """(batch, microbatch) of the forwards of this step, in order."""
        start = self.prefetch if step.filled else 0
        own = [(step.batch, i) for i in range(start, step.microbatches)]
        prefetch = 0 if step.next_microbatches is None else self.prefetch
        return own + [(step.batch + 1, i) for i in range(prefetch)]

    def _inputs(self, step: Step, forwards: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """(batch, microbatch) of the stage inputs to receive for this step, and for the head of the next one."""
        inputs = list(forwards)
        if step.next_microbatches is not None:
            inputs += [(step.batch + 1, self.prefetch + i) for i in range(self._posted_ahead)]
        return inputs

    @property
    def _posted_ahead(self) -> int:
        """Inputs of the next batch that the stage before sends in a step and this one does not use in it."""
        if self.is_first or not self._prefetches(self.stage - 1):
            return 0
        return self.warmup + self.warmup_factor - self.prefetch

    def _prefetches(self, stage: int) -> bool:
        # The last stage of a pipeline has nothing to run ahead of, whatever its delay.
        return self.delay_of(stage, self.stages) > 0 or stage == self.stages - 1


class TwoBufferedWeights(DelayedWeights):
    """``2bw-async``: PipeDream-2BW without a flush or a barrier between batches.

    Batch k reads x_{max(k-1, 0)} on every stage, forward and backward: exactly one update old, whatever p.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2BW), arXiv 2006.09503; the deferral of
    the update is this project's (docs/schedule.md).
    """

    @staticmethod
    def delay_of(stage: int, stages: int) -> int:
        """1 on every stage."""
        return 1


class PipeDream(DelayedWeights):
    """``pipedream``: weights of stage s are p-1-s updates old, in forward and backward (weight stashing).

    For comparison. It keeps p-s versions on stage s. The last stage reads the newest weights: with one update a batch
    and a norm of all stages it has to wait for them, which costs a part of the bubble.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019; there a batch
    is one microbatch.
    """

    @staticmethod
    def delay_of(stage: int, stages: int) -> int:
        """p-1-s."""
        return stages - 1 - stage


class WPipe(DelayedWeights):
    """``wpipe``: two groups of stages; weights of the first half are one update old, those of the second are new.

    For comparison of what is learned. In the paper every device holds a part of both groups, so that one group works
    while the other waits; here a device holds one stage, and the second group waits as 1F1B does.

    Source: Yang et al., "Group-based Interleaved Pipeline Parallelism for Large-scale DNN Training" (WPipe), ICLR 2022.
    """

    @staticmethod
    def delay_of(stage: int, stages: int) -> int:
        """1 on the first p // 2 stages, 0 on the others."""
        return 1 if stage < stages // 2 else 0


class _Incoming:
    """Places the receives of one step, each one use ahead of the forward that consumes it."""

    def __init__(self, inputs: list[tuple[int, int]], already_posted: int) -> None:
        self._inputs = inputs
        self._position = {key: i for i, key in enumerate(inputs)}
        self._posted = already_posted

    def post_until(self, batch: int, microbatch: int, ahead: int) -> Iterator[Action]:
        last = min(self._position[batch, microbatch] + ahead, len(self._inputs) - 1)
        yield from self._post(last)

    def post_rest(self) -> Iterator[Action]:
        yield from self._post(len(self._inputs) - 1)

    def _post(self, last: int) -> Iterator[Action]:
        while self._posted <= last:
            batch, microbatch = self._inputs[self._posted]
            self._posted += 1
            yield Action(Op.RECEIVE_ACTIVATION, batch, microbatch)


SCHEDULES: dict[str, type[Schedule]] = {"2bw-async": TwoBufferedWeights, "pipedream": PipeDream, "wpipe": WPipe}
"""Schedules by the name that ``--pipeline-schedule`` takes."""


def make_schedule(name: str, stages: int, stage: int, warmup_factor: int = 1, simulated_stages: int = 1) -> Schedule:
    """The schedule registered under ``name``, for one stage.

    Raises:
        ValueError: If there is none, or an argument is out of range.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}, choose one of {sorted(SCHEDULES)}")
    return SCHEDULES[name](stages, stage, warmup_factor, simulated_stages)


def run_steps(microbatches: list[int]) -> Iterator[Step]:
    """The steps of a run that trains the given batches in a row and then stops.

    Args:
        microbatches: m of each batch.

    Yields:
        One step a batch; the last one drains.
    """
    for batch, m in enumerate(microbatches):
        yield Step(
            batch=batch,
            microbatches=m,
            next_microbatches=microbatches[batch + 1] if batch + 1 < len(microbatches) else None,
            filled=batch > 0,
            pending_update=batch - 1 if batch > 0 else None,
        )
