"""Applies the tables of replaced names, once, after checking that upstream is what they were written for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_async.config import AsyncPipelineConfig
from megatron_async.errors import ConfigurationError
from megatron_async.ranks import is_first_rank

if TYPE_CHECKING:
    from megatron_async.session import Session

SUPPORTED_MEGATRON_CORE = (0, 19)
"""Major and minor version of megatron-core that the tables were written for."""

_REMEDY = "pip install 'megatron-core>=0.19.2,<0.20'"

_session: Session | None = None
_undo: list[Callable[[], None]] = []


def install() -> Session:
    """See :func:`megatron_async.install`."""
    global _session
    if _session is not None:
        return _session
    check_upstream_version()
    from megatron_async.patches import cpu

    on_cpu = cpu.is_needed()
    if on_cpu:
        cpu.install()
        _undo.append(cpu.uninstall)

    from megatron_async.patches import table, tracing
    from megatron_async.patches.replacement import apply_all
    from megatron_async.session import Session

    session = Session(cpu=on_cpu)
    _undo.extend(apply_all(table.always(session)))

    def switch_on(config: AsyncPipelineConfig) -> None:
        if not config.is_asynchronous:
            if config.async_trace is not None:
                _undo.extend(apply_all(tracing.tracing(tracing.ScheduleTracer(session.make_trace))))
            return
        rows = table.asynchronous(session)
        _undo.extend(apply_all(rows))
        if is_first_rank():
            print(f"> megatron_async: {config.pipeline_schedule} replaces in Megatron:", flush=True)
            for row in rows:
                print(f">   {row.name}: {row.reason}", flush=True)

    session.on_configure.append(switch_on)
    _session = session
    return session


def uninstall() -> None:
    """See :func:`megatron_async.uninstall`."""
    global _session
    while _undo:
        _undo.pop()()
    _session = None


def upstream_version() -> str:
    """Version of the installed megatron-core.

    Raises:
        ConfigurationError: If there is none.
    """
    # Not from megatron.core: importing that must wait until the CPU door is open.
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:  # a checkout of Megatron-LM on the path
        from megatron.core.package_info import __version__

        return str(__version__)
    except ImportError as error:
        raise ConfigurationError(f"megatron-core is not installed; {_REMEDY}") from error


def check_upstream_version() -> None:
    """Refuse a megatron-core that the tables were not written for.

    Raises:
        ConfigurationError: With the version found and the one to install.
    """
    version = upstream_version()
    if tuple(int(part) for part in version.split(".")[:2]) != SUPPORTED_MEGATRON_CORE:
        raise ConfigurationError(f"megatron-core {version} is not supported; {_REMEDY}")
