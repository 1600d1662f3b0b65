"""What the runs of a study say: losses over seeds, paired gaps, and how much of a gap is recovered."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from delay_study.plan import Group, Run, Study
from delay_study.runner import tuned_learning_rate
from delay_study.store import DIVERGED, DONE, Outcome, Store


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A mean over seeds.

    Attributes:
        mean: Of the values.
        deviation: Sample standard deviation; None for a single value.
        values: Seed to value.
    """

    mean: float
    deviation: float | None
    values: dict[int, float]

    @property
    def is_resolved(self) -> bool:
        """Whether the mean stands clear of zero: more than two standard errors."""
        return self.deviation is not None and abs(self.mean) > 2 * self.deviation / math.sqrt(len(self.values))


def spread(values: dict[int, float]) -> Spread | None:
    """Mean and standard deviation; None without values."""
    if not values:
        return None
    numbers = list(values.values())
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Spread(mean=statistics.fmean(numbers), deviation=deviation, values=values)


@dataclass(kw_only=True)
class Arm:
    """One arm of a row.

    Attributes:
        name: Of the arm; with " z" for its plain iterate.
        outcomes: Seed to how the run ended, for those that ended.
        loss: Validation loss over the seeds that gave one.
        gap: Loss minus the baseline's of the same seed.
        recovered: Percent of the other arm's mean gap that this arm closes; None where there is none to close.
        diverged: Seeds whose run diverged.
    """

    name: str
    outcomes: dict[int, Outcome]
    loss: Spread | None
    gap: Spread | None = None
    recovered: float | None = None
    diverged: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Row:
    """One optimizer at one point of the sweep.

    Attributes:
        group: Which.
        learning_rate: Chosen one; None while it is not.
        tuning: Learning rate to how its run ended; empty where nothing was chosen.
        arms: In the order of the study; an arm whose plain iterate was evaluated is followed by that.
        at_end: Whether the best learning rate is the lowest or the highest of its grid.
    """

    group: Group
    learning_rate: float | None
    tuning: dict[float, Outcome]
    arms: list[Arm] = field(default_factory=list)
    at_end: bool = False

    def arm(self, name: str) -> Arm | None:
        """The arm of this name."""
        return next((arm for arm in self.arms if arm.name == name), None)


def rows(study: Study, store: Store) -> list[Row]:
    """Everything there is to say at this moment, also while runs are missing."""
    return [_row(study, store, group) for group in study.groups()]


def _row(study: Study, store: Store, group: Group) -> Row:
    rate = tuned_learning_rate(study, store, group)
    tuning = {run.learning_rate: o for run in study.tuning_runs(group) if (o := store.outcome(run)) is not None}
    row = Row(group=group, learning_rate=rate, tuning=tuning)
    if rate is None:
        return row
    row.at_end = bool(tuning) and rate in (min(group.learning_rates), max(group.learning_rates))
    runs = study.arm_runs(group, rate)
    for name in study.arms:
        outcomes = _outcomes(store, [run for run in runs if run.arm == name])
        row.arms.append(_arm(name, outcomes, {s: o.validation_loss for s, o in outcomes.items()}))
        z = {seed: outcome.validation_loss_z for seed, outcome in outcomes.items()}
        if any(loss is not None for loss in z.values()):
            row.arms.append(_arm(f"{name} z", outcomes, z))
    _compare(row, study)
    return row


def _outcomes(store: Store, runs: Sequence[Run]) -> dict[int, Outcome]:
    found = {run.seed: store.outcome(run) for run in runs}
    return {seed: outcome for seed, outcome in found.items() if outcome and outcome.status in (DONE, DIVERGED)}


def _arm(name: str, outcomes: dict[int, Outcome], losses: dict[int, float | None]) -> Arm:
    loss = spread({seed: value for seed, value in losses.items() if value is not None})
    diverged = [seed for seed, outcome in outcomes.items() if outcome.status == DIVERGED]
    return Arm(name=name, outcomes=outcomes, loss=loss, diverged=diverged)


def _compare(row: Row, study: Study) -> None:
    """Fill in gaps, seed by seed, and what is recovered of them."""
    baseline = row.arm(study.baseline)
    reference = baseline.loss.values if baseline and baseline.loss else {}
    for arm in row.arms:
        if arm.name != study.baseline and arm.loss is not None:
            own = arm.loss.values
            arm.gap = spread({seed: own[seed] - reference[seed] for seed in own if seed in reference})
    for name, other in study.recovery.items():
        full = row.arm(other)
        for arm in row.arms:
            if arm.name in (name, f"{name} z") and full is not None:
                arm.recovered = recovered(arm.gap, full.gap)


def recovered(gap: Spread | None, full: Spread | None) -> float | None:
    """Percent of ``full`` that is gone in ``gap``, over the seeds that both have; None where ``full`` is no gap.

    A gap that does not stand clear of its own noise leaves nothing to recover: the ratio would be noise.
    """
    if gap is None or full is None:
        return None
    both = [seed for seed in gap.values if seed in full.values]
    if not both or full.mean <= 0 or (len(full.values) > 1 and not full.is_resolved):
        return None
    return 100 * (1 - sum(gap.values[seed] for seed in both) / sum(full.values[seed] for seed in both))
