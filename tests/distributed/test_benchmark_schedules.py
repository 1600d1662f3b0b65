"""scripts/benchmark_schedules.py end to end on two ranks: what it did, never how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS, REPEATS = 2, 2
CHUNKS = {"megatron-interleaved": 2, "torch-zbv": 2}


def benchmark(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "benchmark_schedules.py"), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    prefix = tmp_path_factory.mktemp("benchmark") / "result"
    done = benchmark(
        *("--mode", "sleep", "--stages", 2, "--microbatch-factors", "1,2", "--messages-kib", 16),
        *("--full-grid", "--forward-ms", 1, "--steps", STEPS, "--repeats", REPEATS, "--optimizers", "adamw,muon"),
        *("--output", prefix),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "p=2, m=4, 16 KiB, muon (sleeping stages)" in done.stdout
    assert prefix.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return dict(json.loads(prefix.with_suffix(".json").read_text()))


def results(record: dict[str, Any]) -> list[dict[str, Any]]:
    (launch,) = record["launches"]
    return list(launch["results"])


def test_every_system_is_measured_where_it_exists(record: dict[str, Any]) -> None:
    both = ["megatron-1f1b", "megatron-interleaved", "torch-1f1b", "torch-zbv", "2bw-async"]
    assert {(r["optimizer"], r["microbatches"]): list(r["systems"]) for r in results(record)} == {
        ("adamw", 2): [*both, "2bw-async-blocking"],
        ("adamw", 4): [*both, "2bw-async-factor2", "2bw-async-blocking"],
        ("muon", 2): both,
        ("muon", 4): [*both, "2bw-async-factor2"],
    }


def test_every_rank_records_every_step_of_every_repeat(record: dict[str, Any]) -> None:
    for result in results(record):
        for ranks in result["systems"].values():
            assert len(ranks) == 2
            for rank in ranks:
                assert [len(ends) for ends in rank["ends"]] == [STEPS + 1] * REPEATS
                assert all(ends == sorted(ends) for ends in rank["ends"])


def test_every_microbatch_slept_once_forward_and_once_in_each_half_of_its_backward(record: dict[str, Any]) -> None:
    for result in results(record):
        for system, ranks in result["systems"].items():
            expected = STEPS * result["microbatches"] * CHUNKS.get(system, 1)
            for rank in ranks:
                assert rank["work"] == [[expected] * 3] * REPEATS, system


def test_all_systems_train_the_same_model(record: dict[str, Any]) -> None:
    """PyTorch's and Megatron's schedules have taken equal steps, so that equal gradients are left."""
    for result in results(record):
        norm = {system: ranks[0]["grad_norm"] for system, ranks in result["systems"].items()}
        assert norm["torch-1f1b"] == pytest.approx(norm["megatron-1f1b"], rel=1e-3)
        assert norm["torch-zbv"] == pytest.approx(norm["megatron-interleaved"], rel=1e-3)
        assert norm["2bw-async"] == pytest.approx(norm["megatron-1f1b"], rel=0.1)


def test_what_was_measured_and_where_is_recorded(record: dict[str, Any]) -> None:
    assert record["machine"]["cores"] == os.cpu_count()
    assert record["versions"]["megatron-core"] != "not installed"
    assert record["launches"][0]["settings"]["backward_ms"] == 2.0


def test_a_rank_that_fails_is_an_error(tmp_path: Path) -> None:
    # sitecustomize runs in every process: it takes from the ranks alone what they need.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'RANK' in os.environ:\n    sys.modules['megatron_async'] = None\n"
    )
    done = benchmark(
        *("--mode", "overhead", "--repeats", 1, "--steps", 1, "--output", tmp_path / "x"), PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 1
    assert "the ranks of p=1 failed with status 1" in done.stderr
