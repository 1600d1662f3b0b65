"""What asynchronous schedules do not support yet: refused before training starts, never silently wrong."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

Arguments = argparse.Namespace


@dataclass(frozen=True, slots=True)
class Refusal:
    """One unsupported setting of Megatron.

    Attributes:
        flag: The flag, as the user writes it.
        applies: Whether Megatron's validated arguments have the setting.
        reason: Why it cannot work, in a few words.
        remedy: What to do instead.
    """

    flag: str
    applies: Callable[[Arguments], bool]
    reason: str
    remedy: str


def _is_set(*names: str) -> Callable[[Arguments], bool]:
    """Whether one of the arguments is there and truthy."""
    return lambda args: any(bool(getattr(args, name, None)) for name in names)


def _above_one(*names: str) -> Callable[[Arguments], bool]:
    return lambda args: any((getattr(args, name, None) or 1) > 1 for name in names)


def _has_level_one_barriers(args: Arguments) -> bool:
    return bool(args.timing_log_level >= 1 and args.barrier_with_L1_time)


PROVED_OPTIMIZERS = ("adam", "sgd", "muon", "normuon", "adamuon", "soap", "lion", "adan", "mars", "nadam")
"""Optimizers whose deferred step equals the oracle's in every byte (tests/distributed/test_exactness.py)."""

LAYER_WISE_OPTIMIZERS = ("muon",)
"""Optimizers of matrices that are proved with the distributed optimizer, which gives whole matrices to ranks."""

CHECKPOINT_FORMATS = ("torch_dist", "torch")
"""Formats that the weight versions are written into."""

_DROP = "drop the flag"
_ONE_VERSION = "it keeps or caches weights outside the two weight versions"
_PER_ITERATION = "it looks at gradients or weights of a batch whose update is still deferred"
_CHANGES_BATCH = "forwards of the next batch have run before its size or data are decided"

