"""Two ranks: a run of six updates with each optimizer, and one that continues its sharded checkpoint of update three.

Started by test_optimizer_checkpoints.py.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_async
from tests.distributed.cpu_door.worker import NO_DROPOUT

PIPELINE = ("--pipeline-model-parallel-size", "2")
SWIGLU = ("--swiglu", "--no-bias-swiglu-fusion", "--disable-bias-linear", "--ffn-hidden-size", "48")
MUON = ("--muon-momentum", "0.95", "--muon-nesterov")

CASES: dict[str, tuple[str, ...]] = {
    "soap": ("--optimizer", "soap", *PIPELINE, *SWIGLU, *NO_DROPOUT),
    "soap, tensor parallel": ("--optimizer", "soap", "--tensor-model-parallel-size", "2", *SWIGLU, "--bf16"),
    "normuon": ("--optimizer", "normuon", *PIPELINE, *MUON),
    "adamuon": ("--optimizer", "adamuon", *PIPELINE, *MUON, "--bf16"),
    "lion": ("--optimizer", "lion", "--lion-everywhere", *PIPELINE, "--lr", "1e-3"),
    "adan": ("--optimizer", "adan", *PIPELINE, "--bf16"),
    "mars": ("--optimizer", "mars", *PIPELINE),
    "nadam": ("--optimizer", "nadam", *PIPELINE, "--bf16"),
}


def without_factors() -> Any:
    """Save and load SOAP's and NorMuon's state, but its own shapes as zeros: what the test must see."""
    from megatron.core.dist_checkpointing import optimizer

    original = optimizer.make_sharded_optimizer_tensor

    @functools.wraps(original)
    def forgetful(model_param: Any, optim_param: Any, prefix: str) -> Any:
        made = original(model_param, optim_param, prefix)
        if type(made).__name__ == "ShardedObject":
            made.data = made.data * 0
        return made

    optimizer.make_sharded_optimizer_tensor = forgetful
    return original


def main(folder: Path) -> None:
    from megatron.core.dist_checkpointing import optimizer

    from tests.distributed.cpu_door import training
    from tests.distributed.cpu_door.worker import resumed

    results: dict[str, Any] = {}
    for number, (name, flags) in enumerate(CASES.items()):
        results[name] = resumed(folder / str(number), flags)
    whole = without_factors()
    results["normuon, forgetful"] = resumed(folder / "forgetful", CASES["normuon"])
    optimizer.make_sharded_optimizer_tensor = whole
    # Another pipeline size: the state of a layer follows the layer.
    results["soap, on one stage"] = training.run(
        "--optimizer", "soap", *SWIGLU, *NO_DROPOUT, "--load", str(folder / "0" / "second")
    )
    training.write(results, str(folder))


if __name__ == "__main__":
    # SOAP and Lion compile small functions, which takes longer than all of this.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    megatron_async.install()
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
