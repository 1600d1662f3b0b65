"""Megatron's tracker of MoE metrics, for batches that overlap."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.moe_logging import MetricEntry, MoEMetricsTracker


class BatchMetrics(MoEMetricsTracker):  # type: ignore[misc]
    """Books auxiliary losses for the batch that they belong to, and asks other ranks for theirs only when it is logged.

    Megatron's tracker reduces over all stages in every iteration, which blocks. Here the values of an iteration stay on
    their rank until an iteration is logged, where ranks wait for each other anyway; they are then reduced and reported
    together. The log shows the same mean over the interval. Tensorboard and wandb get that mean in logged iterations,
    and not a value in each.

    Args:
        is_logged: Whether Megatron prints an iteration, by its number from 1.
    """

    def __init__(self, is_logged: Callable[[int], bool]) -> None:
        super().__init__()
        self._is_logged = is_logged
        self._of_batch: dict[int, dict[str, MetricEntry]] = defaultdict(dict)
        self._waiting: dict[str, MetricEntry] = {}
        self._iterations = 0

    def enter(self, batch: int) -> None:
        """Book what is recorded from now on for this batch."""
        self._metrics = self._of_batch[batch]

    def forget(self, batch: int) -> None:
        """Throw away what was recorded for a batch."""
        self._of_batch.pop(batch, None)

    def report(self, loss_scale: float, iteration: int, **kwargs: Any) -> str:
        """As Megatron's, called once an iteration; the batch of the iteration is the oldest one."""
        if self._of_batch:
            for name, entry in self._of_batch.pop(min(self._of_batch)).items():
                self._add(name, entry, loss_scale)
        self._iterations += 1
        if not self._is_logged(iteration):
            return ""
        total: dict[str, Any] = {}
        wanted = kwargs.pop("total_loss_dict", None)
        self._metrics = self._waiting
        # What Megatron writes out is a mean over the interval; what it adds up for the console is the sum.
        text: str = super().report(
            loss_scale=1.0 / self._iterations, iteration=iteration, total_loss_dict=total, **kwargs
        )
        for name, mean in total.items() if wanted is not None else ():
            wanted[name] = wanted.get(name, 0.0) + mean * self._iterations
        self._waiting, self._iterations = {}, 0
        return text

    def _add(self, name: str, entry: MetricEntry, scale: float) -> None:
        waiting = self._waiting.get(name)
        if waiting is None:
            entry.values = entry.values * scale
            self._waiting[name] = entry
        else:
            waiting.values += entry.values * scale

    def clear(self) -> None:
        """Nothing: Megatron clears after an evaluation, which records nothing, while the next batch is in flight."""
