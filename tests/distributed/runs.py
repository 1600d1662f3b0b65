"""What the worker of the training loop has recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Runs = dict[str, list[dict[str, Any]]]
"""By the name of a run, the records of its ranks."""


def losses(runs: Runs, name: str) -> list[float]:
    """Losses of a run as the last stage reported them."""
    return [entry["lm loss"] for entry in runs[name][-1]["iterations"]]


def iterations(runs: Runs, name: str) -> list[int]:
    """Numbers of the iterations that a run has logged, from 1."""
    return [entry["iteration"] for entry in runs[name][-1]["iterations"]]


def evaluations(runs: Runs, name: str) -> list[float]:
    """Losses of all evaluations, in order."""
    found: list[float] = runs[name][-1]["evaluations"]
    return found


def weights(runs: Runs, name: str) -> list[str]:
    """Digest of the final weights of every rank."""
    return [rank["weights"] for rank in runs[name]]


def norms(runs: Runs, name: str) -> list[float]:
    """Gradient norms as they were logged, None where that was too early."""
    return [entry["norm"] for entry in runs[name][-1]["iterations"]]


def scalars(folder: Path, name: str) -> dict[int, float]:
    """What tensorboard got, by iteration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {event.step: event.value for event in events.Scalars(name)}