REFUSALS: tuple[Refusal, ...] = (
    # Numbers
    Refusal("--fp16", _is_set("fp16"), "loss scaling needs its overflow check inside the step", "use --bf16"),
    Refusal("--loss-scale", _is_set("loss_scale"), "the deferred step does not unscale", _DROP),
    Refusal("--fp8-format", _is_set("fp8"), "weight caches do not follow the weight versions", "use --bf16"),
    Refusal("--fp4-format", _is_set("fp4"), "weight caches do not follow the weight versions", "use --bf16"),
    # Parallelism
    Refusal(
        "virtual pipeline stages",
        _is_set("virtual_pipeline_model_parallel_size"),
        "the schedule is not interleaved, and without a bubble there is nothing for interleaving to gain",
        "drop --num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank or the layout's "
        "virtual stages",
    ),
    Refusal(
        "--optimizer with --tensor-model-parallel-size",
        lambda args: args.tensor_model_parallel_size > 1 and args.optimizer in ("normuon", "adamuon", "soap"),
        "shards of a matrix would be normalized or preconditioned each by itself, which is another optimizer",
        "use --optimizer muon, or --tensor-model-parallel-size 1",
    ),
    Refusal(
        "--context-parallel-size",
        _above_one("context_parallel_size"),
        "context parallelism is not proved with it yet",
        "use --context-parallel-size 1",
    ),
    Refusal(
        "--step-batch-size-schedule with --num-experts",
        lambda args: bool(args.num_experts and args.step_batch_size_schedule),
        "the auxiliary loss is scaled by the size of the batch whose forward ran last",
        "use a constant --global-batch-size",
    ),
    Refusal(
        "--moe-router-load-balancing-type quantile_balancing",
        lambda args: bool(args.num_experts) and "quantile_balancing" in args.moe_router_load_balancing_type,
        "its statistics of prefetched forwards would be booked for the wrong batch",
        "use aux_loss, seq_aux_loss, global_aux_loss, or none with --moe-router-enable-expert-bias",
    ),
    Refusal(
        "--moe-enable-routing-replay",
        lambda args: bool(args.num_experts and getattr(args, "moe_enable_routing_replay", False)),
        "it records the forwards of one batch",
        _DROP,
    ),
    Refusal("--mtp-num-layers", _is_set("mtp_num_layers"), "multi-token prediction is not proved with it yet", _DROP),
    Refusal(
        "generalized tensor parallelism",
        _above_one("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
        "it is not proved with it yet",
        "leave its sizes at 1",
    ),
    # Optimizer and gradients
    Refusal(
        "--optimizer",
        lambda args: args.optimizer not in PROVED_OPTIMIZERS,
        "its step is not proved to be deferrable",
        f"use --optimizer {', '.join(PROVED_OPTIMIZERS[:-1])} or {PROVED_OPTIMIZERS[-1]}",
    ),
    Refusal(
        "--use-distributed-optimizer with --optimizer",
        lambda args: (
            (args.use_layer_wise_distributed_optimizer and args.optimizer not in LAYER_WISE_OPTIMIZERS)
            or (args.use_distributed_optimizer and args.optimizer != "adam")
        ),
        "its shards are not proved with two weight versions",
        "use --optimizer adam or muon, or drop --use-distributed-optimizer",
    ),
    Refusal(
        "--use-distributed-optimizer in fp32",
        lambda args: args.use_layer_wise_distributed_optimizer and not args.bf16,
        "Megatron has no masters of fp32 matrices with this optimizer",
        "add --bf16, or drop --use-distributed-optimizer",
    ),
    Refusal(
        "--num-distributed-optimizer-instances",
        _above_one("num_distributed_optimizer_instances"),
        "reductions over two levels of replicas are not deferred yet",
        "use --num-distributed-optimizer-instances 1",
    ),
    Refusal(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        _is_set("ddp_reduce_scatter_with_fp32_accumulation"),
        "its reduction is waited for bucket by bucket",
        _DROP,
    ),
    Refusal(
        "--use-megatron-fsdp / --use-torch-fsdp2",
        _is_set("use_megatron_fsdp", "use_torch_fsdp2"),
        _ONE_VERSION,
        _DROP,
    ),
    Refusal("--use-precision-aware-optimizer", _is_set("use_precision_aware_optimizer"), _ONE_VERSION, _DROP),
    Refusal("--optimizer-cpu-offload", _is_set("optimizer_cpu_offload"), _ONE_VERSION, _DROP),
    Refusal(
        "--overlap-param-gather-with-optimizer-step",
        _is_set("overlap_param_gather_with_optimizer_step"),
        "it is made for virtual pipeline stages",
        _DROP,
    ),
    Refusal(
        "--delay-wgrad-compute",
        _is_set("delay_wgrad_compute", "defer_embedding_wgrad_compute", "overlap_moe_expert_parallel_comm"),
        "weight gradients would be computed after the weight version has changed",
        _DROP,
    ),
    Refusal(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        _is_set("ddp_param_name_patterns_for_fp32_local_accumulation"),
        "gradients outside the accumulation buffer are not deferred",
        _DROP,
    ),
    Refusal("--qk-clip", _is_set("qk_clip", "log_max_attention_logit"), "it changes weights after the step", _DROP),
    Refusal("--freeze-all-layers", _is_set("freeze_all_layers"), "every stage needs parameters to train", _DROP),
    # Batches and data
    Refusal(
        "--sft",
        _is_set("sft", "hybrid_context_parallel", "dataloader_inter_document_masking"),
        "packed sequences have statistics that are booked for the wrong batch",
        _DROP,
    ),
    # Execution
    Refusal(
        "--cuda-graph-impl",
        lambda args: args.cuda_graph_impl != "none" or args.optimizer_cuda_graph,
        "a captured graph reads one set of weights",
        "use --cuda-graph-impl none and drop --optimizer-cuda-graph",
    ),
    Refusal(
        "--rerun-mode",
        lambda args: args.rerun_mode != "disabled",
        "it replays a batch of which forwards have already run",
        "use --rerun-mode disabled",
    ),
    Refusal(
        "--timing-log-level",
        _has_level_one_barriers,
        "its barriers stand at different places of the schedule on different stages",
        "add --no-barrier-with-level-1-timing",
    ),
    Refusal(
        "--fine-grained-activation-offloading / --cpu-offloading-num-layers",
        _is_set("fine_grained_activation_offloading", "cpu_offloading_num_layers"),
        "offloading is organized by batch, and two batches are in flight",
        _DROP,
    ),
    Refusal("--use-ring-exchange-p2p", _is_set("use_ring_exchange_p2p"), "messages are sent one by one", _DROP),
    Refusal("--perform-rl-step", _is_set("perform_rl_step"), _CHANGES_BATCH, _DROP),
    Refusal(
        "--inprocess-restart",
        _is_set("inprocess_restart"),
        "prefetched forwards do not survive a restart inside the process",
        _DROP,
    ),
    # Checkpoints and logs
    Refusal(
        "--ckpt-format",
        lambda args: bool(args.save or args.load) and args.ckpt_format not in CHECKPOINT_FORMATS,
        "the weight versions are written into no other format than torch_dist and torch",
        "use --ckpt-format torch_dist",
    ),
    Refusal(
        "--non-persistent-ckpt-type local",
        lambda args: args.non_persistent_ckpt_type == "local",
        "local checkpoints are not proved to resume exactly",
        "use --non-persistent-ckpt-type global",
    ),
    Refusal(
        "--ckpt-assume-constant-structure",
        lambda args: (
            args.ckpt_assume_constant_structure and bool(args.async_sync_start_iters or args.async_sync_cooldown_iters)
        ),
        "checkpoints of synchronous phases have another structure than those of the asynchronous phase",
        "drop it, or --async-sync-start-iters and --async-sync-cooldown-iters",
    ),
    Refusal("--log-num-zeros-in-grad", _is_set("log_num_zeros_in_grad"), _PER_ITERATION, _DROP),
    Refusal("--log-params-norm", _is_set("log_params_norm"), _PER_ITERATION, _DROP),
    Refusal(
        "--save-params-interval / --save-wgrads-interval / --save-dgrads-interval / --save-activations-interval",
        _is_set("save_params_interval", "save_wgrads_interval", "save_dgrads_interval", "save_activations_interval"),
        _PER_ITERATION,
        _DROP,
    ),
    Refusal(
        "--check-weight-hash-across-dp-replicas-interval",
        _is_set("check_weight_hash_across_dp_replicas_interval"),
        _PER_ITERATION,
        _DROP,
    ),
)
