"""Rank of the exactness test: runs every case and writes what was found. Started by test_exactness.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_async.patches import cpu
from tests.distributed.exactness_cases import Case, equal_cases, unequal_cases

RANKS = 4


def join(store: Path, rank: int) -> None:
    """Initialize torch.distributed through a file of its own."""
    dist.init_process_group("gloo", init_method=f"file://{store}.store", rank=rank, world_size=RANKS)


def rounds(cases: list[Case], replicas: int) -> Iterator[list[Case]]:
    """What the replicas of a pipeline run at the same time: each a case of its own, or all the same one."""
    # Megatron aligns the parameter groups of all ranks, and a pipeline makes process groups when it starts.
    alike = dict.fromkeys((c.optimizer, c.sync_start, c.sync_cooldown, c.updates) for c in cases)
    for key in alike:
        alone = [
            c for c in cases if (c.optimizer, c.sync_start, c.sync_cooldown, c.updates) == key and not c.data_parallel
        ]
        for start in range(0, len(alone), replicas):
            chunk = alone[start : start + replicas]
            yield chunk + [chunk[-1]] * (replicas - len(chunk))
    for case in cases:
        if case.data_parallel:
            yield [case] * replicas


def main(folder: Path) -> None:
    if cpu.is_needed():
        cpu.install()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    join(folder / "oracle", rank)
    from megatron.core import parallel_state

    from megatron_async.optimizer.flags import OptimizerFlags
    from megatron_async.optimizer.registry import register
    from tests.distributed.exactness import Finding, StageRecords, oracle_records, run_case

    register(OptimizerFlags())
    cases = [Case(**settings) for settings in [*equal_cases(), *unequal_cases()]]
    # The ranks share the oracle's work, then read each other's records.
    keys = list(dict.fromkeys(case.oracle_key() for case in cases))
    for key in keys[rank::RANKS]:
        records = oracle_records(key)
        for stage in range(key.stages):
            torch.save(StageRecords.of(records, stage), folder / f"{keys.index(key)}-{stage}.pt")
    dist.barrier()
    results: dict[str, dict[str, Any]] = {}
    for stages in (1, 2, 4):
        # Anew each time: Megatron leaves its old gloo groups behind, whose idle threads take the processor's time.
        dist.destroy_process_group()
        join(folder / f"stages{stages}", rank)
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
        replicas = RANKS // stages
        replica = parallel_state.get_data_parallel_rank()
        for together in rounds([c for c in cases if c.stages == stages], replicas):
            case = together[replica]
            stage = parallel_state.get_pipeline_model_parallel_rank()
            name = f"{keys.index(case.oracle_key())}-{stage}.pt"
            finding = run_case(case, torch.load(folder / name, weights_only=False))
            findings: list[Finding | None] = [None] * RANKS
            dist.all_gather_object(findings, finding)
            for found in filter(None, findings):
                entry = results.setdefault(
                    found.case.name,
                    {"compared": found.compared, "expected": found.case.updates}
                    | {"differences": [], "bytes": [], "table": []},
                )
                entry["compared"] = min(entry["compared"], found.compared)
                entry["differences"] += found.differences[:3]
                entry["bytes"].append(found.persistent)
                entry["table"].append(found.table)
        parallel_state.destroy_model_parallel()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
