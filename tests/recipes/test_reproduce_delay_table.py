"""scripts/reproduce_delay_table.py, with real training runs of a few updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "scripts" / "reproduce_delay_table.py"
ITERATIONS = 3
STUDY = """
title: Tiny study
data:
  path: DATA
  prepare: >-
    scripts/prepare_data.py --output-prefix {path} --tokenizer byte --append-eod
    --input {stdlib} --glob 'json/*.py'
common: >-
  --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --transformer-impl local --attention-backend unfused --no-masked-softmax-fusion --no-rope-fusion
  --no-bias-swiglu-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion
  --micro-batch-size 2 --global-batch-size 2 --train-iters 3 --lr-decay-style constant --clip-grad 1.0
  --distributed-backend gloo --split 80,20,0 --tokenizer-type NullTokenizer --vocab-size 257 --num-workers 0
  --eval-interval 1 --eval-iters 2 --log-interval 1 --tensorboard-log-interval 1 --log-timers-to-tensorboard
optimizers:
  adamw: {flags: --optimizer adam, learning_rates: [1e-4, 1e-2]}
arms:
  sync: --pipeline-schedule 1f1b
  async: --pipeline-schedule 2bw-async
  async-ef: --pipeline-schedule 2bw-async --async-error-feedback --async-evaluate both
recovery: {async-ef: async}
seeds: [1]
"""


def harness(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HARNESS), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Study file, folder and output of a study of four runs."""
    directory = tmp_path_factory.mktemp("study")
    file = directory / "tiny-delay-study.yaml"
    file.write_text(STUDY.replace("DATA", str(directory / "data" / "text")))
    result = harness(file, "--output", directory / "out")
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    return file, directory / "out", result.stdout


@pytest.fixture(scope="module")
def runs(study: tuple[Path, Path, str]) -> dict[tuple[str, float], dict[str, Any]]:
    content = json.loads((study[1] / "results.json").read_text())
    return {(run["arm"], run["learning_rate"]): run for run in content["runs"]}


def test_learning_rate_is_tuned_and_kept(study: tuple[Path, Path, str], runs: dict[tuple[str, float], Any]) -> None:
    assert sorted(runs) == [("async", 0.01), ("async-ef", 0.01), ("sync", 0.0001), ("sync", 0.01)]
    assert all(run["status"] == "done" for run in runs.values())
    assert runs["sync", 0.01]["validation_loss"] < runs["sync", 0.0001]["validation_loss"]
    assert "adamw: the best learning rate, 0.01, is the highest of its grid" in study[2]


def test_arms_see_the_same_validation_data(runs: dict[tuple[str, float], Any]) -> None:
    """After one update no delay has shown: equal weights, so equal losses, if and only if the data are the same.

    Under error feedback this holds for the plain iterate, as the correction is already in x.
    """
    sync, delayed, corrected = (
        dict(map(tuple, runs[arm, 0.01]["validation"])) for arm in ("sync", "async", "async-ef")
    )
    plain = dict(map(tuple, runs["async-ef", 0.01]["validation_z"]))
    assert sorted(sync) == sorted(delayed) == sorted(corrected) == sorted(plain) == list(range(1, ITERATIONS + 1))
    assert sync[1] == delayed[1] == plain[1]
    assert corrected[1] != plain[1]
    assert sync[ITERATIONS] != delayed[ITERATIONS], "the delay"
    assert delayed[ITERATIONS] != plain[ITERATIONS], "error feedback"


def test_report(study: tuple[Path, Path, str], runs: dict[tuple[str, float], Any]) -> None:
    _, folder, output = study
    text = (folder / "report.md").read_text()
    assert text in output
    losses = [f"{runs[arm, 0.01]['validation_loss']:.4f}" for arm in ("sync", "async", "async-ef")]
    losses.append(f"{runs['async-ef', 0.01]['validation_loss_z']:.4f}")
    row = next(line for line in text.splitlines() if line.startswith("| adamw"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["adamw", "0.01", *losses]
    gap = runs["async", 0.01]["validation_loss"] - runs["sync", 0.01]["validation_loss"]
    assert f"{gap:+.4f}" in text
    for name in ("gaps.png", "losses.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_runs_are_one_group_of_wandb(study: tuple[Path, Path, str]) -> None:
    files = sorted((study[1] / "runs").rglob("offline-run-*/run-*.wandb"))
    assert len(files) == 4
    for file in files:
        content = file.read_bytes()
        assert b"megatron-async-delay-study" in content
        assert b"tiny-delay-study" in content, "the group"
        assert b"lm loss validation" in content


def test_a_finished_study_runs_nothing_again(study: tuple[Path, Path, str]) -> None:
    file, folder, _ = study
    logs = {log: log.stat().st_mtime_ns for log in folder.rglob("log.txt")}
    assert len(logs) == 4
    result = harness(file, "--output", folder)
    assert result.returncode == 0
    assert {log: log.stat().st_mtime_ns for log in folder.rglob("log.txt")} == logs
    assert (folder / "report.md").read_text() in result.stdout


def test_a_run_that_fails(study: tuple[Path, Path, str], tmp_path: Path) -> None:
    file, folder, _ = study
    text = file.read_text().replace("--async-error-feedback", "--async-error-feedback --no-such-flag")
    (tmp_path / "tiny-delay-study.yaml").write_text(text)
    result = harness(tmp_path / "tiny-delay-study.yaml", "--output", folder, "--no-wandb")
    assert result.returncode == 1
    assert "unrecognized arguments: --no-such-flag" in result.stdout
    assert "async-ef/seed-1 failed (exit code 2)" in result.stderr
    assert (folder / "runs" / "adamw" / "lr-0.01" / "async" / "seed-1" / "outcome.json").exists(), "the others stay"
