"""Rank of the trace test: trains small pipelines with traces. Started by test_trace.py."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.observe.trace import Trace
from megatron_async.patches import cpu
from tests.distributed.exactness_cases import Case
from tests.distributed.trace_cases import BATCHES, FIRST_STEP, MICROBATCHES, STAGES, STEPS, SYNCHRONOUS, WARMUP_FACTORS


def make_trace(folder: Path, first_step: int = FIRST_STEP) -> Trace:
    """A trace of this rank, on the common time line."""
    rank = dist.get_rank()
    trace = Trace(folder, rank=rank, stage=rank, first_step=first_step, steps=STEPS, device=torch.device("cpu"))
    trace.align(dist.group.WORLD)
    return trace


def case_of(warmup_factor: int = 1) -> Case:
    """A pipeline of two stages."""
    return Case(
        stages=STAGES, microbatches=MICROBATCHES, optimizer="adam", warmup_factor=warmup_factor, updates=BATCHES
    )


def train(case: Case, forward_backward: Callable[..., Any], step: Callable[[], Any], **kwargs: Any) -> None:
    """Train all batches of a case."""
    from tests.distributed.exactness import forward_step_of

    data = (case.microbatch(k, i) for k in range(case.updates) for i in range(case.microbatches))
    for k in range(case.updates):
        following = {"next_num_microbatches": case.microbatches if k + 1 < case.updates else None}
        forward_backward(
            forward_step_func=forward_step_of(case),
            data_iterator=data,
            num_microbatches=case.microbatches,
            seq_length=case.spec.sequence,
            micro_batch_size=case.spec.micro_batch,
            **(kwargs or following),
        )
        step()


def run_asynchronous(folder: Path, case: Case) -> None:
    """2bw-async."""
    from tests.distributed import exactness_parts

    trace = make_trace(folder)
    pipeline = exactness_parts.build_parts(case).pipeline(case, trace=trace)
    train(case, pipeline.forward_backward, pipeline.step)
    pipeline.complete()
    trace.close()
    pipeline.close()


def run_synchronous(folder: Path, case: Case) -> None:
    """Megatron's 1F1B, with an evaluation in the middle of the traced steps, which must not be seen."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_async.patches.replacement import apply_all
    from megatron_async.patches.tracing import ScheduleTracer, tracing
    from tests.distributed import exactness_parts

    tracer = ScheduleTracer()
    undo = apply_all(tracing(tracer))
    parts = exactness_parts.build_parts(case)
    from megatron.training import training

    parts.model.config.finalize_model_grads_func = training.finalize_model_grads
    tracer.trace = make_trace(folder)
    schedule = functools.partial(
        schedules.forward_backward_pipelining_without_interleaving,
        model=[parts.model],
        forward_step_func=exactness_parts.forward_step_of(case),
        seq_length=case.spec.sequence,
        micro_batch_size=case.spec.micro_batch,
    )

    def step() -> None:
        assert parts.optimizer.step()[0]
        if tracer.batch == FIRST_STEP:
            data = (case.microbatch(0, i) for i in range(2))
            with torch.no_grad():
                schedule(data_iterator=data, num_microbatches=2, forward_only=True)

    def forward_backward(**kwargs: Any) -> None:
        parts.model.zero_grad_buffer()
        schedule(**kwargs)

    train(case, forward_backward, step, forward_only=False)
    tracer.trace.close()
    while undo:
        undo.pop()()


def main(folder: Path) -> None:
    if cpu.is_needed():
        cpu.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=2)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    for factor in WARMUP_FACTORS:
        run_asynchronous(folder / f"factor{factor}", case_of(factor))
    run_synchronous(folder / SYNCHRONOUS, case_of())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
