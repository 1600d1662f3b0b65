"""Bad input gets one clear error that names the flag and the remedy, a status that is not 0 on every rank, no hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.bad_input_cases import CASES, Case
from tests.distributed.loop_runs import ADAM, ASYNC, NO_DROPOUT, SGD, UNTIED, run
from tests.distributed.ranks import ROOT, free_port, run_cases, torchrun


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(1, "tests.distributed.bad_input_worker", tmp_path_factory.mktemp("bad"), timeout=300)


def test_there_are_enough_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 25


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_with_one_clear_message(answers: dict[str, Any], case: Case) -> None:
    ranks = answers[case.name]
    assert all(rank["status"] != 0 for rank in ranks)
    for text in case.says:
        assert text in ranks[0]["output"]
    assert "Traceback" not in ranks[0]["output"]
    assert "Traceback" not in ranks[1]["output"]


PLAIN = run(NO_DROPOUT, ASYNC, ["--train-iters", "100000"], ["--pipeline-model-parallel-size", "2"])


def test_a_loss_that_is_not_a_number_ends_the_job() -> None:
    """Megatron's check names rank and iteration; torchrun ends the other ranks."""
    arguments = [*PLAIN, *SGD, *UNTIED, "--lr", "1e30", "--min-lr", "1e30", "--clip-grad", "0"]
    done = torchrun(2, "scripts/pretrain_gpt.py", *arguments, timeout=120)
    assert done.returncode != 0
    assert re.search(r"RuntimeError: Rank 1, .*(NaN|Inf) in the loss of a microbatch: lower --lr", done.stdout)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_takes_the_others_along(victim: int, tmp_path: Path) -> None:
    """Without a launcher that would end them: the messages in flight fail, and that is an error, not a hang."""
    port = free_port()
    ranks = []
    logs = [tmp_path / f"rank{rank}" for rank in (0, 1)]
    for rank in (0, 1):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)},
        }
        command = [sys.executable, "scripts/pretrain_gpt.py", *PLAIN, *ADAM, "--distributed-timeout-minutes", "1"]
        with logs[rank].open("w") as log:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + 120
        while " iteration       10/" not in logs[1].read_text():
            assert time.monotonic() < deadline, logs[0].read_text()[-2000:] + logs[1].read_text()[-2000:]
            assert all(rank.poll() is None for rank in ranks), logs[1].read_text()[-2000:]
            time.sleep(0.2)
        ranks[victim].send_signal(signal.SIGKILL)
        assert ranks[1 - victim].wait(timeout=90) != 0
        assert "Error" in logs[1 - victim].read_text()
    finally:
        for rank in ranks:
            rank.kill()
