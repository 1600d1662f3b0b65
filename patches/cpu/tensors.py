"""Puts on the CPU what Megatron creates on, or moves to, the device "cuda".

Only the functions that take a device are wrapped, at a fraction of a microsecond a call; a
``TorchFunctionMode`` would put Python in front of every operation of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_async.patches.cpu.device import CPU
from megatron_async.patches.replacement import Replacement

# The factory functions to which Megatron, or a pretrain script, passes a device.
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)


def _on_cpu(device: Any) -> Any:
    if device.__class__ is str:
        return CPU if device.startswith("cuda") else device
    if device.__class__ is torch.device:
        return CPU if device.type == "cuda" else device
    # A bare index names the accelerator with that number; a bool is not one.
    return CPU if device.__class__ is int else device


def factory_on_cpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps a factory function so that it takes ``device="cuda"`` for the CPU and ignores ``pin_memory``."""

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _tensor_to(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            first = args[0]
            if first.__class__ is not torch.dtype and not isinstance(first, torch.Tensor):
                args = (_on_cpu(first), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _tensor_itself(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def itself(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    return itself


class TypeName(str):
    """The type name of a CPU tensor, "torch.FloatTensor", which equals "torch.cuda.FloatTensor" too."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return NotImplemented
        return str.__eq__(self, other) or str.__eq__(self, other.replace("torch.cuda.", "torch.", 1))

    def __ne__(self, other: object) -> bool:
        return not self == other


class _TypeNames(dict[str, TypeName]):
    def __missing__(self, name: str) -> TypeName:
        self[name] = TypeName(name)
        return self[name]


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    names = _TypeNames()

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return names[answer] if answer.__class__ is str else answer

    return type_


def _tensor_record_stream(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def record_stream(self: torch.Tensor, stream: Any) -> None: ...

    return record_stream


def _rows() -> Iterator[Replacement]:
    for name in FACTORIES:
        yield Replacement(
            module="torch",
            attribute=name,
            replace=factory_on_cpu,
            reason='Megatron creates tensors with device="cuda", and pinned ones; both raise without CUDA',
        )
    methods: list[tuple[str, Callable[[Any], Any], str]] = [
        ("to", _tensor_to, 'Tensor.to("cuda") raises without CUDA'),
        ("cuda", _tensor_itself, "Tensor.cuda() raises without CUDA"),
        ("pin_memory", _tensor_itself, "pinning raises without an accelerator"),
        ("record_stream", _tensor_record_stream, "the allocator of CPU memory knows no streams"),
        ("type", _tensor_type, "Megatron's optimizers compare it with names such as torch.cuda.FloatTensor"),
    ]
    for name, replace, reason in methods:
        yield Replacement(module="torch", attribute=f"Tensor.{name}", replace=replace, reason=reason)


REPLACEMENTS = tuple(_rows())
