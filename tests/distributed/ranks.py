"""Starts the ranks of a multi-process test once, and gives back what each case found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(ranks: int, *command: str, timeout: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script or ``-m module`` on some ranks of this machine, one thread each; stdout and stderr together."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--master-addr", "127.0.0.1", "--master-port", str(free_port()), *command),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_cases(ranks: int, module: str, folder: Path, timeout: float, *arguments: str) -> dict[str, Any]:
    """Run a worker module that writes ``results.json``, {case: finding}, into ``folder``, its first argument."""
    done = torchrun(ranks, "-m", module, str(folder), *arguments, timeout=timeout)
    assert done.returncode == 0, f"{module} failed with status {done.returncode}:\n{done.stdout[-6000:]}"
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def run_alone(module: str, folder: Path, timeout: float) -> dict[str, Any]:
    """Run a worker module that starts its ranks by itself and writes ``results.json`` into ``folder``."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{module} failed with status {done.returncode}:\n{done.stdout[-6000:]}"
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results
