"""Runs in Megatron's training loop that several test files look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_cases
from tests.distributed.runs import Runs


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """The runs of loop_runs.py and checkpoint_runs.py, made once: three launches, on 1, 2 and 4 ranks."""
    folder: Path = tmp_path_factory.mktemp("loop")
    return {f"pp{p}": run_cases(p, "tests.distributed.loop_worker", folder, 900, f"pp{p}") for p in (1, 2, 4)}
