#!/usr/bin/env python3
"""What error feedback costs in an optimizer step, and the bytes that each optimizer keeps.

Builds a GPT with megatron-core's parts (DDP, its optimizer factory) behind an asynchronous pipeline of one stage, and
times updates of the package's own deferred step with random gradients: begin, take, norm, clip, step, write the
weights. One process, one model: the coefficient is switched between 1 and 0 from one update to the next, so that both
share all memory. What is reported is the median of the ratios of neighbours, with quartiles, from processor time: a
shared machine takes turns away, and processor time does not count them. Forward and backward are the same with error
feedback and without. So the ratio of training steps is computed: 1 + (ratio of updates - 1) * share, with the measured
share of the update in the processor time of a training step on a small batch (--tokens).

Error feedback reads and writes the masters two times more. An optimizer that does little else (SGD, Adam) is limited by
memory and shows that; the more tokens a batch has, the smaller is its share in a training step.

Bytes a parameter are those of all tensors alive between two updates, minus those alive before the model was made. They
hold model, gradients and what the pipeline keeps: docs/schedule.md has the table.

Exit codes: 0 measured, 1 error feedback keeps memory or a training step is above --limit, 2 bad command line.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the package, if it is not installed

import torch
import torch.distributed as dist

OPTIMIZERS = ("adam", "sgd", "lion", "adan", "mars", "nadam", "muon", "normuon", "adamuon", "soap")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLIP = 1.0
VOCABULARY, SEQUENCE = 512, 128
SLACK = 64
"""Bytes that two counts of the same tensors may differ by: scalars of the optimizers."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time with error feedback over time without, of neighbours.

    Attributes:
        milliseconds: Median processor time without.
        median: Of the ratios of processor times.
        quartiles: Of the same.
        wall_clock: Median of the ratios of wall-clock times.
        pairs: Number of ratios.
    """

    milliseconds: float
    median: float
    quartiles: tuple[float, float]
    wall_clock: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of one optimizer.

    Attributes:
        optimizer: As ``--optimizer``.
        dtype: Of the model; masters are fp32.
        parameters: Number of them.
        bytes_plain: Persistent bytes a parameter without error feedback.
        bytes_feedback: The same with it.
        update: Updates alone.
        share: Of the update in the processor time of a training step without error feedback.
        tokens: Of a batch of these training steps.
    """

    optimizer: str
    dtype: str
    parameters: int
    bytes_plain: float
    bytes_feedback: float
    update: Ratio
    share: float
    tokens: int

    @property
    def step(self) -> float:
        """Training step with error feedback over one without: only the update differs."""
        return 1.0 + (self.update.median - 1.0) * self.share

    @property
    def added(self) -> float:
        """Persistent bytes that error feedback adds, for all parameters."""
        return (self.bytes_feedback - self.bytes_plain) * self.parameters


def initialize() -> None:
    """Megatron's process groups in a world of one, without a port, and the project's optimizers in its registry."""
    from megatron_async.patches import cpu

    if cpu.is_needed():
        cpu.install(quiet=True)
    from megatron.core import parallel_state

    from megatron_async.optimizer.flags import OptimizerFlags
    from megatron_async.optimizer.registry import register

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    register(OptimizerFlags(lion_everywhere=True))


