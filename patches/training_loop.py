"""What stands in the training loop's globals while an asynchronous schedule runs.

Each function takes the original and the session, and returns the replacement. The decisions are the session's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.session import Session

Factory = Callable[[Callable[..., Any], "Session"], Callable[..., Any]]


def get_forward_backward_func(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Training steps run our plan; forward-only calls (evaluation) run Megatron's schedule on the newest weights."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return functools.partial(session.forward_backward, original(*args, **kwargs))

    return replacement


def get_megatron_optimizer(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The same optimizer, whose ``step()`` begins a deferred update."""

    @functools.wraps(original)
    def replacement(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = original(config, model_chunks, *args, **kwargs)
        session.adopt_optimizer(optimizer, model_chunks)
        return optimizer

    return replacement


def get_optimizer_param_scheduler(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The same scheduler, known to the session."""

    @functools.wraps(original)
    def replacement(optimizer: Any) -> Any:
        session.scheduler = original(optimizer)
        return session.scheduler

    return replacement


def keep_local(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """No reduction: the value is the same on every stage already."""

    @functools.wraps(original)
    def replacement(value: Any, group: Any = None) -> Any:
        return value

    return replacement


def training_log(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Megatron's log, with what is needed to book a late skip in the iteration it belongs to."""

    @functools.wraps(original)
    def replacement(
        loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args: Any, **kw: Any
    ) -> Any:
        session.before_log(loss_dict, total_loss_dict, iteration)
        return original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kw)

    return replacement


def checkpoint_and_decide_exit(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Megatron's checks of signals and time limits, once all ranks know that there is something to check."""

    return within(original, session.exit_checks)


def train(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Megatron's loop; afterwards the model holds the newest weights and nothing is on the wire."""

    return finished_by(original, session.finish_training)


def within(original: Callable[..., Any], context: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    """The same function, each call of it inside a context."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    return replacement


def finished_by(train: Callable[..., Any], finish: Callable[[], None]) -> Callable[..., Any]:
    """Megatron's loop, with a last act where it ends as it should; not where it fails."""

    @functools.wraps(train)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        try:
            result = train(*args, **kwargs)
        except SystemExit:
            # How Megatron ends at an exit interval, a time limit or a signal: on all ranks after the same iteration.
            finish()
            raise
        finish()
        return result

    return replacement
