"""Tiny pipeline models for exactness tests, with both kinds of linear layers that hazard tests need.

An op that saves the weight *leaf* for its backward follows a later rebinding of ``param.data``; one that
saves a *view* of it keeps the old storage. ``LeafLinear`` is the first kind (as Megatron's own linear layers
are), ``ViewLinear`` the second.

Shapes: S sequence, B microbatch, H hidden, V vocabulary. Activations are (S, B, H), tokens and targets
(S, B).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _LeafLinearFunction(torch.autograd.Function):
    """y = x W^T + b, saving the weight leaf itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        y = torch.matmul(x, weight.t())
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_weight = grad_rows.t().matmul(x.reshape(-1, x.shape[-1]))
        return grad_output.matmul(weight), grad_weight, grad_rows.sum(dim=0) if ctx.has_bias else None


class _Linear(nn.Module):
    def __init__(self, size_in: int, size_out: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))
        self.bias = nn.Parameter(torch.zeros(size_out)) if bias else None


class LeafLinear(_Linear):
    """Linear layer whose backward reads the parameter, wherever it points by then."""

    def forward(self, x: Tensor) -> Tensor:
        return _LeafLinearFunction.apply(x, self.weight, self.bias)


class ViewLinear(_Linear):
    """Linear layer whose backward reads the storage that the forward read."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LeafBlock(nn.Module):
    """x + LeafLinear(gelu(LeafLinear(x)))."""

    linear: type[_Linear] = LeafLinear

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = self.linear(hidden, 2 * hidden)
        self.linear_fc2 = self.linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear_fc2(F.gelu(self.linear_fc1(x)))


class ViewBlock(LeafBlock):
    """x + ViewLinear(gelu(ViewLinear(x)))."""

    linear = ViewLinear


class MixedBlock(nn.Module):
    """x + ViewLinear(gelu(LeafLinear(layernorm(x))))."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layernorm = nn.LayerNorm(hidden)
        self.linear_fc1 = LeafLinear(hidden, 2 * hidden)
        self.linear_fc2 = ViewLinear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear_fc2(F.gelu(self.linear_fc1(self.layernorm(x))))


