"""scripts/benchmark_schedules.py without processes: the plan, the arithmetic of the report, and the sleeping stage."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark_schedules  # noqa: E402
from schedule_benchmark import command_line, points, report  # noqa: E402
from schedule_benchmark.points import BASELINE, CONTROL, Launch, Point, Settings  # noqa: E402

SETTINGS = Settings(forward_ms=10, backward_ms=20, steps=2, repeats=3, systems=tuple(points.SYSTEMS))


def make_point(**changes: Any) -> Point:
    fields = {"mode": "sleep", "stages": 4, "microbatches": 4, "message_kib": 16, "optimizer": "adamw"}
    return Point(**{**fields, **changes})  # type: ignore[arg-type]


def plan(*arguments: str) -> list[Launch]:
    return command_line.plan(command_line.parse_args("", arguments))


def raw(seconds: list[float], *, ranks: int = 2, steps: int = 2, lag: float = 0.0) -> list[dict[str, Any]]:
    """What ranks record whose steps take ``seconds`` in each repeat; the first rank takes ``lag`` longer in all."""
    recorded = []
    for rank in range(ranks):
        late = lag if rank == 0 else 0.0
        ends = [
            [round(1e9 * (i + k * s + late * (k == steps))) for k in range(steps + 1)] for i, s in enumerate(seconds)
        ]
        recorded.append({"ends": ends, "processor": [int(1e7)] * len(seconds)})
    return recorded


def test_ideal_ratio_is_that_of_a_pipeline_without_bubbles() -> None:
    assert points.ideal_ratio(8, 8) == 15 / 8
    assert points.ideal_ratio(1, 8) == 1.0


@pytest.mark.parametrize(
    ("system", "stages", "microbatches", "possible"),
    [
        ("2bw-async", 4, 4, True),
        ("2bw-async", 4, 3, False),
        ("2bw-async-factor2", 4, 6, False),
        ("2bw-async-factor2", 4, 7, True),
        ("megatron-interleaved", 4, 6, False),
        ("megatron-interleaved", 4, 8, True),
        ("megatron-interleaved", 1, 8, False),
    ],
)
def test_systems_are_left_out_where_their_schedule_does_not_exist(
    system: str, stages: int, microbatches: int, possible: bool
) -> None:
    assert points.is_possible(system, stages, microbatches) is possible


def test_the_default_plan_covers_the_grid() -> None:
    launches = plan()
    sleeping = [point for launch in launches for point in launch.points if point.mode == "sleep"]
    assert {point.stages for point in sleeping} == {2, 4, 8}
    assert {point.microbatches // point.stages for point in sleeping} == {1, 2, 4}
    assert {(p.message_kib, p.optimizer) for p in sleeping} == {(16, "adamw"), (16, "muon"), (1024, "adamw")}
    varied = [p for p in sleeping if (p.message_kib, p.optimizer) != (16, "adamw")]
    assert {p.microbatches // p.stages for p in varied} == {1, 2}
    assert [launch.points[0].mode for launch in launches[-2:]] == ["compute", "overhead"]
    assert sum(launch.seconds() for launch in launches) < 27 * 60


def test_the_full_grid_has_all_combinations() -> None:
    (launch,) = plan("--mode", "sleep", "--stages", "8", "--full-grid")
    assert len(launch.points) == len(set(launch.points)) == 12


def test_the_control_is_measured_once_for_each_number_of_microbatches() -> None:
    (launch,) = plan("--mode", "sleep", "--stages", "8")
    with_control = [point for point in launch.points if CONTROL in launch.systems_at(point)]
    assert [point.microbatches for point in with_control] == [8, 16, 32]


def test_windows_hold_enough_microbatches() -> None:
    (launch,) = plan("--mode", "sleep", "--stages", "2")
    assert [launch.settings.steps_at(m) for m in (2, 4, 8, 32)] == [8, 4, 2, 1]


def test_a_launch_survives_json() -> None:
    (launch,) = plan("--mode", "sleep", "--stages", "4")
    assert Launch.from_dict(json.loads(json.dumps(launch.as_dict()))) == launch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--systems", "torch-zbv"), f"--systems must include {BASELINE}"),
        (("--systems", "zb"), "'zb' is not one of"),
        (("--stages", "1"), "must be at least 2, got 1"),
        (("--stages", "two"), "'two' is not a whole number"),
        (("--messages-kib", "12"), "multiples of 8"),
        (("--hidden", "100"), "--hidden must be a multiple of 64"),
        (("--forward-ms", "0"), "above 0"),
        (("--forward-ms", "nan"), "above 0"),
    ],
)
def test_a_bad_command_line_is_one_error(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        benchmark_schedules.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 2}'])
def test_a_file_that_is_no_result_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    assert benchmark_schedules.main(["--read", str(path)]) == 1
    assert f"--read {path}" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark_schedules.main(["--quick", "--output", str(tmp_path / "missing" / "x")]) == 1
    assert "is not a folder that can be written to" in capsys.readouterr().err


def test_step_time_is_that_of_the_slowest_rank() -> None:
    assert report.step_times(raw([0.5, 0.7])) == pytest.approx([0.5, 0.7])
    assert report.step_times(raw([0.5, 0.7], lag=0.1)) == pytest.approx([0.55, 0.75])


def test_rows_compare_with_the_baseline_of_the_same_repeat() -> None:
    result = {
        **make_point().as_dict(),
        "systems": {BASELINE: raw([0.21, 0.42, 0.21]), "2bw-async": raw([0.12, 0.24, 0.15])},
    }
    base, ours = report.rows_of(result, SETTINGS)
    assert (base.ratio.median, base.bubble) == (1.0, pytest.approx(1 - 4 * 0.03 / 0.21))
    assert ours.seconds.median == pytest.approx(0.15)
    assert ours.bubble == pytest.approx(1 - 4 * 0.03 / 0.15)
    assert (ours.ratio.low, ours.ratio.median, ours.ratio.high) == pytest.approx((1.575, 1.75, 1.75))
    assert ours.of_ideal == pytest.approx(1.0)


def synthetic_record() -> dict[str, Any]:
    """A result file in which everything runs exactly as theory says."""
    launches = []
    for launch in plan("--mode", "sleep,compute,overhead", "--stages", "2,4", "--full-grid"):
        slot = launch.settings.slot_seconds
        results = [
            {
                **point.as_dict(),
                "systems": {
                    system: raw([slot * points.expected_slots(system, point.stages, point.microbatches)] * 3)
                    for system in launch.systems_at(point)
                },
            }
            for point in launch.points
        ]
        launches.append({**launch.as_dict(), "results": results})
    versions = {"torch": "0", "megatron-core": "0"}
    return {"format": 1, "machine": {"cpu": "none", "cores": 2}, "versions": versions, "launches": launches}


def test_a_result_file_gives_table_control_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(synthetic_record()))
    assert benchmark_schedules.main(["--read", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "p=4, m=4, 16 KiB, adamw (sleeping stages); ideal ratio 1.750" in printed
    assert "p=4, m=4, 16 KiB, adamw: a blocking step adds 180 ms a batch; (p-1)·tb = 180 ms" in printed
    assert "without compute takes 1.00 times as long" in printed
    (missing,) = {line for line in printed.splitlines() if "factor 2" in line and line.rstrip().endswith("-")}
    assert missing.split()[-6:] == ["-"] * 6
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def stage() -> Any:
    from schedule_benchmark.parts import make_config
    from schedule_benchmark.sleeping import HIDDEN, SleepingStage, Work

    work = Work(forward=0, input_gradient=0, weight_gradient=0)
    config = make_config(3, 1, num_layers=3, hidden_size=HIDDEN, num_attention_heads=1)
    return SleepingStage(config, work, number=1, stages=3)


def stage_input(samples: int) -> torch.Tensor:
    return torch.randn(64, samples, 64).bfloat16().requires_grad_()


def test_the_backward_of_a_sleeping_stage_comes_in_two_halves(stage: Any) -> None:
    stage.work.reset()
    x = stage_input(2)
    stage.set_input_tensor([x])
    output = stage(torch.empty(0))
    gradient = torch.randn(output.shape).bfloat16()
    assert stage.work.counts() == (1, 0, 0)
    torch.autograd.grad(output, x, gradient, retain_graph=True)
    assert stage.work.counts() == (1, 1, 0)
    (of_weight,) = torch.autograd.grad(output, list(stage.weights), gradient)
    assert stage.work.weight_gradients == 1
    torch.testing.assert_close(of_weight, gradient.sum(dim=1))


def test_a_sleeping_stage_gives_what_megatron_can_free(stage: Any) -> None:
    stage.set_input_tensor([stage_input(1)])
    output = stage(torch.empty(0))
    assert output._base is None, "Megatron refuses to free a view"
    torch.testing.assert_close(output, stage.input_tensor + stage.weights[0].unsqueeze(1))


def test_work_takes_its_time_and_counts_lateness() -> None:
    from schedule_benchmark.sleeping import Work

    work = Work(forward=0, input_gradient=0, weight_gradient=0)
    start = time.monotonic_ns()
    work.rest(start, 5_000_000)
    assert time.monotonic_ns() - start >= 5_000_000
    assert work.late >= 0
    work.is_fast = True
    before = work.late
    work.rest(time.monotonic_ns(), 10**12)
    assert work.late == before


def test_a_window_with_too_little_work_is_refused() -> None:
    from schedule_benchmark.measure import check_work

    check_work("torch-zbv", make_point(), SETTINGS, (16, 16, 16))
    with pytest.raises(RuntimeError, match=r"should have 16 of each"):
        check_work("torch-zbv", make_point(), SETTINGS, (16, 16, 15))