def build(optimizer: str, dtype: torch.dtype, layers: int, hidden: int) -> Any:
    """A GPT on one stage with its optimizer, behind the asynchronous pipeline.

    Args:
        optimizer: As ``--optimizer``.
        dtype: Of the model.
        layers: Transformer layers.
        hidden: Hidden size, a multiple of 64; layers * 12 * hidden^2 parameters and a little more.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_async.pipeline.runtime import AsyncPipeline, PipelineOptions

    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE).to(dtype)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunk = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model, pg_collection=groups
    )
    settings = OptimizerConfig(
        optimizer=optimizer,
        lr=1e-5,
        weight_decay=0.1,
        clip_grad=CLIP,
        sgd_momentum=0.9,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )
    return AsyncPipeline(
        model=chunk,
        optimizer=get_megatron_optimizer(settings, [chunk]),
        pg_collection=groups,
        options=PipelineOptions(ef_coefficient=1.0),
    )


def live_bytes() -> int:
    """Bytes of all tensors that are alive in this process, each storage once."""
    while gc.collect():  # what a cycle held may itself be in a cycle
        pass
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Subject:
    """One pipeline, to run with and without error feedback.

    Attributes:
        parameters: Number of trainable parameters.
    """

    def __init__(self, pipeline: Any, tokens: int) -> None:
        self._pipeline = pipeline
        self._buffers = [buffer.grad_data for buffer in pipeline.model.buffers]
        self.parameters = sum(parameter.numel() for parameter in pipeline.versions.parameters)
        self._generator = torch.Generator().manual_seed(0)
        self._samples = tokens // SEQUENCE
        self._tokens = torch.randint(VOCABULARY, (self._samples, SEQUENCE), generator=self._generator)

    def step(self) -> float:
        """A training step on one microbatch; returns the share of its update in the processor time."""
        start = time.process_time()
        self._pipeline.forward_backward(
            forward_step_func=_forward,
            data_iterator=iter((self._tokens,)),
            num_microbatches=1,
            next_num_microbatches=None,
            seq_length=SEQUENCE,
            micro_batch_size=self._samples,
        )
        middle = time.process_time()
        self._pipeline.step()
        self._complete()
        end = time.process_time()
        return (end - middle) / (end - start)

    def update(self) -> tuple[float, float]:
        """An update with random gradients; returns its processor time and its wall-clock time, in seconds."""
        for buffer in self._buffers:
            buffer.normal_(generator=self._generator)
        wall, processor = time.perf_counter(), time.process_time()
        self._pipeline.updates.begin()
        self._complete()
        return time.process_time() - processor, time.perf_counter() - wall

    def set_coefficient(self, coefficient: float) -> None:
        """Switch error feedback on or off."""
        self._pipeline.updates.ef_coefficient = coefficient

    def _complete(self) -> None:
        result = self._pipeline.updates.complete()
        if result is None or result.skipped:
            raise RuntimeError("an update was skipped: nothing was measured")


def _forward(data: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Megatron's user function for a GPT that learns to repeat its input."""
    tokens = next(data)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.float().mean()
        return value, {"lm loss": value.detach()}

    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None, labels=tokens), loss


def measure_ratio(subject: Subject, seconds: float) -> Ratio:
    """Pairs of updates with and without error feedback for so many seconds, and at least three."""
    plain: list[float] = []
    ratios: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(ratios) < 3 or time.perf_counter() - start < seconds:
        # In turn first and second, so that a drift of the machine falls on both.
        order = (0.0, 1.0) if len(ratios) % 2 == 0 else (1.0, 0.0)
        times = {}
        for coefficient in order:
            subject.set_coefficient(coefficient)
            times[coefficient] = subject.update()
        plain.append(times[0.0][0])
        ratios.append((times[1.0][0] / times[0.0][0], times[1.0][1] / times[0.0][1]))
    low, median, high = statistics.quantiles((ratio for ratio, _ in ratios), n=4, method="inclusive")
    wall_clock = statistics.median(ratio for _, ratio in ratios)
    return Ratio(1e3 * statistics.median(plain), median, (low, high), wall_clock, len(ratios))


