"""Finds the fp32 master weight behind every parameter of a Megatron optimizer, and makes one where there is none."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)


@dataclass(frozen=True, slots=True)
class Master:
    """The optimizer's side of one parameter, or of this rank's shard of it.

    Attributes:
        parameter: The parameter of the model, of the model's dtype.
        optimized: The object that the optimizer's parameter groups hold, whose ``grad`` a step reads: the fp32 copy of
            a bf16 parameter, or an fp32 parameter itself; with the distributed optimizer a shard of that.
        weight: The master weight z, fp32, of the shape of ``optimized``.
        shard: First element and end of what ``weight`` holds of the flattened parameter; None for all of it.
        in_bucket: First element and end of the same in this rank's shard of the gradient bucket; None without shards.
    """

    parameter: torch.nn.Parameter
    optimized: torch.Tensor
    weight: torch.Tensor
    shard: tuple[int, int] | None = None
    in_bucket: tuple[int, int] | None = None

    @property
    def steps_in_place(self) -> bool:
        """Whether the optimizer steps the parameter object itself, whose storage a live graph may read."""
        return self.optimized is self.parameter

    @property
    def shares_version_counter(self) -> bool:
        """Whether autograd counts an in-place change of ``optimized`` as one of the parameter: an fp32 one or a view.

        Whatever storage its ``data`` points at.
        """
        return self.parameter.dtype is torch.float32

    def give_back(self, storage: torch.Tensor) -> None:
        """Let the optimizer step the parameter's own storage again, which holds what the master does.

        Args:
            storage: Of the parameter, its shape and dtype.
        """
        if self.shares_version_counter and not self.steps_in_place:
            self.optimized.data = self.part_of(storage)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor of the parameter's shape that this master stands for, in the shape of ``weight``."""
        if self.shard is None:
            return tensor
        start, end = self.shard
        return tensor.view(-1)[start:end]


def base_optimizers(optimizer: Any) -> list[Any]:
    """The Megatron optimizers behind ``optimizer``: those of its chain, and of chains within, or itself."""
    if not isinstance(optimizer, ChainedOptimizer):
        return [optimizer]
    return [base for chained in optimizer.chained_optimizers for base in base_optimizers(chained)]


def norm_parts(optimizer: Any) -> list[tuple[dist.ProcessGroup, list[Any]]]:
    """The Megatron optimizers behind ``optimizer``, by the ranks over which the squares of their gradients add up.

    Experts are cut over ranks that all have the same other parameters, so the two have different groups. Matrices of a
    layer-wise distributed optimizer are each on one rank of the job.
    """
    parts: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[Any]]] = {}
    shared_out = [base for found in layer_wise_optimizers(optimizer) for base in found.chained_optimizers]
    for base in base_optimizers(optimizer):
        # Megatron gives the parts of a layer-wise optimizer no group, and they fall back to one that is too small.
        is_shared_out = any(base is other for other in shared_out)
        group = dist.group.WORLD if is_shared_out else base.get_grad_stats_parallel_group()
        assert group is not None
        parts.setdefault(tuple(dist.get_process_group_ranks(group)), (group, []))[1].append(base)
    return list(parts.values())


def find_masters(optimizer: Any) -> list[Master]:
    """The masters of all parameters of a Megatron optimizer, in the order of its groups.

    Memory: 4 bytes for every fp32 parameter (shard), nothing for a bf16 one, whose master Megatron has.

    Args:
        optimizer: A ``ChainedOptimizer``, ``Float16OptimizerWithFloat16Params``, ``FP32Optimizer`` or
            ``DistributedOptimizer``.

    Raises:
        TypeError: If an optimizer of the chain keeps its masters in a form that is not supported.
    """
    return [master for base in base_optimizers(optimizer) for master in _masters_of(base)]


def find_known_masters(optimizer: Any) -> list[Master]:
    """The masters that Megatron itself has, in the order of its groups: an fp32 parameter is its own."""
    return [master for base in base_optimizers(optimizer) for master in _known_masters(base)]


def covered_parameters(optimizer: Any) -> set[torch.nn.Parameter]:
    """Parameters that the optimizer updates, here or, with the distributed optimizer, on a data-parallel peer."""
    covered: set[torch.nn.Parameter] = set()
    for layer_wise in layer_wise_optimizers(optimizer):
        # The optimizers in its chain have the matrices of this rank only.
        for everyones in (layer_wise.dp_cp_params_list, layer_wise.expt_dp_params_list):
            covered.update(parameter for parameters in everyones or () for parameter in parameters)
    for base in base_optimizers(optimizer):
        if isinstance(base, DistributedOptimizer):
            for buffer in base.buffers:
                covered.update(buffer.param_index_map)
        else:
            covered.update(master.parameter for master in _known_masters(base))
    return covered


def layer_wise_optimizers(optimizer: Any) -> list[LayerWiseDistributedOptimizer]:
    """Megatron's layer-wise distributed optimizers behind ``optimizer``."""
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        return [optimizer]
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else []
    return [found for chained in chain for found in layer_wise_optimizers(chained)]


def _masters_of(optimizer: Any) -> Iterator[Master]:
    for master in _known_masters(optimizer):
        if not master.shares_version_counter:
            yield master
            continue
        # Megatron keeps no master for an fp32 parameter. With two weight versions it needs one as a bf16 parameter
        # does: the optimizer steps the newest weights in place, which live graphs read.
        weight = master.weight.detach().clone()
        if not master.steps_in_place:
            # A shard is a view that nothing but the optimizer looks at: let it look at the master for good.
            master.optimized.data = weight
        yield Master(master.parameter, master.optimized, weight, master.shard, master.in_bucket)


def _known_masters(optimizer: Any) -> Iterator[Master]:
    if optimizer.is_stub_optimizer:
        return
    # The classes themselves: a subclass may shard or reorder its masters.
    if type(optimizer) is Float16OptimizerWithFloat16Params:
        for group, masters in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                yield Master(parameter, master, master)
        for group in optimizer.fp32_from_fp32_groups:
            yield from (Master(p, p, p) for p in group)
    elif type(optimizer) is FP32Optimizer:
        yield from (Master(p, p, p) for p in optimizer.get_parameters())
    elif type(optimizer) is DistributedOptimizer:
        yield from _sharded_masters(optimizer, optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups)
        yield from _sharded_masters(optimizer, optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    else:
        raise TypeError(f"the step of {type(optimizer).__name__} cannot be deferred: drop --use-distributed-optimizer")


def _sharded_masters(
    optimizer: DistributedOptimizer,
    parameter_groups: list[list[torch.nn.Parameter]],
    shard_groups: list[list[torch.Tensor]],
) -> Iterator[Master]:
    for parameters, shards in zip(parameter_groups, shard_groups, strict=True):
        for parameter, shard in zip(parameters, shards, strict=True):
            ranges = optimizer._get_model_param_range_map(parameter)
            inside, local = ranges["param"], ranges["gbuf_local"]
            yield Master(parameter, shard, shard, (inside.start, inside.end), (local.start, local.end))
