"""Checkpoints: what of megatron-core's saving and loading takes for granted that tensors are on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_async.patches.replacement import Replacement

_ASYNC_SAVE = "megatron.core.dist_checkpointing.strategies.async_utils"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"


def _schedule_a_snapshot(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def schedule_async_call(self: Any, async_req: Any) -> None:
        if async_req.async_fn is not None and async_req.preload_fn is not None:
            snapshot = [
                (path, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
                for path, key, (objects, tensors) in async_req.preload_fn()
            ]
            rank, _, results = async_req.async_fn_args
            async_req = async_req._replace(async_fn_args=(rank, snapshot, results), preload_fn=None)
        original(self, async_req)

    return schedule_async_call


_original_loop: Callable[..., None]


def save_in_worker(*args: Any, **kwargs: Any) -> None:
    """Runs megatron-core's loop of the persistent checkpoint worker, in the worker, behind the CPU door.

    Args:
        *args: As ``PersistentAsyncCaller.async_loop``.
        **kwargs: As ``PersistentAsyncCaller.async_loop``.
    """
    import megatron_async.patches.cpu as door

    door.install(quiet=True)
    _original_loop(*args, **kwargs)


def _loop_behind_the_door(original: Callable[..., None]) -> Any:
    global _original_loop
    _original_loop = original
    # A function of a module, not a closure: it is sent to the worker by name.
    return staticmethod(save_in_worker)


def _state_dict_before_the_first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        states = self.optimizer.state
        # torch keeps state under a key that is no parameter as it is; it stands for a rank that has no state yet.
        placeholder: dict[str, dict[str, Any]] = {} if states else {"step": {}}
        states.update(placeholder)
        without_step = [state for state in states.values() if "step" not in state]
        for state in without_step:
            state["step"] = torch.zeros(())
        try:
            return original(self)
        finally:
            for state in without_step:
                del state["step"]
            for key in placeholder:
                del states[key]

    return state_dict


def _step_per_parameter(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    return load_state_dict


def _keep_the_step(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # What is no tensor is left alone: the step count has been loaded with the parameter groups.
        with torch.no_grad():
            original(self, model_param, {**tensors, "step": None})

    return set_main_param_and_optimizer_states


REPLACEMENTS = (
    Replacement(
        module=_ASYNC_SAVE,
        attribute="PersistentAsyncCaller.schedule_async_call",
        replace=_schedule_a_snapshot,
        reason="the copy to the host that makes a snapshot does nothing for CPU tensors: the worker would "
        "write weights and moments while they are being updated",
    ),
    Replacement(
        module=_ASYNC_SAVE,
        attribute="PersistentAsyncCaller.async_loop",
        replace=_loop_behind_the_door,
        reason="the worker is a new process, in which nothing stands in for CUDA",
    ),
    Replacement(
        module=_DISTRIBUTED_OPTIMIZER,
        attribute="DistributedOptimizer.state_dict",
        replace=_state_dict_before_the_first_step,
        reason="with torch's optimizers (no Apex, no Transformer Engine) it asserts that there is a step "
        "count, which is not so when a checkpoint is loaded, nor ever with Lion",
    ),
    Replacement(
        module=_DISTRIBUTED_OPTIMIZER,
        attribute="DistributedOptimizer.load_state_dict",
        replace=_step_per_parameter,
        reason="with torch's optimizers it gives all parameters one step count, which each of them then advances",
    ),
    Replacement(
        module=_DISTRIBUTED_OPTIMIZER,
        attribute="DistributedOptimizer._set_main_param_and_optimizer_states",
        replace=_keep_the_step,
        reason="with torch's optimizers it wants a step count from the state of each parameter, which has a "
        "stale one or none; and fp32 weights are leaves that it may only write without recording gradients",
    ),
)