class AttentionBlock(nn.Module):
    """Pre-norm causal self-attention, two heads, with a fused projection in Megatron's row order.

    The rows of ``linear_qkv`` are ordered by head; within a head come q, k and v of H / 2 rows each
    (``qkv_split_shapes``).
    """

    heads = 2

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layernorm = nn.LayerNorm(hidden)
        self.linear_qkv = LeafLinear(hidden, 3 * hidden, bias=False)
        self.linear_proj = LeafLinear(hidden, hidden)
        self.qkv_split_shapes = (hidden // self.heads,) * 3

    def forward(self, x: Tensor) -> Tensor:
        sequence, batch, hidden = x.shape
        per_head = hidden // self.heads
        fused = self.linear_qkv(self.layernorm(x)).view(sequence, batch, self.heads, 3 * per_head)
        q, k, v = (part.permute(1, 2, 0, 3) for part in fused.split(per_head, dim=-1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(per_head)
        future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v
        return x + self.linear_proj(mixed.permute(2, 0, 1, 3).reshape(sequence, batch, hidden))


BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "leaf": LeafBlock,
    "view": ViewBlock,
    "mixed": MixedBlock,
    "attention": AttentionBlock,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model before it is cut into stages.

    All sizes default to multiples of 16, so that in one contiguous fp32 buffer every parameter starts on a
    64-byte boundary: CPU math libraries do not promise equal bits for unequal alignment.

    Attributes:
        blocks: Names in ``BLOCKS``, first to last.
        tied: Whether the output projection is the embedding (a copy of it on the last stage).
        seed: Of the initial weights; these do not depend on the number of stages.
    """

    blocks: tuple[str, ...] = ("leaf", "view", "mixed", "leaf")
    hidden: int = 16
    vocabulary: int = 32
    sequence: int = 8
    micro_batch: int = 2
    tied: bool = False
    seed: int = 1234


class Stage(nn.Module):
    """One pipeline stage: embedding on the first, blocks, final norm and output projection on the last.

    Attributes:
        pre_process: Whether the stage takes tokens.
        post_process: Whether the stage gives logits (S, B, V).
        share_embeddings_and_output_weights: Whether the model is tied.
    """

    def __init__(self, spec: ModelSpec, blocks: range, *, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        self.pre_process = pre_process
        self.post_process = post_process
        self.share_embeddings_and_output_weights = spec.tied
        if pre_process:
            self.embedding = nn.Embedding(spec.vocabulary, spec.hidden)
        # Keyed by the index in the whole model: a parameter has the same name for any number of stages.
        self.layers = nn.ModuleDict({str(i): BLOCKS[spec.blocks[i]](spec.hidden) for i in blocks})
        if post_process:
            self.final_layernorm = nn.LayerNorm(spec.hidden)
            if not (spec.tied and pre_process):
                self.output_layer = LeafLinear(spec.hidden, spec.vocabulary, bias=False)
        self.mark_parameters()

    def mark_parameters(self) -> None:
        """Set the attributes that Megatron's optimizers look at; ``copy.deepcopy`` of a module drops them."""
        if self.pre_process:
            self.embedding.weight.is_embedding_or_output_parameter = True
            self.embedding.weight.shared_embedding = self.share_embeddings_and_output_weights
        if self.post_process and hasattr(self, "output_layer"):
            self.output_layer.weight.is_embedding_or_output_parameter = True
            self.output_layer.weight.shared_embedding = self.share_embeddings_and_output_weights
            if self.share_embeddings_and_output_weights:
                self.output_layer.weight.shared = True

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """This stage's copy of the tied weight, (V, H); None on stages without one."""
        if self.pre_process:
            return self.embedding.weight
        if self.post_process and self.share_embeddings_and_output_weights:
            return self.output_layer.weight
        return None

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_process:
            x = self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        if not self.post_process:
            return x
        x = self.final_layernorm(x)
        if hasattr(self, "output_layer"):
            return self.output_layer(x)
        return _LeafLinearFunction.apply(x, self.embedding.weight, None)


def build_stages(spec: ModelSpec, stages: int) -> list[Stage]:
    """The model cut into ``stages`` stages (contiguous blocks, the first ones take the remainder), fp32."""
    if not 1 <= stages <= len(spec.blocks):
        raise ValueError(f"stages must be 1 to {len(spec.blocks)} (the number of blocks), got {stages}")
    size, extra = divmod(len(spec.blocks), stages)
    built = []
    start = 0
    for number in range(stages):
        stop = start + size + (1 if number < extra else 0)
        first, last = number == 0, number == stages - 1
        built.append(Stage(spec, range(start, stop), pre_process=first, post_process=last))
        start = stop
    _initialize(spec, built)
    return built


def _initialize(spec: ModelSpec, stages: list[Stage]) -> None:
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for stage in stages:
            for name, param in stage.named_parameters():
                if name.endswith("layernorm.weight"):
                    # Away from 1, where a norm that used another version's weight would not show.
                    param.fill_(1.0).add_(torch.randn(param.shape, generator=generator), alpha=0.1)
                elif param.dim() == 1:
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.02)
                elif name != "output_layer.weight" or not spec.tied:
                    scale = 0.5 if name == "embedding.weight" else param.shape[1] ** -0.5
                    param.copy_(torch.randn(param.shape, generator=generator) * scale)
        if spec.tied and len(stages) > 1:
            stages[-1].output_layer.weight.copy_(stages[0].embedding.weight)


def tied_pairs(spec: ModelSpec, stages: int) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """The (stage, name) pairs that hold copies of one weight; empty if untied or on one stage."""
    if not spec.tied or stages == 1:
        return []
    return [((0, "embedding.weight"), (stages - 1, "output_layer.weight"))]


def make_microbatch(spec: ModelSpec, batch: int, index: int) -> tuple[Tensor, Tensor]:
    """Tokens and next-token targets, int64 (S, B), a function of (seed, batch, index) alone.

    Tokens follow a noisy cyclic rule, so that there is something to learn.
    """
    generator = torch.Generator().manual_seed((spec.seed * 1_000_003 + batch) * 1_009 + index)
    shape = (spec.sequence + 1, spec.micro_batch)
    steps = torch.arange(spec.sequence + 1).unsqueeze(1)
    start = torch.randint(spec.vocabulary, (1, spec.micro_batch), generator=generator)
    noise = torch.randint(3, shape, generator=generator)
    sequence = (start + 5 * steps + noise) % spec.vocabulary
    return sequence[:-1].contiguous(), sequence[1:].contiguous()


def make_batch(spec: ModelSpec, batch: int, microbatches: int) -> list[tuple[Tensor, Tensor]]:
    """Microbatches 0 to ``microbatches`` - 1 of batch ``batch``."""
    return [make_microbatch(spec, batch, index) for index in range(microbatches)]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, 0-d fp32, of logits (S, B, V) and targets (S, B)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
