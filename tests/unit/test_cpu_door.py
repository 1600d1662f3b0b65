"""The CPU door in one process: what it replaces, and that it puts everything back."""

from __future__ import annotations

import importlib
import logging
import pickle
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_async.patches import cpu
from megatron_async.patches.cpu import collectives, device, quiet, tensors

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU door stays shut where there is CUDA")


@pytest.fixture
def door() -> Iterator[None]:
    cpu.uninstall()
    cpu.install(quiet=True)
    yield
    cpu.uninstall()


def rows() -> list[Any]:
    from megatron_async.patches.cpu import saving, upstream

    tables = (device, tensors, collectives, upstream, saving)
    return [row for table in tables for row in table.REPLACEMENTS]


def standing(row: Any) -> Any:
    value: Any = importlib.import_module(row.module)
    for part in row.attribute.split("."):
        value = getattr(value, part, None)
    return value


def test_a_machine_with_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.uninstall()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = [torch.zeros, torch.Tensor.cuda, torch.cuda.Stream, torch.distributed.all_gather]
    assert not cpu.is_needed()
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        cpu.install()
    assert before == [torch.zeros, torch.Tensor.cuda, torch.cuda.Stream, torch.distributed.all_gather]


@without_cuda
class TestInstall:
    def test_says_one_line_once(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        cpu.uninstall()
        for rank, lines in (("0", 1), ("1", 0)):
            monkeypatch.setenv("RANK", rank)
            cpu.install()
            cpu.install()
            said = capsys.readouterr().out
            assert said.count("\n") == lines, said
            assert ("no CUDA device" in said) == bool(lines)
            cpu.uninstall()

    def test_uninstall_puts_everything_back(self) -> None:
        cpu.uninstall()
        before = [standing(row) for row in rows()]
        filters = list(warnings.filters)
        cpu.install(quiet=True)
        during = [standing(row) for row in rows()]
        cpu.uninstall()
        for row, original, replaced, restored in zip(
            rows(), before, during, [standing(row) for row in rows()], strict=True
        ):
            assert replaced is not original, row.attribute
            assert restored is original or restored == original, row.attribute
        assert warnings.filters == filters

    def test_a_failure_leaves_nothing_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu.uninstall()
        before = torch.zeros
        broken = (*collectives.REPLACEMENTS, SimpleNamespace(module="torch.nowhere", attribute="f", parameters=None))
        monkeypatch.setattr(collectives, "REPLACEMENTS", broken)
        with pytest.raises(ImportError):
            cpu.install()
        assert torch.zeros is before

    def test_cuda_is_not_pretended(self, door: None) -> None:
        assert not torch.cuda.is_available()
        assert cpu.is_needed()
        assert torch.cuda.device_count() >= 1


@without_cuda
@pytest.mark.usefixtures("door")
class TestTensors:
    @pytest.mark.parametrize("where", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 1), 0])
    def test_what_is_made_on_cuda_is_on_the_cpu(self, where: Any) -> None:
        like = torch.zeros(2)
        made = [
            torch.tensor([1.0], device=where),
            torch.empty(2, device=where, dtype=torch.bfloat16),
            torch.full((2,), 3, device=where),
            torch.arange(3, device=where),
            torch.randn(2, device=where),
            torch.empty_like(like, device=where),
            like.to(where),
            like.to(device=where, dtype=torch.int32),
            torch.nn.Linear(2, 2).to("cuda").weight,
            torch.nn.Linear(2, 2).cuda(torch.cuda.current_device()).weight,
        ]
        assert {tensor.device for tensor in made} == {torch.device("cpu")}
        assert made[1].dtype == torch.bfloat16

    def test_other_devices_are_untouched(self) -> None:
        assert torch.zeros(1, device="meta").is_meta
        assert torch.zeros(1).to("meta").is_meta
        with torch.device("meta"):
            assert torch.zeros(1).is_meta
            assert torch.empty_like(torch.zeros(1)).is_meta
        assert torch.zeros(1).to(torch.int8).dtype == torch.int8
        assert torch.zeros(1).to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64

    def test_moving_to_cuda_copies_nothing(self) -> None:
        weight = torch.nn.Parameter(torch.zeros(2))
        assert weight.cuda() is weight
        assert weight.to("cuda") is weight
        assert torch.empty(2, pin_memory=True).pin_memory().shape == (2,)

    def test_type_names_equal_those_of_cuda(self) -> None:
        half, whole = torch.zeros(1, dtype=torch.bfloat16), torch.nn.Parameter(torch.zeros(1))
        assert half.type() in ["torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"]
        assert whole.type() == "torch.cuda.FloatTensor" == whole.type()
        assert whole.type() == "torch.FloatTensor"
        assert whole.type() != "torch.cuda.HalfTensor"
        assert str(whole.type()) == f"{whole.type()}" == "torch.FloatTensor"
        assert {"torch.FloatTensor": 1}[whole.type()] == 1
        assert whole.type(torch.float64).dtype == torch.float64


