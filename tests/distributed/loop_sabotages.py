"""What the negative controls of the loop's tests do to a run. Each must be seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron_async.checkpoint import Checkpoints
from megatron_async.pipeline.executor import PipelineExecutor
from megatron_async.pipeline.routers import Routers
from megatron_async.pipeline.runtime import AsyncPipeline
from megatron_async.pipeline.weight_versions import WeightVersions
from tests.distributed import checkpoint_runs, parallel_runs
from tests.distributed.checkpoint_runs import SABOTAGED_SAVES


def _no_entry(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, kind: None


def _older_weights_are_the_newest(original: Callable[..., Any]) -> Callable[..., Any]:
    def resume(self: WeightVersions, newest: int, weights: dict[int, Any]) -> None:
        original(self, newest, dict.fromkeys(weights, weights[0]))

    return resume


def _present_random_state(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: contextlib.nullcontext()


def _plain_iterate_only(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: False


def _one_set_of_counters(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, batch: original(self, 0)


def _newest_bias(original: Callable[..., Any]) -> Callable[..., Any]:
    def bind(self: WeightVersions, batch: int) -> None:
        original(self, batch)
        for parameter, newest in zip(self.parameters, self.tensors(self.newest), strict=True):
            if not parameter.requires_grad:
                parameter.data = newest

    return bind


SABOTAGED: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "no entry": (Checkpoints, "hand_over", _no_entry),
    "older weights lost": (WeightVersions, "resume", _older_weights_are_the_newest),
    "random state of later": (PipelineExecutor, "random_state_of_next_batch", _present_random_state),
    "shared counters": (Routers, "enter", _one_set_of_counters),
    "newest bias": (WeightVersions, "bind", _newest_bias),
    "z in the entry": (AsyncPipeline, "_has_corrected_weights", _plain_iterate_only),
}


@contextlib.contextmanager
def sabotage_of(run: str) -> Iterator[None]:
    """Make the run wrong if its name asks for that."""
    kind = run.partition(":")[0]
    name = (checkpoint_runs.SABOTAGES | parallel_runs.SABOTAGES).get(run) or (
        kind if kind in SABOTAGED_SAVES and run.endswith("saved") else None
    )
    if name is None:
        yield
        return
    owner, attribute, make = SABOTAGED[name]
    original = getattr(owner, attribute)
    setattr(owner, attribute, make(original))
    try:
        yield
    finally:
        setattr(owner, attribute, original)
