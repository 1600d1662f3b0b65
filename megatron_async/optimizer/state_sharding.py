"""Optimizer state that has not the shape of its parameter, in Megatron's sharded checkpoints."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from megatron_async.optimizer.masters import base_optimizers

Make = Callable[[Any, torch.Tensor, str], Any]


def shard_any_state(original: Make) -> Make:
    """``make_sharded_optimizer_tensor`` that takes state of any shape.

    megatron-core cuts and joins state as it does the parameter, and refuses what has another shape: SOAP's Kronecker
    factors and their eigenbases, the reduced second moment of NorMuon. Such state belongs to the shard of the
    parameter that a rank holds as a whole. It is stored as an object of that shard, and so survives another pipeline
    size, but not another tensor-parallel size, for which the factors of another shard would be needed.

    Args:
        original: megatron-core's function.
    """

    def make_sharded_optimizer_tensor(model_param: Any, optim_param: torch.Tensor, prefix: str) -> Any:
        if tuple(optim_param.shape) == tuple(_local_shape(model_param)):
            return original(model_param, optim_param, prefix)
        counts, position = _place(model_param)
        return ShardedObject(f"{prefix}.{model_param.key}", optim_param, counts, position, model_param.replica_id)

    return make_sharded_optimizer_tensor


def _local_shape(model_param: Any) -> tuple[int, ...]:
    if isinstance(model_param, ShardedTensorFactory):
        return tuple(model_param.data.shape)
    return tuple(model_param.local_shape)


def _place(model_param: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Number of shards of a parameter along each axis, layers among them, and the place of this rank's."""
    if isinstance(model_param, ShardedTensorFactory):
        # A parameter that is stored in parts, as the two halves of SwiGLU's projection: they are one shard here.
        parts = [part for part in nested_values(model_param.build()) if isinstance(part, ShardedTensor)]
    else:
        parts = [model_param]
    counts, position = [], []
    for axis in range(len(parts[0].global_shape)):
        places = sorted({_fragment(part, axis) for part in parts})
        counts.append(_fragments(parts[0])[axis] // len(places))
        position.append(places[0])
    return tuple(counts), tuple(position)


def _fragments(tensor: ShardedTensor) -> tuple[int, ...]:
    return tuple(tensor.axis_fragmentations or (1,) * len(tensor.global_shape))


def _fragment(tensor: ShardedTensor, axis: int) -> int:
    size = tensor.global_shape[axis] // _fragments(tensor)[axis]
    return int(tensor.global_offset[axis] // size)


def provide_initial_state(optimizer: Any) -> None:
    """Give SGD the state that a sharded checkpoint is loaded into; megatron-core has that for its other optimizers.

    Args:
        optimizer: A Megatron optimizer.
    """
    for base in base_optimizers(optimizer):
        if isinstance(base.optimizer, torch.optim.SGD) and base.init_state_fn is None:
            base.init_state_fn = _make_momentum


def _make_momentum(optimizer: torch.optim.SGD, config: Any = None) -> None:
    # A first step from zeros leaves in the buffer what one without a buffer does: the gradient.
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))
