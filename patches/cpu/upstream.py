"""The names of megatron-core, megatron.training and torch's data loader that the CPU door replaces."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_async.patches.cpu.device import set_rng_state
from megatron_async.patches.replacement import Replacement


def _without_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(allow_no_cuda: bool = False, *args: Any, **kwargs: Any) -> Any:
        return original(True, *args, **kwargs)

    return initialize_megatron


def _helpers_are_compiled(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        import megatron.core.datasets.helpers_cpp  # noqa: F401  (an ImportError is the clearest message)

    return compile_helpers


def _splits_for_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


def _norm_with_sequence_parallelism(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        local = copy.copy(config)
        local.sequence_parallel = False
        norm = original(cls, local, *args, **kwargs)
        for parameter in norm.parameters():
            # finalize_model_grads sums the gradients of such parameters over the tensor-parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(new)


def _host_rng_of_its_own(original: Callable[..., None]) -> Callable[..., None]:
    host_rng: torch.Tensor | None = None

    @functools.wraps(original)
    def init(self: Any, loader: Any) -> None:
        nonlocal host_rng
        device_rng = torch.get_rng_state()
        if host_rng is not None:
            torch.set_rng_state(host_rng)
        try:
            original(self, loader)
        finally:
            host_rng = torch.get_rng_state()
            torch.set_rng_state(device_rng)

    return init


REPLACEMENTS = (
    *(
        Replacement(
            module=module,
            attribute="initialize_megatron",
            replace=_without_cuda,
            reason="pretrain() calls it without allow_no_cuda, which then asserts that CUDA is available",
        )
        for module in ("megatron.training.initialize", "megatron.training", "megatron.training.training")
    ),
    Replacement(
        module="megatron.core.tensor_parallel.random",
        attribute="_set_cuda_rng_state",
        replace=lambda _: set_rng_state,
        reason="it indexes torch.cuda.default_generators, which is empty",
    ),
    Replacement(
        module="megatron.training.arguments",
        attribute="get_device_arch_version",
        replace=lambda _: lambda: 10,
        reason="below 10, tensor parallelism is refused unless CUDA_DEVICE_MAX_CONNECTIONS=1 orders the kernels",
    ),
    Replacement(
        module="megatron.core.datasets.utils",
        attribute="compile_helpers",
        replace=_helpers_are_compiled,
        reason="it runs make, and a wheel brings the compiled helpers but no Makefile",
    ),
    *(
        Replacement(
            module=f"megatron.core.transformer.moe.{module}",
            attribute="maybe_move_tensor_to_cpu",
            replace=_splits_for_the_host,
            reason="it makes lists of numbers of CUDA tensors only, and an all-to-all takes no tensors as sizes",
        )
        for module in ("moe_utils", "token_dispatcher")
    ),
    Replacement(
        module="megatron.core.transformer.torch_norm",
        attribute="WrappedTorchNorm.__new__",
        replace=_norm_with_sequence_parallelism,
        reason="it leaves sequence parallelism, which tensor parallelism with experts requires, to the norms of "
        "Apex and Transformer Engine",
    ),
    Replacement(
        module="torch.utils.data.dataloader",
        attribute="_BaseDataLoaderIter.__init__",
        replace=_host_rng_of_its_own,
        reason="it draws a seed on the host; here that would move the generator that dropout uses, so that a "
        "resumed run, which makes its loaders anew, would leave the trajectory",
    ),
)
