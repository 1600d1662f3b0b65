"""The form in which a replaced name is declared, and how a row is applied and taken back."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


class UpstreamChanged(RuntimeError):
    """A name that is to be replaced is missing upstream, or takes other arguments than it did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """One replaced name.

    Attributes:
        module: Module that holds the name, imported when the row is applied.
        attribute: Dotted path below the module, for example ``Tensor.cuda``.
        replace: Takes the object that stands there (None if there is none) and returns the one to put there.
        reason: Why there is no smaller door than a replacement.
        parameters: Names of the parameters that the original must have, in order; None checks nothing.
        enabled_by: What switches the row on, as a user would say it.
    """

    module: str
    attribute: str
    replace: Callable[[Any], Any]
    reason: str
    parameters: tuple[str, ...] | None = None
    enabled_by: str = "install()"

    @property
    def name(self) -> str:
        """The replaced name, in full."""
        return f"{self.module}.{self.attribute}"


@dataclass(frozen=True, slots=True)
class _Undo:
    owner: Any
    name: str
    original: Any

    def __call__(self) -> None:
        if self.original is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


def apply(replacement: Replacement) -> Callable[[], None]:
    """Apply one row.

    Args:
        replacement: The row.

    Returns:
        A function that puts the original back.

    Raises:
        ImportError: If the module cannot be imported.
        AttributeError: If a part of the dotted path before the last one is missing.
        UpstreamChanged: If the row names the original's parameters and they are others.
    """
    owner: Any = importlib.import_module(replacement.module)
    *parents, name = replacement.attribute.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    current = getattr(owner, name, None)
    if replacement.parameters is not None:
        _check_parameters(replacement, current)
    # An inherited attribute is shadowed and uncovered again, not written into the subclass for good.
    original = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement.replace(current))
    return _Undo(owner, name, original)


def apply_all(rows: tuple[Replacement, ...]) -> list[Callable[[], None]]:
    """Apply several rows, all or none.

    Args:
        rows: The rows, in order.

    Returns:
        Functions that put the originals back, to be called in reverse order.
    """
    undo: list[Callable[[], None]] = []
    try:
        for row in rows:
            undo.append(apply(row))
    except BaseException:
        while undo:
            undo.pop()()
        raise
    return undo


def _check_parameters(replacement: Replacement, current: Any) -> None:
    remedy = "install a megatron-core version that megatron_async supports"
    if current is None:
        raise UpstreamChanged(f"{replacement.name} does not exist in the installed megatron-core; {remedy}")
    found = tuple(inspect.signature(current).parameters)
    if found != replacement.parameters:
        raise UpstreamChanged(
            f"{replacement.name} takes {', '.join(found)} in the installed megatron-core, and not "
            f"{', '.join(replacement.parameters or ())}; {remedy}"
        )
