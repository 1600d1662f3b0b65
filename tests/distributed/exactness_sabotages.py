"""Deliberate errors in the pipeline, which the comparison with the oracle must see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_async.optimizer.delay_compensation import compensate_delay_
from megatron_async.pipeline.runtime import AsyncPipeline


def _no_rebinding(pipeline: AsyncPipeline) -> None:
    """Backwards run on whatever version is bound."""
    executor, bind = pipeline.executor, pipeline.versions.bind
    original = executor._handlers

    def backward(action: Any) -> None:
        pipeline.versions.bind = lambda batch: None  # type: ignore[method-assign]
        executor._backward(action)
        pipeline.versions.bind = bind  # type: ignore[method-assign]

    executor._handlers = {op: backward if op.value == "backward" else f for op, f in original.items()}


def _write_into_live_buffer(pipeline: AsyncPipeline) -> None:
    """The new version also lands in the buffer that the graphs in flight read."""
    versions = pipeline.versions
    end_write = versions.end_write

    def overwrite(version: int, arriving: Any = ()) -> None:
        written = versions.tensors(version - 2)  # its buffer, which holds the new version by now
        for target, source in zip(versions.tensors(version - 1), written, strict=True):
            target.copy_(source)
        end_write(version, arriving)

    versions.end_write = overwrite  # type: ignore[method-assign]


def _current_learning_rate(pipeline: AsyncPipeline) -> None:
    """The deferred step takes the rate that the scheduler has moved on to."""
    pipeline.updates._exchange_schedule = lambda values: values  # type: ignore[method-assign]


def _first_update_without_feedback(pipeline: AsyncPipeline) -> None:
    """The first update is left uncorrected, and no later one makes up for it."""
    updates = pipeline.updates
    coefficient, step = updates.ef_coefficient, updates._step

    def first_differs(norm: float) -> None:
        updates.ef_coefficient = coefficient if updates.pending else 0.0
        step(norm)

    updates._step = first_differs  # type: ignore[method-assign]


def _one_version_too_new(pipeline: AsyncPipeline) -> None:
    """Every batch reads the newest weights there are, in forward and backward."""
    pipeline.versions.bind = lambda batch: pipeline.versions.bind_newest()  # type: ignore[method-assign]


def _not_reduced(pipeline: AsyncPipeline) -> None:
    """The copy is made of what this replica alone has accumulated."""
    gradients = pipeline.updates.gradients
    take = gradients.take

    def too_early() -> None:
        local = [source * 0.5 for source, _ in gradients._copies]
        take()
        for (_, kept), source in zip(gradients._copies, local, strict=True):
            kept.copy_(source)

    gradients.start_reduction = lambda: None  # type: ignore[method-assign]
    gradients.is_reduced = lambda: True  # type: ignore[method-assign]
    gradients.take = too_early  # type: ignore[method-assign]


def _not_gathered(pipeline: AsyncPipeline) -> None:
    """Every replica computes with the shard that it has stepped and with old weights elsewhere."""
    assert pipeline.updates._parameter_gather is not None
    pipeline.updates._parameter_gather.start = lambda versions, buffers: []  # type: ignore[method-assign]


def _a_token_too_many(pipeline: AsyncPipeline) -> None:
    """The last stage counts one token that is not there."""
    begin = pipeline.updates.begin

    def miscounted(*, per_token: bool, tokens: torch.Tensor | None) -> None:
        begin(per_token=per_token, tokens=None if tokens is None else tokens + 1)

    pipeline.updates.begin = miscounted  # type: ignore[method-assign]


def _compensated_too_early(pipeline: AsyncPipeline) -> None:
    """The gradient of the tied weight is corrected as long as it is only this stage's part."""
    updates = pipeline.updates
    find = updates._find_uncompensated

    def at_once() -> None:
        find()
        for gradient, newest, read in updates._uncompensated:
            compensate_delay_(gradient, newest, read, updates.delay_compensation)
        updates._uncompensated.clear()

    updates._find_uncompensated = at_once  # type: ignore[method-assign]


def _hand_back_x(pipeline: AsyncPipeline) -> None:
    """The synchronous phase begins with the corrected weights."""
    pipeline._make_plain_iterate = lambda: pipeline.versions.tensors(pipeline.versions.newest)  # type: ignore[method-assign]


def _no_discount(pipeline: AsyncPipeline) -> None:
    """Every stage steps with the whole learning rate."""
    pipeline.updates._lr_discount_iters = 0


SABOTAGES: dict[str | None, Callable[[AsyncPipeline], None]] = {
    None: lambda pipeline: None,
    "no rebinding before the backward": _no_rebinding,
    "written into a live buffer": _write_into_live_buffer,
    "learning rate of the next batch": _current_learning_rate,
    "error feedback drops u_0": _first_update_without_feedback,
    "newest weights": _one_version_too_new,
    "gradients taken before they are reduced": _not_reduced,
    "shards are not gathered": _not_gathered,
    "a token too many": _a_token_too_many,
    "compensated before the tied sum": _compensated_too_early,
    "hands back x": _hand_back_x,
    "no discount": _no_discount,
}
