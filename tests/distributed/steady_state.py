"""Records every operation between ranks: by whom and when it is issued, by whom and when it is waited for.

All of ``torch.distributed``'s Python functions end in a method of the bound class ``ProcessGroup`` that issues the
operation, and in ``Work.wait`` where its end is waited for. :class:`Recorder` stands in front of these methods.
:class:`DispatcherCount` sees the same operations at another place, behind the binding, so that a test can tell that
none was missed.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import typing_extensions
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
TRANSPARENT = (
    *(__file__, contextlib.__file__, typing_extensions.__file__),
    *(str(Path(torch.__file__).parent), str(ROOT / "megatron_async" / "patches" / "cpu")),
)
"""Files that issue operations on behalf of somebody else."""

RECEIVES = ("recv", "recv_anysource")
MESSAGES = ("send", *RECEIVES)
WAITING_METHODS = ("wait", "synchronize", "get_future", "get_future_result", "block_current_stream")
"""Methods of ``Work`` that wait, or that hand out something to wait for which is not followed any further."""

BLOCKING_STORE_METHODS = ("get", "multi_get", "wait", "queue_pop", "barrier")
"""Methods of ``Store`` that wait until another rank has written something."""

UNPOLLABLE = (*MESSAGES, "reduce_scatter")
"""Beginnings of the names of operations of which gloo says only when they are waited for that they are done."""

PATIENCE, POLLS = 60.0, 10_000
"""Seconds until a polled operation must be done, and polls of one operation that are taken for a wait."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the course of one rank.

    Attributes:
        step: Call of ``train_step``, from 1; what the loop does after it counts to it too.
        backwards: Backwards that have run in this step.
        total: Backwards that have run in all steps.
    """

    step: int
    backwards: int
    total: int


@dataclass(slots=True)
class Operation:
    """One operation as one rank saw it.

    Attributes:
        name: Method of ``ProcessGroup``; ``backend.`` or ``store.`` and a method of ``Backend`` or ``Store``.
        group: Description of the process group.
        ranks: Ranks of the job that take part; for a message, this rank and the other one.
        where: Who issued it, outside torch.
        issued: When.
        waited: When its end was waited for; None if it never was.
        waited_where: Who waited, outside torch.
        known_done: Whether it was known to be done by then, so that nothing was waited for.
        continues: Position of the operation that was joined right before, with no computation in between: this one
            can be its second half.
        issued_at: Number of issues and waits of this rank before it.
        waited_at: The same for the wait; -1 if there was none.
    """

    name: str
    group: str
    ranks: list[int]
    where: str
    issued: Moment
    waited: Moment | None = None
    waited_where: str = ""
    known_done: bool = False
    continues: int | None = None
    issued_at: int = 0
    waited_at: int = -1


@dataclass(slots=True)
class _Followed:
    position: int
    computed: int
    polls: int = 0


class Recorder:
    """Records the operations of this rank while it is entered.

    A poll (``Work.is_completed``) of a collective is answered as on a machine where it takes a moment: not done until
    this rank has computed something, done afterwards. So what is recorded does not depend on the machine's mood.

    Attributes:
        operations: What was recorded, in the order of issue.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._works: weakref.WeakKeyDictionary[Any, _Followed] = weakref.WeakKeyDictionary()
        self._step = self._backwards = self._total = self._computed = 0
        self._joined: int | None = None
        self._events = 0
        self._stack = ExitStack()

    def next_step(self) -> None:
        """A training step begins."""
        self._step += 1
        self._backwards = 0

    def computed(self, *, backward: bool) -> None:
        """A forward or a backward of a microbatch has run."""
        self._computed += 1
        self._joined = None
        if backward:
            self._backwards += 1
            self._total += 1

    def __enter__(self) -> Recorder:
        c10d = torch._C._distributed_c10d
        for owner in (c10d.ProcessGroup, c10d.Backend):
            for name in issuing_methods(owner):
                self._replace(owner, name, self._issue)
        for name in WAITING_METHODS:
            self._replace(c10d.Work, name, self._wait)
        self._replace(c10d.Work, "is_completed", self._poll)
        for name in BLOCKING_STORE_METHODS:
            self._replace(c10d.Store, name, self._ask_store)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        # A function, not a partial: it has to bind to the instance.
        @functools.wraps(original)
        def replacement(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return method(original, name, instance, *args, **kwargs)

        self._stack.enter_context(mock.patch.object(owner, name, replacement))

    def _now(self) -> Moment:
        return Moment(self._step, self._backwards, self._total)

    def _event(self) -> int:
        self._events += 1
        return self._events - 1

    def _record(self, name: str, group: str, ranks: list[int]) -> Operation:
        operation = Operation(name, group, ranks, call_site(), self._now(), continues=self._joined)
        operation.issued_at = self._event()
        self._joined = None
        self.operations.append(operation)
        return operation

    def _issue(self, original: Callable[..., Any], name: str, issuer: Any, *args: Any, **kwargs: Any) -> Any:
        group = _group_of(issuer)
        if issuer is not group:
            name = f"backend.{name}"
        ranks = dist.get_process_group_ranks(group)
        if name in ("send", "recv"):
            ranks = [dist.get_rank(), ranks[args[1]]]
        operation = self._record(name, group.group_desc, ranks)
        work = original(issuer, *args, **kwargs)
        if work is None:  # it is over
            operation.waited, operation.waited_where = operation.issued, operation.where
        else:
            self._works[work] = _Followed(len(self.operations) - 1, self._computed)
        return work

    def _wait(self, original: Callable[..., Any], _: str, work: Any, *args: Any, **kwargs: Any) -> Any:
        followed = self._works.get(work)
        if followed is not None:
            operation = self.operations[followed.position]
            if operation.waited is None:
                operation.waited, operation.waited_where = self._now(), call_site()
                operation.waited_at = self._event()
            self._joined = followed.position
        return original(work, *args, **kwargs)

    def _poll(self, original: Callable[..., Any], _: str, work: Any) -> bool:
        followed = self._works.get(work)
        if followed is None:
            return bool(original(work))
        operation = self.operations[followed.position]
        followed.polls += 1
        if followed.polls > POLLS:
            raise AssertionError(f"{operation.name} is polled again and again, which waits: {call_site()}")
        done = bool(original(work))
        if not operation.name.startswith(UNPOLLABLE):
            done = followed.computed < self._computed and _becomes_true(lambda: bool(original(work)))
        operation.known_done |= done and operation.waited is None
        return done

    def _ask_store(self, original: Callable[..., Any], name: str, store: Any, *args: Any, **kwargs: Any) -> Any:
        operation = self._record(f"store.{name}", "store", list(range(dist.get_world_size())))
        operation.waited, operation.waited_where = operation.issued, operation.where
        return original(store, *args, **kwargs)


class DispatcherCount(TorchDispatchMode):
    """Counts the operations that reach the backends through PyTorch's dispatcher, as all of ``ProcessGroup``'s do.

    Attributes:
        count: How often each operation of the dispatcher was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self.count[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


DISPATCHED = {
    "all_gather_single": "_allgather_base_",
    "_allgather_base": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "recv_anysource": "recv_any_source_",
    "send": "send",
    "barrier": "barrier",
}
"""Methods of ``ProcessGroup`` whose operation in the dispatcher is not called like them with an underscore."""


def dispatched(operations: list[Operation]) -> Counter[str]:
    """What :class:`DispatcherCount` must have counted if nothing escaped the recorder."""
    # Stores and backends that are called past their process group are none of its business.
    names = (operation.name for operation in operations if "." not in operation.name)
    return Counter(f"c10d::{DISPATCHED.get(name, f'{name}_')}" for name in names)


def issuing_methods(owner: Any) -> list[str]:
    """Methods of a bound class that issue an operation: those that return a ``Work``, and one that blocks."""
    returns_work = re.compile(r"-> \S*\bWork\b")
    return [
        name
        for name, method in vars(owner).items()
        if name == "monitored_barrier" or returns_work.search(getattr(method, "__doc__", None) or "")
    ]


def _group_of(issuer: Any) -> dist.ProcessGroup:
    """The process group itself, or that of a backend that was called past it."""
    if isinstance(issuer, dist.ProcessGroup):
        return issuer
    for group in dist.distributed_c10d._world.pg_map:
        if any(group._get_backend(device) is issuer for device in group._device_types):
            return group
    raise AssertionError(f"{issuer} is used and belongs to no process group")


def _becomes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"an operation that is polled is not done after {PATIENCE} s: {call_site()}")
        time.sleep(0.0005)
    return True


def call_site() -> str:
    """``file:line function`` of who called torch, as a path below its package's root."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(TRANSPARENT):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    parts = path.parts
    if "site-packages" in parts:
        path = Path(*parts[len(parts) - parts[::-1].index("site-packages") :])
    elif path.is_relative_to(ROOT):
        path = path.relative_to(ROOT)
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
