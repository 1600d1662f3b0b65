"""What each pipeline stage does, in order: pure Python, and the one source of truth.

A schedule is a function that turns (stage, step) into an ordered list of :class:`Action`. The executor runs that list,
the simulator times it, the tests audit it, and pictures are drawn from it. Nothing here knows about tensors.

Symbols, as in the papers: ``p`` stages, ``s`` this stage, ``m`` microbatches a batch, batches ``k = 0, 1, 2, ...``.
Weight version ``v`` is x_v; update ``k`` makes x_{k+1}.

To add a schedule: write a subclass of :class:`Schedule` that yields the actions of one step, and register it in
:data:`SCHEDULES`. The executor needs no change.
"""

from collections.abc import Callable, Iterator
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

    Args:
        stages: Number of pipeline stages p, at least 1.
        stage: This stage s, 0 <= s < p.
        warmup_factor: See ``--async-warmup-factor``.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, stages: int, stage: int, warmup_factor: int = 1) -> None:
        if stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        if not 0 <= stage < stages:
            raise ValueError(f"stage must be in 0..{stages - 1}, got {stage}")
        if warmup_factor not in (1, 2):
            raise ValueError(f"warmup_factor must be 1 or 2, got {warmup_factor}")
        self.stages = stages
        self.stage = stage
        self.warmup_factor = warmup_factor

    @property
    def is_first(self) -> bool:
        """Whether this stage reads the data."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.stages - 1

    def in_flight(self) -> int:
        """Largest number of microbatches whose activations this stage holds at once."""
        raise NotImplementedError

    def version_read(self, batch: int) -> int:
        """Weight version that forwards and backwards of ``batch`` read on this stage."""
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


class TwoBufferedWeights(Schedule):
    """``2bw-async``: PipeDream-2BW without a flush or a barrier between batches.

    When step k starts, the first w forwards of batch k have already run, w = factor * (p-1-s). Then, for
    i = 0 ... m-1, a forward (of batch k while there are any, afterwards of batch k+1) and the backward of microbatch i
    of batch k. Batch k reads x_{max(k-1, 0)} on every stage, forward and backward.

    The gradients of batch k-1 leave the accumulation buffer just before the first backward of batch k accumulates
    there; their reduction over data-parallel replicas has the time of the forward in between. The update k-1 can be
    completed from slot s+1 on (stage 0 ends a batch s backwards after stage s does, and the norm needs all stages), and
    must be at slot m-w, whose forward is the first to read the result. The middle is planned: half of the slack is for
    the all-gather of the norm before it, half for that of the new weights after it. With m = p there is no slack.

    Receives are posted one use ahead. At the end of a step, only those are outstanding whose messages are sent within
    the same step, so that a training loop that stops between two steps leaves nothing behind.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2BW), arXiv 2006.09503; the deferral of
    the update is this project's (docs/schedule.md).
    """

    @property
    def warmup(self) -> int:
        """Forwards that run ahead of the first backward, w."""
        return self.warmup_factor * (self.stages - 1 - self.stage)

    def in_flight(self) -> int:
        """Largest number of microbatches whose activations this stage holds at once: w + 1."""
        return self.warmup + 1

    def version_read(self, batch: int) -> int:
        """x_{max(k-1, 0)}: exactly one update old, whatever p."""
        return max(batch - 1, 0)

    def unconfirmed_gradients(self) -> int:
        """Sent gradients that the stage before may not have received when the next one is sent, and that one: f + 1.

        The stage has run forward w + i when it sends gradient i. Its input was computed after the stage before, which
        runs f forwards further ahead, had run backward i - f - 1.
        """
        return self.warmup_factor + 1

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
                raise ValueError(f"2bw-async needs at least {self.minimum_microbatches()} microbatches, got {m}")
        forwards = self._forwards(step)
        incoming = _Incoming(self._inputs(step, forwards), self.warmup_factor if step.filled else 0)
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

        fill = 0 if step.filled else self.warmup
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
        start = self.warmup if step.filled else 0
        own = [(step.batch, i) for i in range(start, step.microbatches)]
        prefetch = 0 if step.next_microbatches is None else self.warmup
        return own + [(step.batch + 1, i) for i in range(prefetch)]

    def _inputs(self, step: Step, forwards: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """(batch, microbatch) of the stage inputs to receive for this step, and for the head of the next one."""
        inputs = list(forwards)
        if step.next_microbatches is not None:
            # The stage before prefetches warmup_factor more than this one does: those messages are on their way.
            inputs += [(step.batch + 1, self.warmup + i) for i in range(self.warmup_factor)]
        return inputs


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


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {"2bw-async": TwoBufferedWeights}
"""Schedules by the name that ``--pipeline-schedule`` takes: (stages, stage, warmup_factor) -> Schedule."""


def make_schedule(name: str, stages: int, stage: int, warmup_factor: int = 1) -> Schedule:
    """The schedule registered under ``name``, for one stage.

    Raises:
        ValueError: If there is none, or an argument is out of range.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}, choose one of {sorted(SCHEDULES)}")
    return SCHEDULES[name](stages, stage, warmup_factor)


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
