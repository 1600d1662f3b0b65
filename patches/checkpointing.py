"""What stands in Megatron's checkpointing while an asynchronous schedule is chosen.

Each function takes the original and the session, and returns the replacement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_async.checkpoint import ENTRY, unreadable
from megatron_async.patches.training_loop import within

if TYPE_CHECKING:
    from megatron_async.session import Session


def save_checkpoint(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Megatron's save, of the weights and the random state that the next batch begins with."""

    return within(original, session.saving)


def generate_state_dict(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """What is saved, or is to be loaded, with the pipeline's entry."""

    @functools.wraps(original)
    def replacement(args: Any, model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> dict[str, Any]:
        state_dict: dict[str, Any] = original(args, model, optimizer, *rest, **kwargs)
        session.checkpoints.extend(
            state_dict,
            session.versioned_tensors(),
            sharded=args.ckpt_format == "torch_dist",
            optimizer=None if args.no_save_optim and session.checkpoints.is_saving else optimizer,
        )
        return state_dict

    return replacement


def load_base_checkpoint(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Loads as Megatron does, and keeps the pipeline's entry for the pipeline that is to come."""

    @functools.wraps(original)
    def replacement(load_dir: Any, args: Any, rank0: bool = False, **kwargs: Any) -> Any:
        try:
            state_dict, name, release, kind = original(load_dir, args, rank0=rank0, **kwargs)
        except (Exception, CheckpointException) as error:  # the second is no Exception
            raise unreadable(load_dir, error) from error
        if rank0:
            session.checkpoints.inspect(state_dict)
            return state_dict, name, release, kind
        template = kwargs.get("sharded_state_dict")
        wanted = not (args.finetune or args.no_load_optim or release) if template is None else ENTRY in template
        parameters = session.versioned_tensors()
        session.checkpoints.take(state_dict, parameters, wanted=wanted and bool(parameters))
        return state_dict, name, release, kind

    return replacement


def maybe_finalize_async_save(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Asks all ranks for the end of a save in the background, but not in every iteration."""

    @functools.wraps(original)
    def replacement(blocking: bool = False, terminate: bool = False) -> Any:
        if blocking or terminate or session.asks_for_saves():
            return original(blocking=blocking, terminate=terminate)
        return None

    return replacement
