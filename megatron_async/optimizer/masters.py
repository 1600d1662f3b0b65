"""Finds the fp32 master weight behind every parameter of a Megatron optimizer, and makes one where there is none."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)


@dataclass(frozen=True, slots=True)
class Master:
    """The optimizer's side of one parameter.

    Attributes:
        parameter: The parameter of the model, of the model's dtype.
        optimized: The object that the optimizer's parameter groups hold, whose ``grad`` a step reads: the fp32 copy of
            a bf16 parameter, or an fp32 parameter itself.
        weight: The master weight z, fp32, of the parameter's shape.
    """

    parameter: torch.nn.Parameter
    optimized: torch.Tensor
    weight: torch.Tensor

    @property
    def is_own(self) -> bool:
        """Whether Megatron keeps no master for this parameter, so that ``weight`` was made here.

        With two weight versions an fp32 parameter needs one as a bf16 parameter does: the optimizer steps the newest
        weights in place, which live graphs read.
        """
        return self.optimized is self.parameter


def base_optimizers(optimizer: Any) -> list[Any]:
    """The Megatron optimizers behind ``optimizer``: its chain, or itself."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def find_masters(optimizer: Any) -> list[Master]:
    """The masters of all parameters of a Megatron optimizer, in the order of its groups.

    Memory: 4 bytes for every fp32 parameter, nothing for a bf16 one, whose master Megatron has.

    Args:
        optimizer: A ``ChainedOptimizer``, ``Float16OptimizerWithFloat16Params`` or ``FP32Optimizer``.

    Raises:
        TypeError: If an optimizer of the chain keeps its masters in a form that is not supported.
    """
    return [master for base in base_optimizers(optimizer) for master in _masters_of(base)]


def _masters_of(optimizer: Any) -> Iterator[Master]:
    if optimizer.is_stub_optimizer:
        return
    # The classes themselves: a subclass (the distributed optimizer is one's sibling) may shard or reorder its masters.
    if type(optimizer) is Float16OptimizerWithFloat16Params:
        for group, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                yield Master(parameter, master, master)
        full_precision = [p for group in optimizer.fp32_from_fp32_groups for p in group]
    elif type(optimizer) is FP32Optimizer:
        full_precision = optimizer.get_parameters()
    else:
        raise TypeError(
            f"2bw-async cannot defer the step of {type(optimizer).__name__}: use --optimizer adam, sgd or muon "
            "without --use-distributed-optimizer"
        )
    for parameter in full_precision:
        yield Master(parameter, parameter, parameter.detach().clone())
