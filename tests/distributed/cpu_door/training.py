"""Several runs of Megatron's own ``pretrain`` in one process, behind the CPU door, each with all that it computed."""

from __future__ import annotations

import functools
import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FLAGS = shlex.split("""
--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-layers 2 --hidden-size 32 --num-attention-heads 2
--seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 5e-3
--min-lr 5e-4 --lr-warmup-iters 2 --lr-decay-iters 6 --lr-decay-style cosine --split 80,10,10 --eval-iters 1
--eval-interval 4 --save-interval 3 --log-interval 1 --num-workers 0 --distributed-backend gloo
--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
--no-bias-gelu-fusion --no-bias-dropout-fusion
""")


class Record:
    """What one run computed on this rank.

    Attributes:
        train: Loss of each microbatch that was trained on, in order (last stage only).
        evaluated: Loss of each microbatch that was evaluated on, in order (last stage only).
        chunks: The model, as it was given to the forward step.
    """

    def __init__(self) -> None:
        self.train: list[float] = []
        self.evaluated: list[float] = []
        self.chunks: dict[int, torch.nn.Module] = {}

    def finding(self) -> dict[str, Any]:
        """The losses of all ranks, and a digest of the weights of each."""
        digest = hashlib.sha256()
        for chunk in self.chunks.values():
            for _, parameter in sorted(chunk.named_parameters()):
                digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (self.train, self.evaluated, digest.hexdigest()))
        return {
            "train": [train for train, _, _ in ranks],
            "evaluated": [evaluated for _, evaluated, _ in ranks],
            "weights": [weights for _, _, weights in ranks],
        }


def _loss(record: Record, training: bool, mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
    loss = torch.sum(output.view(-1).float() * mask.view(-1).float())
    tokens = mask.sum().to(torch.int)
    (record.train if training else record.evaluated).append(loss.item() / tokens.item())
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def _forward_step(record: Record, iterator: Any, model: torch.nn.Module) -> Any:
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_tp_rank
    from megatron.training import get_args

    args = get_args()
    record.chunks[id(model)] = model
    tp_rank = mpu.get_tensor_model_parallel_rank()
    keys = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    batch: dict[str, Any] = dict.fromkeys(keys)
    if mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage():
        if tp_rank == 0:
            sample = next(iterator)
            batch = {key: sample[key].cuda(non_blocking=True) if key in sample else None for key in keys}
            batch |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size"))
        batch = get_batch_on_this_tp_rank(
            batch,
            has_cu_seqlens=False,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
            broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
            broadcast_group=mpu.get_tensor_model_parallel_group(),
            cp_size=1,
            tp_rank=tp_rank,
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length,
            mtp_on_this_rank=False,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
            is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        )
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, functools.partial(_loss, record, model.training, batch["loss_mask"])


def _datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, samples, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    ).build()


_datasets.is_distributed = True  # type: ignore[attr-defined]


def run(*flags: str) -> dict[str, Any]:
    """Trains with Megatron's own loop.

    Args:
        *flags: Megatron's, after ``FLAGS``.

    Returns:
        ``train`` and ``evaluated``, the losses of each rank, and ``weights``, a digest of each rank's last weights.
    """
    from megatron.core.enums import ModelType
    from megatron.training import training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    record = Record()
    sys.argv = ["cpu_door", *FLAGS, *flags]
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    training.pretrain(container, _datasets, ModelType.encoder_or_decoder, functools.partial(_forward_step, record))
    finding = record.finding()
    training.destroy_global_state()
    return finding


def write(results: dict[str, Any], folder: str) -> None:
    """Writes ``results.json`` on rank 0."""
    if dist.get_rank() == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
