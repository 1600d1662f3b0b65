"""Rank of the steady-state test: trains small models in Megatron's loop and records every operation between ranks.

Started by test_steady_state.py as ``steady_state_worker FOLDER``; names of runs after it restrict it to those.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from megatron_async.patches import cpu
from tests.distributed.loop_worker import clean_up
from tests.distributed.steady_state import ROOT, DispatcherCount, Recorder, dispatched
from tests.distributed.steady_state_cases import ALL, Case

current: Recorder | None = None
"""The recorder of the run that is going on."""


def count_microbatches() -> None:
    """Let forwards and backwards tell the recorder. Call it before the executor is imported, which takes the names."""
    from megatron.core.pipeline_parallel import schedules

    def counting(original: Callable[..., Any], backward: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if current is not None:
                current.computed(backward=backward)
            return result

        return step

    schedules.forward_step = counting(schedules.forward_step, False)
    schedules.backward_step = counting(schedules.backward_step, True)


@contextlib.contextmanager
def recorded(recorder: Recorder, dispatcher: DispatcherCount | None) -> Iterator[None]:
    """Record what Megatron's ``train`` does, training step by training step."""
    from megatron.training import training

    train, train_step = training.train, training.train_step

    @functools.wraps(train)
    def recorded_train(*args: Any, **kwargs: Any) -> Any:
        global current
        current = recorder
        try:
            with recorder, dispatcher or contextlib.nullcontext():
                return train(*args, **kwargs)
        finally:
            current = None

    @functools.wraps(train_step)
    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        recorder.next_step()
        return train_step(*args, **kwargs)

    with mock.patch.multiple(training, train=recorded_train, train_step=recorded_step):
        yield


def fault(name: str) -> contextlib.AbstractContextManager[Any]:
    """A deliberate fault."""
    from megatron_async.patches import training_loop

    if name == "stock reductions":
        # The two reductions that train_step makes across stages are left as they are.
        return mock.patch.object(training_loop, "keep_local", lambda original, session: original)
    assert not name
    return contextlib.nullcontext()


def execute(case: Case) -> dict[str, Any]:
    """One run of scripts/pretrain_gpt.py."""
    from megatron.core import parallel_state

    recorder, dispatcher = Recorder(), DispatcherCount() if case.counted else None
    script = ROOT / "scripts" / "pretrain_gpt.py"
    status: Any = 0
    arguments = mock.patch.object(sys, "argv", [str(script), *case.arguments])
    with fault(case.control), recorded(recorder, dispatcher), arguments:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            status = ended.code or 0
        finally:
            stage = parallel_state.get_pipeline_model_parallel_rank() if parallel_state.is_initialized() else 0
            clean_up()
    found = {"status": status, "stage": stage, "operations": [asdict(o) for o in recorder.operations]}
    if dispatcher is not None:
        found |= {"dispatched": dispatched(recorder.operations), "counted": dispatcher.count}
    return found


def operations_of_torch(group: dist.ProcessGroup) -> list[Callable[[], Any]]:
    """Each of torch.distributed's ways to talk to the ranks of the default group."""
    rank, size = group.rank(), group.size()
    one, many = torch.ones(size), [torch.empty(size) for _ in range(size)]
    neighbour = rank ^ 1
    objects: list[Any] = [None] * size
    return [
        lambda: dist.all_reduce(one),
        lambda: dist.all_reduce_coalesced([one]),
        lambda: dist.all_gather(many, one),
        lambda: dist.all_gather_single(torch.empty(size * size), one),
        lambda: dist.all_gather_coalesced([[tensor] for tensor in many], [one]),
        lambda: dist.reduce(one, 0),
        lambda: dist.broadcast(one, 0),
        lambda: dist.gather(one, many if rank == 0 else None),
        lambda: dist.scatter(one, many if rank == 0 else None),
        lambda: dist.reduce_scatter_single(torch.empty(1), one),
        lambda: dist.reduce_scatter(torch.empty(size), many),
        lambda: dist.all_to_all_single(torch.empty(size), one),
        dist.barrier,
        dist.monitored_barrier,
        lambda: dist.all_gather_object(objects, rank),
        lambda: dist.gather_object(rank, objects if rank == 0 else None),
        lambda: dist.broadcast_object_list([rank]),
        lambda: dist.scatter_object_list([None], objects if rank == 0 else None),
        lambda: dist.send(one, neighbour) if rank % 2 else dist.recv(one, neighbour),
        lambda: dist.send(one, neighbour) if rank % 2 == 0 else dist.recv(one),
        lambda: dist.send_object_list([rank], neighbour) if rank % 2 else dist.recv_object_list([None], neighbour),
        lambda: _exchange(one, neighbour),
        lambda: _coalesced(one, group),
        lambda: group._get_backend(torch.device("cpu")).allreduce([one], dist.AllreduceOptions()).wait(),
        lambda: group.get_group_store().get("a key"),
    ]


def every_operation() -> dict[str, Any]:
    """What is seen of each of torch.distributed's operations, and of one that passes the recorder by."""
    group = dist.group.WORLD
    assert group is not None
    group.get_group_store().set("a key", "a value")
    recorder, dispatcher = Recorder(), DispatcherCount()
    unseen = []
    with recorder, dispatcher:
        for position, function in enumerate(operations_of_torch(group)):
            before = len(recorder.operations)
            function()
            if len(recorder.operations) == before:
                unseen.append(position)
    not_waited = [o.name for o in recorder.operations if o.waited is None]
    with recorder, dispatcher:
        before_bypass = Counter(dispatcher.count)
        _functional_collectives.all_reduce(torch.ones(1), "sum", group).wait()
    return {
        "unseen": unseen,
        "not waited": not_waited,
        "dispatched": dispatched(recorder.operations),
        "counted": before_bypass,
        "counted with the bypass": dispatcher.count,
    }


def _exchange(tensor: torch.Tensor, neighbour: int) -> None:
    operations = [
        dist.P2POp(dist.isend, tensor, neighbour),
        dist.P2POp(dist.irecv, torch.empty_like(tensor), neighbour),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _coalesced(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(tensor, group=group, async_op=True)
    manager.wait()


def main(folder: Path) -> None:
    if cpu.is_needed():
        cpu.install(quiet=True)
    torch.set_num_threads(1)
    count_microbatches()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}
    runs: dict[str, Callable[[], dict[str, Any]]] = {"every operation": every_operation}
    runs |= {name: functools.partial(execute, case) for name, case in ALL.items()}
    only = sys.argv[2:]
    for name, run in runs.items():
        if only and name not in only:
            continue
        # Anew each time: Megatron leaves its old gloo groups behind, whose idle threads take the processor's time.
        store = folder / f"{len(found)}.store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        outcome = run()
        everyones: list[Any] = [None] * ranks
        dist.all_gather_object(everyones, outcome)
        found[name] = everyones
        dist.destroy_process_group()
        gc.collect()
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
