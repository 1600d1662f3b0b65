"""Two ranks: training, saving, resuming and evaluating with what Megatron can do, and the collectives gloo lacks."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXPERTS = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"),
    *("--moe-aux-loss-coeff", "1e-2"),
)
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")

# Runs that are stopped after 3 of 6 updates and continued.
RESUMED: dict[str, tuple[str, ...]] = {
    "pipeline": ("--pipeline-model-parallel-size", "2", "--optimizer", "muon", "--async-save"),
    "distributed optimizer": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    "distributed optimizer, bf16": ("--use-distributed-optimizer", "--bf16", "--dist-ckpt-optim-fully-reshardable"),
    "experts": (*EXPERTS, "--moe-token-dispatcher-type", "alltoall", "--optimizer", "muon"),
    "layer-wise optimizer": (
        *("--use-distributed-optimizer", "--optimizer", "muon", "--bf16", "--no-use-layer-wise-param-layout"),
    ),
}


def resumed(folder: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    """One run of 6 updates, and one that continues its checkpoint of update 3."""
    from tests.distributed.cpu_door import training

    straight, second = folder / "straight", folder / "second"
    whole = training.run(*flags, "--save", str(straight))
    if dist.get_rank() == 0:
        second.mkdir()
        shutil.copytree(straight / "iter_0000003", second / "iter_0000003")
        (second / "latest_checkpointed_iteration.txt").write_text("3")
    dist.barrier()
    return {"whole": whole, "continued": training.run(*flags, "--load", str(second))}


def collectives() -> dict[str, Any]:
    """What gathers of equal, unequal and empty parts arrive as on this rank; a barrier that names a device passes."""
    rank = dist.get_rank()
    mine = torch.arange(3.0 + 2 * rank) + 10 * rank
    slots = [torch.empty(3), torch.empty(5)]
    dist.all_gather(slots, mine)
    later = [torch.empty(3), torch.empty(5)]
    work = dist.all_gather(later, mine, async_op=True)
    work.wait()
    empty = [torch.empty(0), torch.empty(2)]
    dist.all_gather(empty, torch.full((2 * rank,), 7.0))
    even = [torch.empty(2), torch.empty(2)]
    dist.all_gather(even, torch.full((2,), float(rank)))
    dist.barrier(device_ids=[torch.cuda.current_device()])
    return {
        "uneven": [slot.tolist() for slot in slots],
        "asynchronous": [slot.tolist() for slot in later],
        "empty": [slot.tolist() for slot in empty],
        "even": [slot.tolist() for slot in even],
    }


def compiled() -> list[str]:
    """The functions of Megatron's that torch.compile has wrapped."""
    return [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.")
        for attribute, value in list(vars(module).items())
        if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable")
    ]


def main(folder: str) -> None:
    from tests.distributed.cpu_door import training

    results: dict[str, Any] = {"compiled": compiled()}
    for number, (name, flags) in enumerate(RESUMED.items()):
        case = Path(folder, str(number))
        results[name] = resumed(case, flags)
    results["collectives"] = collectives()
    results["recomputed"] = training.run("--pipeline-model-parallel-size", "2", "--optimizer", "muon", *RECOMPUTE)
    results["experts, all-gather"] = training.run(
        *EXPERTS, "--moe-token-dispatcher-type", "allgather", "--optimizer", "muon"
    )
    tensor_parallel = ("--tensor-model-parallel-size", "2", *NO_DROPOUT)
    saved = Path(folder, "tensor_parallel")
    training.run(*tensor_parallel, "--save", str(saved), "--train-iters", "3")
    continued = ("--load", str(saved), "--override-opt-param-scheduler")
    results["tensor parallel"] = training.run(*tensor_parallel, *continued)
    results["sequence parallel"] = training.run(*tensor_parallel, *continued, "--sequence-parallel")
    training.write(results, folder)


if __name__ == "__main__":
    import megatron_async.patches.cpu as cpu_door

    cpu_door.install()
    main(sys.argv[1])
    dist.destroy_process_group()