def measure(optimizer: str, dtype: str, *, layers: int, hidden: int, tokens: int, seconds: float) -> Result:
    """Measure one optimizer.

    Args:
        optimizer: As ``--optimizer``.
        dtype: Key of :data:`DTYPES`.
        layers: See :func:`build`.
        hidden: See :func:`build`.
        tokens: Of a batch, a multiple of :data:`SEQUENCE`.
        seconds: Time for pairs of updates.
    """
    before = live_bytes()
    pipeline = build(optimizer, DTYPES[dtype], layers, hidden)
    subject = Subject(pipeline, tokens)
    kept = []
    for coefficient in (0.0, 1.0):  # in this order: what error feedback keeps would be counted in both otherwise
        subject.set_coefficient(coefficient)
        for _ in range(2):  # the first update also allocates the optimizer's state
            subject.step()
        kept.append((live_bytes() - before) / subject.parameters)
    subject.set_coefficient(0.0)
    share = statistics.median(subject.step() for _ in range(3))
    update = measure_ratio(subject, seconds)
    pipeline.close()
    return Result(optimizer, dtype, subject.parameters, kept[0], kept[1], update, share, tokens)


def table(results: Sequence[Result]) -> str:
    """The results in Markdown; ratios with their quartiles."""
    rows = [["optimizer", "model", "update, ms", "update, EF ÷ without", "update ÷ step"]]
    rows[0] += ["step, EF ÷ without", "bytes a parameter", "EF adds, bytes"]
    for result in results:
        rows.append(
            [
                result.optimizer,
                result.dtype,
                f"{result.update.milliseconds:.0f}",
                "{:.3f} ({:.3f}–{:.3f})".format(result.update.median, *result.update.quartiles),
                f"{result.share:.2f}",
                f"{result.step:.3f}",
                f"{result.bytes_plain:.1f}",
                f"{result.added:.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i > 1 else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def failures(results: Sequence[Result], limit: float) -> list[str]:
    """Results that break what is promised: no persistent byte, at most ``limit`` times the time of a training step."""
    found = []
    for result in results:
        name = f"{result.optimizer}, {result.dtype}"
        if result.added > SLACK:
            found.append(f"{name}: error feedback keeps {result.added:.0f} bytes between updates")
        if result.step > limit:
            found.append(f"{name}: a step with error feedback takes {result.step:.3f} times as long, above {limit}")
    return found


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), metavar="NAME",
        help=f"of {', '.join(OPTIMIZERS)} (default: all)")  # fmt: skip
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="DTYPE",
        help="of the model: fp32, bf16 (default: both)")  # fmt: skip
    add("--layers", type=int, default=13, metavar="N", help="transformer layers (default: %(default)s)")
    add("--hidden", type=int, default=256, metavar="N",
        help="hidden size (default: %(default)s; with 13 layers: 10.4M parameters)")  # fmt: skip
    add("--tokens", type=int, default=512, metavar="N",
        help=f"of a training step, a multiple of {SEQUENCE} (default: %(default)s)")  # fmt: skip
    add("--seconds", type=float, default=5.0, metavar="S",
        help="for the pairs of an optimizer, three at least (default: %(default)s)")  # fmt: skip
    add("--limit", type=float, default=1.1, metavar="R", help="largest ratio of training steps (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the results")
    args = parser.parse_args(arguments)
    if args.layers < 1:
        parser.error(f"--layers {args.layers}: at least 1")
    if args.hidden < 64 or args.hidden % 64:
        parser.error(f"--hidden {args.hidden}: must be a multiple of 64")
    if args.tokens < SEQUENCE or args.tokens % SEQUENCE:
        parser.error(f"--tokens {args.tokens}: must be a multiple of {SEQUENCE}")
    if args.seconds < 0:
        parser.error(f"--seconds {args.seconds:g}: must not be negative")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    args = parse_args(arguments)
    torch.set_num_threads(1)
    initialize()
    results = []
    for dtype in args.dtypes:
        for optimizer in args.optimizers:
            print(f"{optimizer}, {dtype} ...", file=sys.stderr, flush=True)
            results.append(
                measure(
                    optimizer, dtype, layers=args.layers, hidden=args.hidden, tokens=args.tokens, seconds=args.seconds
                )
            )
            gc.collect()
    print(f"{results[0].parameters:,} parameters; {args.tokens} tokens a step; one thread; processor time\n")
    print(table(results))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    found = failures(results, args.limit)
    for text in found:
        print(f"benchmark_optimizer_step.py: {text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
