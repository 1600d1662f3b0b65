"""One rank of the benchmark: measures every system at every point, in turn, and lets rank 0 write the times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async.patches import cpu


def main(plan_file: Path, result_file: Path) -> None:
    """Measure the points of a plan.

    Args:
        plan_file: JSON of a :class:`~schedule_benchmark.points.Launch`.
        result_file: Where rank 0 writes what was measured.
    """
    torch.set_num_threads(1)
    cpu.install(quiet=True)
    dist.init_process_group("gloo")
    from schedule_benchmark.measure import measure
    from schedule_benchmark.points import Launch

    results = measure(Launch.from_dict(json.loads(plan_file.read_text())))
    if dist.get_rank() == 0:
        result_file.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
