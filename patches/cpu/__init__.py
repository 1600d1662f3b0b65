"""The CPU door: ``megatron.training.pretrain`` with ``--distributed-backend gloo`` and no CUDA device.

What stands for what is declared in four tables, a row with its reason for each replaced name: ``device`` and
``tensors`` (torch.cuda, and where tensors are put), ``collectives`` (what gloo lacks), ``upstream`` and ``saving``
(Megatron's own functions).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # its tables must hold torch's own functions; every optimizer imports it anyway
from torch.utils._device import _device_constructors

from megatron_async.patches.cpu import collectives, device, tensors
from megatron_async.patches.cpu.quiet import silence
from megatron_async.patches.replacement import apply_all
from megatron_async.ranks import is_first_rank

__all__ = ["install", "is_needed", "uninstall"]

_undo: list[Callable[[], None]] = []


def is_needed() -> bool:
    """Returns True if this machine has no CUDA device that torch can use."""
    return not torch.cuda.is_available()


def install(*, quiet: bool = False) -> None:
    """Makes the CPU stand in for CUDA in this process, and says so on rank 0. A second call does nothing.

    Imports megatron-core and megatron.training. Call it before anything else does: their functions are then never
    handed to ``torch.compile``, which costs a rank a second at its start.

    Args:
        quiet: Says nothing, as befits a process that a rank has started.

    Raises:
        RuntimeError: If a CUDA device is available: Megatron then runs as it is.
        ImportError: If megatron-core or megatron.training cannot be imported.
    """
    if _undo:
        return
    if not is_needed():
        raise RuntimeError(
            "the CPU stand-in was asked for, but torch has a CUDA device: run without it, or hide the device "
            "with CUDA_VISIBLE_DEVICES="
        )
    # A cached set of torch's factory functions: it must be the set of the originals.
    _device_constructors()
    undo = [silence()]
    try:
        undo += apply_all((*device.REPLACEMENTS, *tensors.REPLACEMENTS, *collectives.REPLACEMENTS))
        with _nothing_compiled() as let_compile:
            undo.append(let_compile)
            from megatron_async.patches.cpu import saving, upstream

            undo += apply_all((*upstream.REPLACEMENTS, *saving.REPLACEMENTS))
    except BaseException:
        while undo:
            undo.pop()()
        raise
    _undo.extend(undo)
    if not quiet and is_first_rank():
        print("> no CUDA device was found: the CPU stand-in is active", flush=True)


def uninstall() -> None:
    """Puts back everything that ``install`` replaced, for tests."""
    while _undo:
        _undo.pop()()


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[Callable[[], None]]:
    if "megatron.core" in sys.modules:
        # Its functions are wrapped already, but compiled at their first call only.
        torch.compiler.set_stance("force_eager")
        yield lambda: torch.compiler.set_stance("default")
        return

    def leave_eager(model: Any = None, **kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    compile_, torch.compile = torch.compile, leave_eager
    try:
        import megatron.core.jit
        import megatron.core.transformer.moe.router
        import megatron.training.training
    finally:
        torch.compile = compile_
    megatron.core.jit.disable_jit_fuser()
    yield megatron.core.jit.enable_jit_fuser