@without_cuda
@pytest.mark.usefixtures("door")
class TestDevice:
    def test_events_measure_milliseconds(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
            start.record()
            torch.randn(200, 200) @ torch.randn(200, 200)
            end.record(torch.cuda.current_stream())
        torch.cuda.synchronize()
        assert end.query()
        assert 0 < start.elapsed_time(end) < 10_000

    def test_memory_is_that_of_the_process(self) -> None:
        assert 10**7 < torch.cuda.memory_allocated() < 10**12
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] >= 10**7

    def test_tracker_keeps_the_streams_of_random_numbers_apart(self) -> None:
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        tracker = CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("model", 2)
        tracker.add("expert", 3)
        alone = {seed: torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)}
        drawn: dict[int, list[torch.Tensor]] = {1: [], 2: [], 3: []}
        for _ in range(2):
            drawn[1].append(torch.rand(1))
            with tracker.fork("model"):
                drawn[2].append(torch.rand(1))
                with tracker.fork("expert"):
                    drawn[3].append(torch.rand(1))
                drawn[2].append(torch.rand(1))
            drawn[1].append(torch.rand(1))
        for seed, parts in drawn.items():
            assert torch.equal(torch.cat(parts), alone[seed][: len(parts)]), seed

    def test_recomputed_dropout_equals_the_first(self) -> None:
        from megatron.core.tensor_parallel import random as upstream

        upstream.initialize_rng_tracker(force_reset=True)
        tracker = upstream.get_cuda_rng_tracker()
        tracker.add("model-parallel-rng", 5)
        torch.manual_seed(6)
        masks: list[torch.Tensor] = []

        def layer(activation: torch.Tensor) -> torch.Tensor:
            outer = torch.dropout(torch.ones_like(activation), 0.5, True)
            with tracker.fork():
                inner = torch.dropout(torch.ones_like(activation), 0.5, True)
            masks.append(outer + 4 * inner)
            return activation * outer * inner

        activation = torch.ones(64, requires_grad=True)
        output = upstream.checkpoint(layer, False, activation)
        torch.rand(3)
        before_backward = torch.get_rng_state()
        output.sum().backward()
        assert len(masks) == 2
        assert torch.equal(masks[0], masks[1])
        assert torch.equal(torch.get_rng_state(), before_backward)
        upstream.initialize_rng_tracker(force_reset=True)

    def test_a_data_loader_leaves_the_generator_of_dropout_alone(self) -> None:
        before = torch.get_rng_state()
        seeds = [iter(DataLoader([1, 2]))._base_seed for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before)
        assert seeds[0] != seeds[1], "the workers of two epochs must not draw the same numbers"
        cpu.uninstall()
        iter(DataLoader([1, 2]))
        assert not torch.equal(torch.get_rng_state(), before), "the row is not needed any more"


