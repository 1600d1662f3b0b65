"""Runs the plugin's doors with invalid input, each time in a fork of this process as rank 0 and as rank 1 of two.

Megatron is imported once. What is refused is refused before anything is initialized, so the ranks need no rendezvous;
a case that gets further would hang or fail without the expected message, and the test would see that.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import megatron_async
from megatron_async import installation
from tests.distributed.bad_input_cases import CASES, Case

ROOT = Path(__file__).resolve().parents[2]


def attempt(case: Case) -> int:
    """Run the case in this process; its exit status."""
    if case.upstream_version is not None:
        megatron_async.uninstall()
        claimed = case.upstream_version
        installation.upstream_version = lambda: claimed
    sys.argv = [*case.door, *case.arguments]
    try:
        if case.door[0] == "-m":
            sys.argv = ["megatron_async", *case.door[2:], *case.arguments]
            runpy.run_module("megatron_async", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(ROOT / case.door[0]), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def in_a_fork(case: Case, rank: int) -> tuple[int, int]:
    """Start one rank; its process, and the pipe that its exit status and output come through."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            status = attempt(case)
        with os.fdopen(writing, "w") as pipe:
            json.dump({"status": status, "output": output.getvalue()[-4000:]}, pipe)
        os._exit(0)
    os.close(writing)
    return child, reading


def outcome(child: int, reading: int) -> dict[str, Any]:
    """What a rank found."""
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(answer)
    return result


def main(folder: Path) -> None:
    megatron_async.install()
    import megatron.training  # noqa: F401  (once, before the forks)

    found = {}
    for case in CASES:
        both = [in_a_fork(case, rank) for rank in (0, 1)]
        found[case.name] = [outcome(*rank) for rank in both]
    (folder / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
