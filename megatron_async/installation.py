"""Applies the tables of replaced names, once, after checking that upstream is what they were written for."""

from __future__ import annotations

import os
from collections.abc import Callable

from megatron_async.config import AsyncPipelineConfig
from megatron_async.errors import ConfigurationError

SUPPORTED_MEGATRON_CORE = (0, 19)
"""Major and minor version of megatron-core that the tables were written for."""

_session = None
_undo: list[Callable[[], None]] = []


def install():  # type: ignore[no-untyped-def]
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

    from megatron_async.patches import table
    from megatron_async.patches.replacement import apply_all
    from megatron_async.session import Session

    session = Session(cpu=on_cpu)
    _undo.extend(apply_all(table.always(session)))

    def switch_on(config: AsyncPipelineConfig) -> None:
        if not config.is_asynchronous:
            return
        rows = table.asynchronous(session)
        _undo.extend(apply_all(rows))
        if os.environ.get("RANK", "0") == "0":
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


def check_upstream_version() -> None:
    """Refuse a megatron-core that the tables were not written for.

    Raises:
        ConfigurationError: With the version found and the one to install.
    """
    try:
        from megatron.core.package_info import __version__ as version
    except ImportError as error:
        raise ConfigurationError("megatron-core is not installed; pip install 'megatron-core>=0.19.2,<0.20'") from error
    found = tuple(int(part) for part in version.split(".")[:2])
    if found != SUPPORTED_MEGATRON_CORE:
        raise ConfigurationError(f"megatron-core {version} is not supported; pip install 'megatron-core>=0.19.2,<0.20'")
