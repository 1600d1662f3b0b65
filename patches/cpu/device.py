"""``torch.cuda`` as Megatron uses it, answered by the CPU: device, memory, random numbers, streams."""

from __future__ import annotations

import functools
import os
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from megatron_async.patches.replacement import Replacement

CPU = torch.device("cpu")


class Stream:
    """A stream of a device that runs everything in program order: there is nothing to wait for.

    Accepts, and ignores, what ``torch.cuda.Stream`` and ``torch.cuda.ExternalStream`` accept.
    """

    device = CPU
    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def synchronize(self) -> None:
        """Returns at once."""

    def wait_stream(self, stream: Stream) -> None:
        """Returns at once."""

    def wait_event(self, event: Event) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """Returns True: all work has been done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Records ``event``, or a new one, and returns it."""
        event = event or Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Returns the one priority that there is, as (least, greatest)."""
        return 0, 0


class Event:
    """An event that has happened as soon as it is recorded; ``elapsed_time`` is host time.

    Accepts, and ignores, what ``torch.cuda.Event`` accepts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Notes the time."""
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """Returns True: the event has happened."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the milliseconds from this event to ``end_event``."""
        return (end_event._recorded_at - self._recorded_at) * 1e3


_STREAM = Stream()


def memory_allocated(device: Any = None) -> int:
    """Returns the resident set size of this process in bytes (on CPU, weights are not told from the rest)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux
        return max_memory_allocated()


def max_memory_allocated(device: Any = None) -> int:
    """Returns the largest resident set size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_stats(device: Any = None) -> dict[str, int]:
    """Returns the entries of ``torch.cuda.memory_stats`` that Megatron logs, from the resident set size."""
    current, peak = memory_allocated(), max_memory_allocated()
    stats = {}
    for kind in ("allocated", "reserved", "active", "requested"):
        stats[f"{kind}_bytes.all.current"] = current
        stats[f"{kind}_bytes.all.peak"] = peak
    return stats | {"allocation.all.current": 0, "num_alloc_retries": 0, "num_ooms": 0}


def get_rng_state(device: Any = CPU) -> torch.Tensor:
    """Returns the state of the CPU generator, a uint8 tensor."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = CPU, graph_safe: bool = False) -> None:
    """Sets the state of the CPU generator.

    Args:
        new_state: What ``get_rng_state`` returned.
        device: Ignored.
        graph_safe: Ignored, as there are no CUDA graphs; an argument of megatron-core's own function.
    """
    torch.default_generator.set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seeds the CPU generator."""
    torch.default_generator.manual_seed(seed)


class DeviceGuard:
    """What ``torch.cuda.device`` and ``torch.cuda.stream`` return: there is one device and one stream.

    Args:
        target: Ignored.
    """

    def __init__(self, target: Any = None) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    """Returns the properties of the CPU that have a meaning for it, under the names of the CUDA ones."""
    return types.SimpleNamespace(
        name="CPU",
        major=0,
        minor=0,
        total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        multi_processor_count=os.cpu_count(),
    )


def _call_now(function: Callable[[], None], **kwargs: Any) -> None:
    function()


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _device_count() -> int:
    # Megatron takes ``local_rank % device_count`` in places and local_rank itself in others.
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _copy_of(function: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    return cast(types.FunctionType, functools.update_wrapper(copy, function))


def _instead(stand_in: Any, original: Any) -> Any:
    return stand_in


def _rows() -> Iterator[Replacement]:
    device = "Megatron puts tensors where this says, and initializes nothing where there are 0 devices"
    streams = "there are no streams on CPU; creating or synchronizing one raises without CUDA"
    memory = "Megatron logs these; without CUDA they are empty or raise"
    rng = "Megatron's RNG tracker forks the generator of the device, which is torch.default_generator on CPU"
    table: list[tuple[str, Any, str]] = [
        ("device_count", _device_count, device),
        ("current_device", _always(CPU), device),
        ("set_device", _nothing, device),
        ("device", DeviceGuard, device),
        ("get_device_name", _always("CPU"), device),
        ("get_device_properties", get_device_properties, device),
        ("get_device_capability", _always((0, 0)), "no kernel that asks for a capability can run"),
        ("Stream", Stream, streams),
        ("ExternalStream", Stream, streams),
        ("Event", Event, streams),
        ("stream", DeviceGuard, streams),
        ("set_stream", _nothing, streams),
        ("current_stream", _always(_STREAM), streams),
        ("default_stream", _always(_STREAM), streams),
        ("synchronize", _nothing, streams),
        ("is_current_stream_capturing", _always(False), streams),
        ("empty_cache", _nothing, memory),
        ("ipc_collect", _nothing, memory),
        ("memory_allocated", memory_allocated, memory),
        ("memory_reserved", memory_allocated, memory),
        ("max_memory_allocated", max_memory_allocated, memory),
        ("max_memory_reserved", max_memory_allocated, memory),
        ("device_memory_used", memory_allocated, memory),
        ("reset_peak_memory_stats", _nothing, memory),
        ("memory_stats", memory_stats, memory),
        ("get_rng_state", get_rng_state, rng),
        ("set_rng_state", set_rng_state, rng),
        ("random.get_rng_state", get_rng_state, rng),
        ("random.set_rng_state", set_rng_state, rng),
        ("manual_seed", manual_seed, rng),
        ("manual_seed_all", manual_seed, rng),
        ("_lazy_init", _nothing, "there is nothing to initialize; it raises without CUDA"),
        ("_lazy_call", _call_now, "calls would be queued for an initialization that never comes"),
        ("nvtx.range_push", _nothing, "NVTX is not there without CUDA"),
        ("nvtx.range_pop", _nothing, "NVTX is not there without CUDA"),
    ]
    for attribute, stand_in, reason in table:
        # torch.compile keeps rules by function object, and does not bear one that stands for two names.
        own = _copy_of(stand_in) if isinstance(stand_in, types.FunctionType) else stand_in
        yield Replacement(
            module="torch.cuda", attribute=attribute, replace=functools.partial(_instead, own), reason=reason
        )


REPLACEMENTS = tuple(_rows())
