"""Which operations between ranks make a pipeline stage wait for another, and a table of all of them.

Stage s of p ends a batch s backwards before stage 0 does: on the way back, gradients reach stage 0 last. An operation
over several stages that is waited for any earlier than s backwards after its issue therefore stops stage s, however
fast the network is. Waiting in a later training step, after at least s + 1 backwards, stops nobody. Nor does waiting
for a message that the other stage is known to have received, because it has answered since.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.distributed.steady_state import MESSAGES, RECEIVES, Moment, Operation


@dataclass(frozen=True, slots=True)
class Course:
    """What one rank did.

    Attributes:
        rank: Rank of the job.
        stage: Its pipeline stage.
        stage_of: Stage of every rank of the job.
        operations: Its operations in the order of issue.
        run: The courses of all ranks.
    """

    rank: int
    stage: int
    stage_of: list[int]
    operations: list[Operation]
    run: list[Course] = field(default_factory=list, repr=False)

    def stages(self, operation: Operation) -> tuple[int, ...]:
        """Stages that take part in an operation."""
        return tuple(sorted({self.stage_of[rank] for rank in operation.ranks}))

    def spans_stages(self, operation: Operation) -> bool:
        """Whether an operation can make this stage wait for another."""
        return len(self.stages(operation)) > 1

    def origin(self, operation: Operation) -> Operation:
        """The first part of a chain of operations, each started when the one before was seen to be done.

        A chain goes on where nothing was waited for, or within the stage only: that does not make it younger.
        """
        while operation.continues is not None:
            before = self.operations[operation.continues]
            if self.spans_stages(before) and not before.known_done:
                break
            operation = before
        return operation

    def messages(self, name: str, group: str, peer: int) -> list[Operation]:
        """All sends to a rank, or receives from it, over a group."""
        return [o for o in self.operations if o.name == name and o.group == group and o.ranks[-1] == peer]

    def was_answered(self, send: Operation) -> bool:
        """Whether the receiver had said something after it had this message, which this rank had heard by the wait."""
        peer = send.ranks[-1]
        if peer >= len(self.run):
            return False
        other = self.run[peer]
        position = self.messages("send", send.group, peer).index(send)
        received = other.messages("recv", send.group, self.rank)
        if position >= len(received) or received[position].waited_at < 0:
            return False
        for group in {o.group for o in self.operations if o.name == "recv"}:
            answers = other.messages("send", group, self.rank)
            heard = self.messages("recv", group, peer)
            for answer, hearing in zip(answers, heard, strict=False):
                if answer.issued_at > received[position].waited_at and 0 <= hearing.waited_at < send.waited_at:
                    return True
        return False

    def across(self, steps: range) -> Iterator[Operation]:
        """Operations over several stages that are issued or waited for in some steps."""
        for operation in self.operations:
            in_steps = operation.issued.step in steps or (operation.waited and operation.waited.step in steps)
            if in_steps and self.spans_stages(operation):
                yield operation


def courses(ranks: list[dict[str, Any]]) -> list[Course]:
    """The courses of a run, from what its ranks returned."""
    stage_of = [rank["stage"] for rank in ranks]

    def operation(fields: dict[str, Any]) -> Operation:
        waited = fields["waited"] and Moment(**fields["waited"])
        return Operation(**{**fields, "issued": Moment(**fields["issued"]), "waited": waited})

    run: list[Course] = []
    for number, rank in enumerate(ranks):
        run.append(Course(number, rank["stage"], stage_of, [operation(f) for f in rank["operations"]], run))
    return run


def violations(course: Course, steps: range) -> list[str]:
    """What makes this stage wait for another in some steps, a sentence each."""
    return [
        f"stage {course.stage}, step {operation.issued.step}: {operation.name} over {operation.group} "
        f"(stages {course.stages(operation)}), issued at {operation.where}: {found}"
        for operation in course.across(steps)
        if (found := problem(course, operation))
    ]


def problem(course: Course, operation: Operation) -> str:
    """How an operation over several stages makes this stage wait for another; empty if it does not."""
    waited = operation.waited
    if operation.name in MESSAGES and abs(course.stage_of[operation.ranks[-1]] - course.stage) != 1:
        return "a message to a stage that is not a neighbour"
    if operation.name in RECEIVES or waited is None or operation.known_done:
        return ""
    if operation.name == "send" and course.was_answered(operation):
        return ""
    issued = course.origin(operation).issued
    if issued.step == waited.step:
        return f"waited for in the same step at {operation.waited_where}"
    if waited.total - issued.total <= course.stage:
        return f"waited for after {waited.total - issued.total} backwards at {operation.waited_where}"
    return ""


def table(run: list[Course], step: int) -> str:
    """All operations of one step between at least two ranks, those of the same kind in one row.

    Args:
        run: The ranks of a run.
        step: The step, k in the table. A chain of operations belongs to the step in which it began.
    """
    rows: dict[tuple[str, ...], list[tuple[Course, Operation]]] = defaultdict(list)
    for course in run:
        for operation in course.operations:
            if course.origin(operation).issued.step == step and len(operation.ranks) > 1:
                # Not by process group object: each stage has its own group of replicas.
                key = (operation.name, operation.group, operation.where, operation.waited_where)
                rows[key].append((course, operation))
    cells = [("operation", "group", "stages", "issued by", "issued", "waited for by", "waited for", "times a rank")]
    for (name, group, where, waited_where), found in rows.items():
        issued = _moments([(course, operation.issued) for course, operation in found], step)
        waited = _moments([(c, o.waited) for c, o in found if o.waited], step) if waited_where else "never"
        done = {operation.known_done for _, operation in found}
        if waited_where and True in done:
            waited += ", known to be done" if done == {True} else ", in part known to be done"
        stages = "; ".join(sorted({_span(course.stages(operation)) for course, operation in found}))
        per_rank = [sum(course is mine for course, _ in found) for mine in run]
        times = _range([count for count in per_rank if count])
        cells.append((name, group, stages, where, issued, waited_where or "–", waited, times))
    return "\n".join(f"| {' | '.join(row)} |" for row in [cells[0], ("---",) * len(cells[0]), *cells[1:]])


def _moments(found: list[tuple[Course, Moment]], step: int) -> str:
    """Places in a step, in words; ``k`` is the step of the table."""
    words = []
    for later in sorted({moment.step - step for _, moment in found}):
        backwards = [moment.backwards for _, moment in found if moment.step - step == later]
        words.append(f"k{later:+d}".replace("k+0", "k") + f" after {_range(backwards)} backwards")
    return "; ".join(words)


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def _span(stages: tuple[int, ...]) -> str:
    return "one" if len(stages) == 1 else ",".join(map(str, stages))
