"""Evaluating x, z, or both on the same data."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_async.pipeline.runtime import AsyncPipeline

_END = object()


def evaluate(pipeline: AsyncPipeline | None, which: str, stock: Callable[..., Any], **kwargs: Any) -> Any:
    """One forward-only call of Megatron's schedule, on the weights that are to be evaluated.

    Args:
        pipeline: The pipeline; None while training is synchronous.
        which: ``x``, ``z`` or ``both``.
        stock: Megatron's schedule.
        **kwargs: Its arguments.
    """
    if pipeline is None:
        # x = z as long as training is synchronous. Both are logged all the same, for curves without holes.
        losses = stock(forward_only=True, **kwargs)
        return _with_z(losses, losses) if which == "both" else losses
    if which == "z":
        pipeline.bind_plain_iterate()
        return stock(forward_only=True, **kwargs)
    pipeline.bind_newest()
    if which == "x":
        return stock(forward_only=True, **kwargs)
    data = Replay(kwargs.pop("data_iterator"))
    losses = stock(forward_only=True, data_iterator=data.record(), **kwargs)
    pipeline.bind_plain_iterate()
    return _with_z(losses, stock(forward_only=True, data_iterator=data.again(), **kwargs))


class Replay:
    """Hands out data and keeps them, to hand them out once more.

    Args:
        data: Iterator over microbatches, a list with that iterator, or None on stages that read no data.
    """

    def __init__(self, data: Any) -> None:
        self._data = data[0] if isinstance(data, list) else data
        self._kept: list[Any] = []

    def record(self) -> Iterator[Any] | None:
        """The data, for the first time."""
        return None if self._data is None else self._recorded()

    def _recorded(self) -> Iterator[Any]:
        # Not a `for` over the data: Megatron's iterator can only be asked for the next item.
        for item in iter(functools.partial(next, self._data), _END):
            # Whoever gets a dictionary may take things out of it.
            self._kept.append(dict(item) if isinstance(item, dict) else item)
            yield item

    def again(self) -> Iterator[Any] | None:
        """The same data."""
        return None if self._data is None else iter(self._kept)


def _with_z(x: list[dict[str, Any]], z: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The losses of x, and those of z under names of their own."""
    return [{**own, **{f"{name} z": loss for name, loss in other.items()}} for own, other in zip(x, z, strict=True)]
