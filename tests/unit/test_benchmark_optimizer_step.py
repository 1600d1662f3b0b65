"""The benchmark of the optimizer step: what it counts, that it sees a kept tensor, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "benchmark_optimizer_step.py"
sys.path.insert(0, str(ROOT / "scripts"))

import benchmark_optimizer_step as benchmark  # noqa: E402

TINY = ["--layers", "1", "--hidden", "64", "--tokens", "128", "--seconds", "0", "--limit", "1000"]

KEEPS_THE_UPDATE = """
import sys
sys.path.insert(0, {scripts!r})
import benchmark_optimizer_step as benchmark

benchmark.initialize()
from megatron_async.optimizer import deferred_step

original = deferred_step.write_corrected_weights
kept = []


def keep(before, *arguments):
    kept[:] = [weight.clone() for weight in before]
    original(before, *arguments)


deferred_step.write_corrected_weights = keep
result = benchmark.measure("adam", "bf16", layers=1, hidden=64, tokens=128, seconds=0)
found = benchmark.failures([result], 1000.0)
assert len(found) == 1, found
print(found[0], sum(weight.numel() for weight in kept) == result.parameters)
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the CPU stand-in replaces functions of torch."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment
    )


def test_counts_the_bytes_of_the_table_and_none_for_feedback(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = _run(str(SCRIPT), *TINY, "--optimizers", "adam", "mars", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "| adam      | fp32  |" in done.stdout
    results = {(r["optimizer"], r["dtype"]): r for r in json.loads(file.read_text())}
    # docs/schedule.md: two versions of the weights, accumulation, waiting gradients, masters, two moments.
    expected = {"bf16": 2 * 2 + 4 + 4 + 4 + 8, "fp32": 2 * 4 + 4 + 4 + 4 + 8}
    assert len(results) == 4
    for (optimizer, dtype), result in results.items():
        assert result["bytes_plain"] * result["parameters"] == result["bytes_feedback"] * result["parameters"]
        assert result["update"]["pairs"] == 3
        assert result["update"]["milliseconds"] > 0
        assert 0 < result["share"] < 1
        if optimizer == "adam":  # and the batch, and what the model caches for it
            assert expected[dtype] <= result["bytes_plain"] < expected[dtype] + 1


def test_a_kept_update_is_seen() -> None:
    done = _run("-c", KEEPS_THE_UPDATE.format(scripts=str(ROOT / "scripts")))
    assert done.returncode == 0, done.stderr
    assert "error feedback keeps" in done.stdout
    assert done.stdout.strip().endswith("True")


def test_failures() -> None:
    ratio = benchmark.Ratio(10.0, 1.2, (1.1, 1.25), 1.2, 5)
    good = benchmark.Result("adam", "fp32", 10_000_000, 28.0, 28.0, ratio, 0.25, 512)
    assert good.step == pytest.approx(1.05)
    assert benchmark.failures([good], 1.1) == []
    slow = replace(good, share=0.75)
    assert "takes 1.150 times as long" in benchmark.failures([slow], 1.1)[0]
    heavy = replace(good, bytes_feedback=32.0)
    assert "keeps 40000000 bytes" in benchmark.failures([heavy], 1.1)[0]
    assert "1.200 (1.100–1.250)" in benchmark.table([good])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "--layers 0"),
        (["--hidden", "100"], "--hidden 100"),
        (["--tokens", "100"], "--tokens 100"),
        (["--seconds", "-1"], "--seconds -1"),
        (["--optimizers", "sophia"], "--optimizers"),
    ],
)
def test_bad_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        benchmark.parse_args(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
