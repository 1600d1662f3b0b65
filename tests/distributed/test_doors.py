"""``python -m megatron_async SCRIPT``: scripts run unmodified, also those that a spawned saver must not run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.loop_runs import ADAM, ASYNC, FEEDBACK, MUON, NO_DROPOUT, run
from tests.distributed.ranks import ROOT, torchrun

TWO = ["--train-iters", "3", "--pipeline-model-parallel-size", "2"]


def plugin(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_async", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_usage() -> None:
    helped = plugin("--help")
    assert helped.returncode == 0
    assert "usage: torchrun" in helped.stdout
    nothing = plugin()
    assert nothing.returncode == 2
    assert "usage: torchrun" in nothing.stderr


def test_help_of_a_script_shows_our_group() -> None:
    shown = plugin("scripts/pretrain_gpt.py", "--help")
    assert shown.returncode == 0
    assert "asynchronous pipeline (megatron_async):" in shown.stdout
    for flag in ("--pipeline-schedule", "--async-error-feedback", "--async-ef-coefficient", "--async-warmup-factor"):
        assert flag in shown.stdout


def test_importing_the_package_changes_nothing() -> None:
    code = "import sys, megatron_async; assert not any(m.split('.')[0] in ('torch', 'megatron') for m in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("how", [[], ["--async-save", "--async-strategy", "mcore"]], ids=["save", "async save"])
def test_a_script_without_a_guard_survives_saving(tmp_path: Path, how: list[str]) -> None:
    """The saver is a spawned process, which imports what ``__main__`` is."""
    save = ["--save", str(tmp_path), "--save-interval", "3", "--ckpt-format", "torch_dist", *how]
    script = ("-m", "megatron_async", "tests/distributed/unguarded.py")
    done = torchrun(2, *script, *run(NO_DROPOUT, ADAM, TWO, save), timeout=150)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("UNGUARDED") == 2  # once a rank
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (tmp_path / "iter_0000003" / ".metadata").is_file()


def test_an_unmodified_script_trains_asynchronously() -> None:
    """The flags survive Megatron's second look at the command line, and are printed with its arguments."""
    script = ("-m", "megatron_async", "tests/distributed/unguarded.py")
    done = torchrun(2, *script, *run(NO_DROPOUT, MUON, ASYNC, FEEDBACK, TWO), timeout=150)
    assert done.returncode == 0, done.stdout[-3000:]
    for setting in ("pipeline_schedule", "async_error_feedback", "async_ef_coefficient", "async_warmup_factor"):
        assert f"  {setting} ..." in done.stdout
    assert "> megatron_async: 2bw-async replaces in Megatron:" in done.stdout
    assert ">   megatron.training.training.get_forward_backward_func: " in done.stdout
    assert " iteration        3/       3 |" in done.stdout
