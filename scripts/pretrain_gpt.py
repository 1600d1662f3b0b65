#!/usr/bin/env python3
"""Pretrain a GPT on Megatron's own training loop, synchronously or with the asynchronous pipeline.

Every flag of Megatron works here; those of megatron_async stand in a group of their own (--help).

  torchrun --nproc-per-node 2 scripts/pretrain_gpt.py --pipeline-model-parallel-size 2 \\
      --pipeline-schedule 2bw-async --optimizer muon --data-path data/corpus ...
"""

# ruff: noqa: E402  (the plugin is installed before Megatron's training loop is imported)
from __future__ import annotations

import megatron_async

megatron_async.install()

import functools
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor | None]

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
SPIKE_FACTOR = 10  # --check-for-spiky-loss: a loss this many times the largest one seen so far
UNSUPPORTED = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "logits_load_dir": "--logits-load-dir",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "inprocess_restart": "--inprocess-restart",
}
straggler = StragglerDetector()


def needs_data(config: TransformerConfig, vp_stage: int | None) -> bool:
    """Whether this stage reads tokens or labels: both ends of the pipeline and multi-token prediction do."""
    return is_first_or_last_pipeline_stage(vp_stage) or has_mtp(config, vp_stage)


def has_mtp(config: TransformerConfig, vp_stage: int | None) -> bool:
    """Whether this pipeline stage holds multi-token prediction layers."""
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator: Iterator[Batch] | None, model: torch.nn.Module) -> Batch:
    """Next microbatch of this rank: read by tensor-parallel rank 0, broadcast, sliced for context parallelism.

    Returns:
        BATCH_KEYS to tensors (b, s), attention_mask (b, 1, s, s); None for what this stage does not need.
    """
    config, vp_stage = get_model_config(model), get_attr_wrapped_model(model, "vp_stage")
    if not needs_data(config, vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    args, tp_rank = get_args(), mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        assert data_iterator is not None
        device = next(model.parameters()).device
        loaded = next(data_iterator)
        for key in BATCH_KEYS:
            tensor = loaded.get(key)
            batch[key] = None if tensor is None else tensor.to(device, non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(config, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = {key: batch.get(key) for key in BATCH_KEYS}
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss of one microbatch.

    Args:
        loss_mask: (b, s), 1 where a token counts.
        output_tensor: (b, s), the loss of each token.

    Returns:
        The sum over the tokens that count, their number (int), and {"lm loss": (sum, number)} for the log.
    """
    args = get_args()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    rerun = get_rerun_state_machine()
    # A forward pass is deterministic: a rerun that does not give the same value again points at the hardware.
    validate = functools.partial(rerun.validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        remedy = "lower --lr, lengthen the warm-up, look at the data"
        validate(rejection_func=torch.isnan, message=f"NaN in the loss of a microbatch: {remedy}", fatal=True)
        validate(rejection_func=torch.isinf, message=f"Inf in the loss of a microbatch: {remedy}", fatal=True)
    if args.check_for_spiky_loss:
        spike = functools.partial(rerun.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss")
        validate(rejection_func=spike, message="loss spike", fatal=False)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Forward of one microbatch on this stage.

    Returns:
        Activations (s, b, h), or (b, s) token losses on the last stage, and the function that reduces these.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        batch = get_batch(data_iterator, model)
    timers("batch-generator").stop()
    with straggler:
        output_tensor = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output_tensor, functools.partial(loss_func, batch["loss_mask"])


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Everything that Megatron's flags say about the data: blends, splits, tokenizer, caches, masks."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = args.per_dataset_sequences_path
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=json.loads(Path(sequences).read_text()) if sequences else None,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def datasets(num_samples: list[int], vp_stage: int | None = None, *, config: TransformerConfig) -> tuple[Any, ...]:
    """Train, validation and test datasets of these numbers of samples, built on the ranks that read them."""
    args = get_args()

    def on_this_rank() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and needs_data(config, vp_stage)

    print_rank_0("> building the train, validation and test datasets ...")
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, on_this_rank, dataset_config(args)).build()


def embedding_ranks(pp_ranks: list[int], *, config: TransformerConfig, tied: bool) -> list[int]:
    """Ranks of a pipeline with word embeddings: the first, the last if tied, those of multi-token prediction."""
    last = [pp_ranks[-1]] if tied else []
    mtp = get_mtp_ranks(pp_ranks, config) if len(pp_ranks) > 1 else []
    return sorted({pp_ranks[0], *last, *mtp})


def check_flags(args: Namespace) -> None:
    """Refuse what this script does not do, and data that is not there.

    Raises:
        SystemExit: With a message that names the flag and the remedy.
    """
    refused = [flag for name, flag in UNSUPPORTED.items() if getattr(args, name, None)]
    if refused:
        sys.exit(
            f"{', '.join(refused)}: not supported by this script; leave it out, or run a script that "
            "supports it with the plugin: torchrun ... -m megatron_async SCRIPT ..."
        )
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    blends = [part for part in (blend, *(blend_per_split or [])) if part is not None]
    if not blends and not args.mock_data:
        sys.exit("no data: give --data-path PREFIX (scripts/prepare_data.py builds one) or --mock-data")
    if blend is not None and args.split is None:  # with --data-path Megatron has a default
        sys.exit("--data-args-path needs --split, e.g. --split 99,1,0 (training, validation, test)")
    for prefix in (prefix for prefixes, _ in blends for prefix in prefixes if "://" not in prefix):
        missing = [f"{prefix}{suffix}" for suffix in (".idx", ".bin") if not Path(f"{prefix}{suffix}").is_file()]
        if missing:
            sys.exit(f"--data-path: no file {missing[0]}; {prefix} must be the PREFIX of a built dataset")
        if not Path(f"{prefix}.bin").stat().st_size:
            sys.exit(f"--data-path: the dataset {prefix} is empty; build it from text that is there")


def main() -> None:
    """Parse the flags, build Megatron's configuration, train."""
    args = parse_and_validate_args()
    check_flags(args)
    model = gpt_config_from_args(args)
    provider = functools.partial(datasets, config=model.transformer)
    provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron: called on every rank
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=functools.partial(
            embedding_ranks, config=model.transformer, tied=not args.untie_embeddings_and_output_weights
        ),
    )


if __name__ == "__main__":
    main()