@without_cuda
@pytest.mark.usefixtures("door")
class TestSaving:
    def test_the_worker_gets_a_snapshot(self) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

        from megatron_async.patches.cpu import saving

        sent: list[Any] = []
        schedule = saving._schedule_a_snapshot(lambda caller, request: sent.append(request))
        moment = torch.zeros(3)
        buckets = [("path", "key", ([("step", 1)], [("moment", moment)]))]
        request = AsyncRequest(
            async_fn=print, async_fn_args=(0, None, "results"), finalize_fns=(), preload_fn=lambda: buckets
        )
        schedule(None, request)
        moment.fill_(1.0)
        rank, [(path, key, (objects, [(name, saved)]))], results = sent[0].async_fn_args
        assert (rank, results, path, key, objects, name) == (0, "results", "path", "key", [("step", 1)], "moment")
        assert torch.equal(saved, torch.zeros(3))
        assert sent[0].preload_fn is None

    def test_the_worker_finds_its_loop_by_name(self) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

        from megatron_async.patches.cpu import saving

        assert pickle.loads(pickle.dumps(PersistentAsyncCaller.async_loop)) is saving.save_in_worker

    def test_each_parameter_counts_its_own_steps(self) -> None:
        from megatron_async.patches.cpu import saving

        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
        adam = torch.optim.Adam(parameters)
        shared = torch.tensor(7.0)
        for parameter in parameters:
            adam.state[parameter] = {
                "step": shared,
                "exp_avg": torch.zeros(2),
                "exp_avg_sq": torch.zeros(2),
            }
            parameter.grad = torch.ones(2)
        saving._step_per_parameter(lambda wrapper, state_dict: None)(SimpleNamespace(optimizer=adam), {})
        adam.step()
        assert [state["step"].item() for state in adam.state.values()] == [8.0] * 3

    def test_state_is_asked_for_before_the_first_step(self) -> None:
        from megatron_async.patches.cpu import saving

        parameter = torch.nn.Parameter(torch.ones(2))
        adam = torch.optim.Adam([parameter])

        def upstream_steps(wrapper: Any) -> list[float]:
            return [state["step"].item() for state in adam.state_dict()["state"].values()]

        state_dict = saving._state_dict_before_the_first_step(upstream_steps)
        assert state_dict(SimpleNamespace(optimizer=adam)) == [0.0]
        assert len(adam.state) == 0
        parameter.grad = torch.ones(2)
        adam.step()
        assert state_dict(SimpleNamespace(optimizer=adam)) == [1.0]
        assert set(adam.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}


@without_cuda
@pytest.mark.usefixtures("door")
class TestQuiet:
    def test_only_the_listed_warnings_are_dropped(self) -> None:
        listed = {"module": "megatron.core.utils", "filename": "utils.py", "lineno": 1}
        with warnings.catch_warnings(record=True) as shown:
            warnings.warn_explicit("Apex is not installed. Falling back to Torch Norm", UserWarning, **listed)
            assert not shown
            warnings.warn_explicit("Apex is not installed. Falling back to Torch Norm", RuntimeWarning, **listed)
            warnings.warn_explicit("Another matter", UserWarning, **listed)
            warnings.warn_explicit(
                "Apex is not installed. Falling back to Torch Norm", UserWarning, "mine.py", 1, module="mine"
            )
        assert [str(warning.message) for warning in shown][1:2] == ["Another matter"]
        assert len(shown) == 3

    def test_only_the_listed_log_records_are_dropped(self, caplog: pytest.LogCaptureFixture) -> None:
        name, start = quiet.LOG_RECORDS[0]
        logger = logging.getLogger(name)
        logger.warning(start)
        logger.warning("Another matter")
        assert [record.getMessage() for record in caplog.records] == ["Another matter"]


@without_cuda
def test_splits_of_tokens_reach_an_all_to_all_as_numbers(door: None) -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    for module in (moe_utils, token_dispatcher):
        splits = module.maybe_move_tensor_to_cpu(torch.tensor([3, 1]), as_numpy=True)
        assert not torch.is_tensor(splits)
        assert list(splits) == [3, 1]
    kept = torch.tensor([3, 1])
    assert token_dispatcher.maybe_move_tensor_to_cpu(kept) is kept
