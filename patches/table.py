"""Every name of Megatron that the plugin replaces on a machine with CUDA.

``always`` is applied by ``install()``: it adds flags and their checks, and saves what Megatron cannot save. Without our
flags nothing else changes.
``asynchronous`` is applied once the parsed flags ask for an asynchronous schedule. What a machine without CUDA needs
besides is declared in ``patches/cpu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_async.optimizer.state_sharding import shard_any_state
from megatron_async.patches import arguments, checkpointing, training_loop
from megatron_async.patches.replacement import Replacement

if TYPE_CHECKING:
    from megatron_async.session import Session

_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"


def always(session: Session) -> tuple[Replacement, ...]:
    """Rows that ``install()`` applies."""
    return (
        Replacement(
            module=_ARGUMENTS,
            attribute="add_megatron_arguments",
            replace=arguments.with_own_flags,
            parameters=("parser",),
            reason="a script's extra_args_provider reaches one parser only; Megatron parses the command line again "
            "(ft_integration.setup, inprocess_restart) with a parser of its own",
        ),
        Replacement(
            module=_ARGUMENTS,
            attribute="validate_args",
            replace=lambda original: arguments.with_own_checks(original, session),
            parameters=("args", "defaults"),
            reason="the checks need Megatron's derived values, and must run before anything is initialized",
        ),
        Replacement(
            module="megatron.training.yaml_arguments",
            attribute="load_yaml",
            replace=arguments.without_own_flags,
            parameters=("yaml_path",),
            reason="a YAML configuration takes the place of the command line, and our flags would be dropped silently",
        ),
        Replacement(
            module="megatron.core.dist_checkpointing.optimizer",
            attribute="make_sharded_optimizer_tensor",
            replace=shard_any_state,
            parameters=("model_param", "optim_param", "prefix"),
            reason="sharded checkpoints refuse optimizer state that has not the shape of its parameter (SOAP, NorMuon)",
        ),
    )


def asynchronous(session: Session) -> tuple[Replacement, ...]:
    """Rows that an asynchronous ``--pipeline-schedule`` switches on: module globals of the training loop."""

    def row(
        attribute: str,
        replace: training_loop.Factory,
        parameters: tuple[str, ...],
        reason: str,
        module: str = _TRAINING,
    ) -> Replacement:
        return Replacement(
            module=module,
            attribute=attribute,
            replace=lambda original: replace(original, session),
            parameters=parameters,
            reason=reason,
            enabled_by="an asynchronous --pipeline-schedule",
        )

    return (
        row(
            "get_forward_backward_func",
            training_loop.get_forward_backward_func,
            ("pp_size", "vp_size", "schedule_pg_collection"),
            "there is no registry of schedules",
        ),
        row(
            "get_megatron_optimizer",
            training_loop.get_megatron_optimizer,
            (
                "config",
                "model_chunks",
                "config_overrides",
                "use_gloo_process_groups",
                "pg_collection",
                "dump_param_to_param_group_map",
            ),
            "the optimizer's step() becomes the begin of a deferred update",
        ),
        row(
            "get_optimizer_param_scheduler",
            training_loop.get_optimizer_param_scheduler,
            ("optimizer",),
            "a skipped update, known one step later, must hold the schedule back as Megatron does",
        ),
        row(
            "logical_and_across_model_parallel_group",
            training_loop.keep_local,
            ("input", "group"),
            "it blocks across stages in every step; the deferred update agrees on success by itself",
        ),
        row(
            "reduce_max_stat_across_model_parallel_group",
            training_loop.keep_local,
            ("stat", "group"),
            "it blocks across stages in every step; every stage knows learning rate and gradient norm",
        ),
        row(
            "training_log",
            training_loop.training_log,
            (
                "loss_dict",
                "total_loss_dict",
                "learning_rate",
                "iteration",
                "loss_scale",
                "report_memory_flag",
                "skipped_iter",
                "grad_norm",
                "params_norm",
                "num_zeros_in_grad",
                "max_attention_logit",
                "pg_collection",
                "is_first_iteration",
                "seqlen_squared_sum_in_batch",
                "total_real_tokens_in_batch",
            ),
            "a skipped update is known after its iteration was booked",
        ),
        row(
            "checkpoint_and_decide_exit",
            training_loop.checkpoint_and_decide_exit,
            (
                "model",
                "optimizer",
                "opt_param_scheduler",
                "iteration",
                "num_floating_point_operations_so_far",
                "checkpointing_context",
                "train_data_iterator",
            ),
            "signals and time limits are asked of all ranks in every iteration; they travel with the deferred update",
        ),
        row(
            "train",
            training_loop.train,
            (
                "forward_step_func",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "train_data_iterator",
                "valid_data_iterator",
                "process_non_loss_data_func",
                "config",
                "checkpointing_context",
                "non_loss_data_func",
                "inference_model",
                "p2p_communicator",
                "pg_collection",
            ),
            "the last update is completed, and messages on the wire are taken off it, when training ends",
        ),
        row(
            "maybe_finalize_async_save",
            checkpointing.maybe_finalize_async_save,
            ("blocking", "terminate"),
            "all ranks are asked in every iteration whether a save in the background has ended",
        ),
        row(
            "save_checkpoint",
            checkpointing.save_checkpoint,
            (
                "iteration",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "num_floating_point_operations_so_far",
                "checkpointing_context",
                "pipeline_rank",
                "expert_rank",
                "tensor_rank",
                "pipeline_parallel",
                "expert_parallel",
                "non_persistent_ckpt",
                "train_data_iterator",
                "preprocess_common_state_dict_fn",
                "release",
                "tp_group",
                "pp_group",
                "dp_cp_group",
                "dp_group",
                "expt_dp_group",
                "rng_state_key_prefix",
            ),
            "the pending update is completed, and model and random state are those of the next batch, while it saves",
        ),
        row(
            "generate_state_dict",
            checkpointing.generate_state_dict,
            (
                "args",
                "model",
                "optimizer",
                "opt_param_scheduler",
                "rng_state",
                "iteration",
                "optim_sd_kwargs",
                "model_sd_kwargs",
                "rerun_state",
            ),
            "checkpoints have no place for further weights, which the next batches read",
            module=_CHECKPOINTING,
        ),
        row(
            "_load_base_checkpoint",
            checkpointing.load_base_checkpoint,
            (
                "load_dir",
                "args",
                "rank0",
                "sharded_state_dict",
                "checkpointing_context",
                "dp_cp_group",
                "expt_dp_group",
                "gpt_compat_layer_maps",
            ),
            "what a checkpoint has besides Megatron's own entries is dropped where it is loaded",
            module=_CHECKPOINTING,
        ),
    )
