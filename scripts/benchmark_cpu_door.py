#!/usr/bin/env python3
"""Measure what the CPU door costs a training step.

Three figures, all on one thread and in processor time, which other work on the machine disturbs less than the clock
on the wall, from medians of interleaved rounds:

1. milliseconds per step (forward and backward) of a small transformer in plain PyTorch, which runs with and without
   the door, and, for comparison, under a ``TorchFunctionMode`` that would do the same redirection;
2. nanoseconds that the door adds to one call of a function that it wraps;
3. for a GPT of megatron-core, which needs the door, the calls of wrapped functions in a step, and with (2) the share
   of the step that they add.

  python scripts/benchmark_cpu_door.py [--rounds 15] [--steps 4]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.overrides import TorchFunctionMode

from megatron_async.patches import cpu
from megatron_async.patches.cpu.tensors import FACTORIES

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY = 4, 128, 4, 128, 2, 512


class Redirection(TorchFunctionMode):
    """The alternative: every function of torch goes through Python, and a device "cuda" is read as "cpu"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with the CPU in the place of CUDA."""
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class Transformer(torch.nn.Module):
    """A causal transformer that makes its mask and positions anew in each forward, as Megatron does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = torch.nn.Embedding(SEQUENCE, HIDDEN)
        layer = torch.nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, dropout=0.1, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``tokens``, (batch, sequence) int64, as (batch, sequence, vocabulary)."""
        positions = torch.arange(SEQUENCE, device="cpu")
        hidden = self.tokens(tokens) + self.positions(positions)
        mask = torch.full((SEQUENCE, SEQUENCE), float("-inf"), device="cpu").triu(1)
        hidden = self.layers(hidden, mask=mask.to(hidden.dtype))
        return hidden @ self.tokens.weight.t()


def milliseconds(step: Callable[[], None], steps: int) -> float:
    """The mean time of ``steps`` steps."""
    start = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - start) / steps * 1e3


def plain_step() -> Callable[[], None]:
    """One forward and backward of the transformer in plain PyTorch."""
    model = Transformer()
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))

    def step() -> None:
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    return step


def compare(rounds: int, steps: int) -> None:
    """Print the first figure: the step without, with the door, and under the mode, interleaved."""
    step = plain_step()
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "without": nullcontext,
        "CPU door": nullcontext,
        "TorchFunctionMode": Redirection,
    }
    times: dict[str, list[float]] = {name: [] for name in contexts}
    milliseconds(step, steps)
    for _ in range(rounds):
        for name, context in contexts.items():
            cpu.uninstall()
            if name == "CPU door":
                cpu.install(quiet=True)
            with context():
                times[name].append(milliseconds(step, steps))
    cpu.uninstall()
    without = statistics.median(times["without"])
    print(f"a step in plain PyTorch, median of {rounds} rounds of {steps} steps")
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times["without"], strict=True)]
        median, spread = statistics.median(values), statistics.quantiles(ratios, n=4)
        print(
            f"  {name:<18} {median:8.2f} ms   {median / without:.3f} x   "
            f"(ratio within a round: median {spread[1]:.3f}, quartiles {spread[0]:.3f} to {spread[2]:.3f})"
        )


def nanoseconds(call: Callable[[], Any], rounds: int, calls: int = 2000) -> float:
    """The median time of one call."""
    times = []
    for _ in range(rounds):
        start = time.process_time_ns()
        for _ in range(calls):
            call()
        times.append((time.process_time_ns() - start) / calls)
    return statistics.median(times)


def added_by_a_call(rounds: int) -> float:
    """Print the second figure, and return the largest of the added times, in nanoseconds."""
    tensor = torch.zeros(4)
    calls: dict[str, Callable[[], Any]] = {
        "torch.empty(4)": lambda: torch.empty(4),
        'torch.empty(4, device="cpu")': lambda: torch.empty(4, device="cpu"),
        "Tensor.to(dtype)": lambda: tensor.to(torch.float32),
        "Tensor.type()": lambda: tensor.type(),
    }
    print("added to one call")
    added = []
    for name, call in calls.items():
        cpu.uninstall()
        before = nanoseconds(call, rounds)
        cpu.install(quiet=True)
        added.append(nanoseconds(call, rounds) - before)
        print(f"  {name:<30} {before:6.0f} ns + {added[-1]:.0f} ns")
    cpu.uninstall()
    return max(added)


def megatron_step() -> Callable[[], None]:
    """One forward and backward of a GPT of megatron-core, on one rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)

    def step() -> None:
        model(tokens, positions, None, labels=tokens).mean().backward()

    return step


def calls_in_a_step(step: Callable[[], None]) -> int:
    """The calls of wrapped functions in a step."""
    count = 0
    owners = [(torch, name) for name in FACTORIES]
    owners += [(torch.Tensor, name) for name in ("to", "cuda", "type", "pin_memory", "record_stream")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in owners]

    def counting(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return function(*args, **kwargs)

        return counted

    for owner, name, function in originals:
        setattr(owner, name, counting(function))
    try:
        step()
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
    return count


def share(rounds: int, steps: int, added_ns: float) -> None:
    """Print the third figure."""
    cpu.install(quiet=True)
    step = megatron_step()
    milliseconds(step, steps)
    median = statistics.median(milliseconds(step, steps) for _ in range(rounds))
    calls = calls_in_a_step(step)
    print(
        f"a step of megatron-core's GPT: {median:.2f} ms with {calls} calls of wrapped functions, "
        f"which add {calls * added_ns / 1e4 / median:.3f} %"
    )
    torch.distributed.destroy_process_group()


def main() -> None:
    """Run the three measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of which the median is taken (default: 15)")
    parser.add_argument("--steps", type=int, default=4, help="steps in a round (default: 4)")
    arguments = parser.parse_args()
    if not cpu.is_needed():
        parser.error("this machine has a CUDA device, where the CPU door is never opened; hide it to measure")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    print(f"{LAYERS} layers, width {HIDDEN}, {BATCH} x {SEQUENCE} tokens, 1 thread, torch {torch.__version__}")
    compare(arguments.rounds, arguments.steps)
    share(arguments.rounds, arguments.steps, added_by_a_call(arguments.rounds))


if __name__ == "__main__":
    main()
