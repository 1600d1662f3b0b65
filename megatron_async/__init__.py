"""Asynchronous pipeline-parallel pretraining for Megatron.

Importing this package changes nothing; :func:`install` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_async.session import Session

__version__ = "0.1.0"

__all__ = ["__version__", "install", "uninstall"]


def install() -> Session:
    """Add the plugin to Megatron in this process. A second call does nothing.

    Adds the flags of :class:`~megatron_async.config.AsyncPipelineConfig` to Megatron's parser. Without them Megatron
    behaves as without the plugin. On a machine without CUDA, the CPU door (``patches/cpu``) is opened as well.

    Call it before Megatron parses its arguments, best before anything of Megatron is imported.

    Returns:
        The session, which holds the plugin's state.

    Raises:
        ConfigurationError: If the installed megatron-core is of a version that is not supported.
    """
    from megatron_async import installation

    return installation.install()


def uninstall() -> None:
    """Put back every name that the plugin has replaced, for tests."""
    from megatron_async import installation

    installation.uninstall()
