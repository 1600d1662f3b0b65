"""scripts/compare_runs.py, on event files as Megatron writes them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import compare_runs

ITERATIONS = 40


def write_run(
    directory: Path,
    *,
    shift: float = 0.0,
    seconds: float = 0.5,
    start: int = 1,
    stop: int = ITERATIONS,
    evaluate_at: tuple[int, ...] = (20, 40),
) -> None:
    """A training loss of 5 - iteration / 20 + shift, a validation loss 0.1 above, a log interval of 10."""
    with SummaryWriter(str(directory / "tensorboard")) as writer:
        for iteration in range(start, stop + 1):
            loss = 5 - iteration / 20 + shift
            writer.add_scalar("lm loss", loss, iteration)
            writer.add_scalar("lm loss vs samples", loss, 16 * iteration)
            if iteration % 10 == 0:
                # The first interval is slow: compilation, allocation, first files.
                writer.add_scalar("iteration-time", seconds if iteration > 10 else 9.0, iteration)
            if iteration in evaluate_at:
                writer.add_scalar("lm loss validation", loss + 0.05, iteration)
                writer.add_scalar("lm loss validation", loss + 0.15, iteration)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "sync")
    write_run(tmp_path / "async", shift=0.5, seconds=0.4)
    write_run(tmp_path / "ef", shift=0.2, seconds=0.25)
    return tmp_path


def compare(*arguments: object) -> int:
    return compare_runs.main([str(argument) for argument in arguments])


def test_numbers(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = runs / "out" / "comparison.json"
    code = compare(runs / "sync", runs / "async", runs / "ef", "--recovery", "ef:async", "--last", 4, "--json", output)
    assert code == 0
    content = json.loads(output.read_text())
    sync, plain, corrected = content["runs"]
    assert content["baseline"] == "sync"
    assert [run["status"] for run in content["runs"]] == ["complete"] * 3
    assert sync["training_loss"] == pytest.approx(5 - (37 + 38 + 39 + 40) / 4 / 20)
    assert sync["validation_loss"] == pytest.approx(3.1), "mean of the evaluations at the last iteration"
    assert [step for step, _ in sync["validation"]] == [20, 40]
    assert plain["gap"] == pytest.approx(0.5)
    assert corrected["gap"] == pytest.approx(0.2)
    assert corrected["recovery"] == pytest.approx(60)
    assert plain["recovery"] is None
    assert plain["relative_throughput"] == pytest.approx(0.5 / 0.4), "without the first log interval"
    assert corrected["relative_throughput"] == pytest.approx(2)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == [
        "run", "iterations", "training loss", "validation loss", "gap to sync", "gap recovered", "tokens/s vs sync",
    ]  # fmt: skip
    assert set("".join(rows[1])) == set("-:"), "Markdown"
    assert rows[2] == ["sync", "40", "3.0750", "3.1000", "–", "–", "1.00"]
    assert rows[3] == ["async", "40", "3.5750", "3.6000", "+0.5000", "–", "1.25"]
    assert rows[4] == ["ef", "40", "3.2750", "3.3000", "+0.2000", "60 %", "2.00"]


def test_unfinished_and_missing_runs_are_shown_as_such(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs / "half", stop=25)
    write_run(runs / "not-evaluated", evaluate_at=(20,))
    everything = [runs / name for name in ("sync", "half", "not-evaluated", "nowhere")]
    assert compare(*everything) == 0
    _, _, _, half, not_evaluated, nowhere = capsys.readouterr().out.splitlines()
    assert "25 (unfinished)" in half
    assert "+" not in half, "no gap between losses of different iterations"
    assert "40 (unfinished)" in not_evaluated
    assert "missing" in nowhere
    assert compare(*everything, "--require-complete") == 1
    assert "not complete: half, not-evaluated, nowhere" in capsys.readouterr().err


def test_all_runs_stopped_early(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs / "sync", runs / "async", "--iterations", 100, "--require-complete") == 1
    captured = capsys.readouterr()
    assert captured.out.count("40 (unfinished)") == 2
    assert "not complete: sync, async" in captured.err


def test_a_missing_baseline_leaves_the_losses(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("sync=" + str(runs / "nowhere"), runs / "async") == 0
    assert "| async | 40         | 3.9750        | 3.6000 " in capsys.readouterr().out


def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path / "a", tmp_path / "b") == 1
    error = capsys.readouterr().err
    assert "no training loss in" in error
    assert "--tensorboard-dir" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "--baseline", "c"], "no run named 'c' among a, b"),
        (["a", "b", "--recovery", "b:c"], "no run named 'c'"),
        (["x/a", "y/a"], "two runs have the same name"),
        (["a", "--last", "0"], "--last 0: at least 1"),
    ],
)
def test_bad_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        compare(*arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    write_run(tmp_path / "run", stop=30, shift=1.0)
    write_run(tmp_path / "run" / "resumed", start=26)
    run = compare_runs.read_run("run", tmp_path / "run", last=1)
    losses = dict(run.training)
    assert sorted(losses) == list(range(1, 41)), "each iteration once"
    assert losses[25] == pytest.approx(5 - 25 / 20 + 1)
    assert losses[26] == pytest.approx(5 - 26 / 20)


def test_recovery_needs_a_gap(runs: Path) -> None:
    write_run(runs / "better", shift=-0.1)
    read = [compare_runs.read_run(name, runs / name, 20) for name in ("sync", "better", "ef")]
    compare_runs.compare(read, "sync", {"ef": "better"}, None)
    assert read[1].gap == pytest.approx(-0.1)
    assert read[2].recovery is None


def test_smoothing_and_gap() -> None:
    assert compare_runs.smooth([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]
    gap = compare_runs.difference([(1, 5.0), (2, 4.0), (4, 3.0)], [(2, 3.5), (3, 3.0), (4, 3.0)])
    assert gap == [(2, 0.5), (4, 0.0)]


@pytest.mark.parametrize("names", [("sync", "async", "ef"), ("sync",), ("async", "nowhere")])
def test_picture(names: tuple[str, ...], runs: Path) -> None:
    from matplotlib import image

    picture = runs / "pictures" / "losses.png"
    assert compare(*(runs / name for name in names), "--png", picture) == 0
    pixels = image.imread(str(picture))
    assert pixels.shape[1] == 1200
    for name, colour in zip(names, compare_runs.COLOURS, strict=False):
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        drawn = (abs(pixels[..., :3] - rgb) < 0.02).all(axis=-1).sum()
        assert (drawn > 500) == (name != "nowhere"), f"{name} has {drawn} pixels"


def test_picture_survives_a_diverged_run(runs: Path) -> None:
    run = compare_runs.read_run("ef", runs / "ef", 20)
    run.training[-1] = (40, math.nan)
    run.training[-2] = (39, math.inf)
    compare_runs.draw([run], "ef", runs / "a.png", title="diverged")
    assert (runs / "a.png").stat().st_size > 10_000
