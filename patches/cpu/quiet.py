"""Keeps out of the log what says nothing on a machine without CUDA, message by message."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable

# (category, what the message starts with, module that warns); all three must match.
WARNINGS: tuple[tuple[type[Warning], str, str], ...] = (
    (UserWarning, "Transformer Engine and Apex are not installed", r"megatron\."),
    (UserWarning, "Apex is not installed. Falling back to Torch Norm", r"megatron\."),
    (UserWarning, "Only transformer-engine>=1.7.0 supports MoE experts", r"megatron\."),
    (
        UserWarning,
        "'pin_memory' argument is set as true but no accelerator is found",
        r"(torch\.utils\.data|megatron_async\.patches\.cpu)\.",
    ),
    (FutureWarning, "`torch.distributed.all_gather_into_tensor` is deprecated", r"torch\.distributed"),
    (FutureWarning, "`torch.distributed.reduce_scatter_tensor` is deprecated", r"torch\.distributed"),
)

# (logger, what the message starts with)
LOG_RECORDS: tuple[tuple[str, str], ...] = (
    # The tracker's fork restores the generator, which it reports as a change, as CPU and device share one.
    ("megatron.core.tensor_parallel.random", "CPU RNG state changed within GPU RNG context"),
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
)


class _Drop(logging.Filter):
    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._start)


def silence() -> Callable[[], None]:
    """Starts to drop the messages of the two tables.

    Returns:
        A function that lets them through again.
    """
    filters = warnings.filters
    before = list(filters)
    for category, start, module in WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(start), category=category, module=module)
    added = [entry for entry in warnings.filters if entry not in before]
    drops = [(logging.getLogger(name), _Drop(start)) for name, start in LOG_RECORDS]
    for logger, drop in drops:
        logger.addFilter(drop)

    def undo() -> None:
        for entry in added:
            if entry in warnings.filters:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]
        for logger, drop in drops:
            logger.removeFilter(drop)

    return undo
