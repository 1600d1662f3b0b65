"""scripts/plot_timeline.py, on traces whose fractions are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from megatron_async.observe.trace import Trace

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import plot_timeline

FORWARD, BACKWARD = 1_000_000, 2_000_000  # nanoseconds


class Ticks:
    """A clock that the hand-made runs move."""

    def __init__(self, now: int) -> None:
        self.now = now

    def mark(self) -> int:
        return self.now

    def resolve(self, marks: list[int]) -> list[int]:
        return list(marks)


def write_run(
    folder: Path,
    *,
    waits: tuple[int, ...] = (0, 0),
    norm: int = 0,
    gap: int = 0,
    batches: int = 4,
    ranks: dict[int, int] | None = None,
    origin: int = 0,
) -> None:
    """A run of two stages, two microbatches a batch.

    A batch takes 2 forwards of 1 ms, 2 backwards of 2 ms, a step of 1 ms around a wait of ``norm`` ms for the norm, one
    receive wait of ``waits[stage]`` ms, half a millisecond of sends, and ``gap`` ms of nothing.
    """
    for rank, stage in (ranks or {0: 0, 1: 1}).items():
        ticks = Ticks(7_000_000 + 500_000 * stage)
        trace = Trace(
            folder, rank=rank, stage=stage, first_step=1, steps=batches, device=torch.device("cpu"), clock=ticks
        )
        trace._origin = origin
        for batch in range(batches):
            for name, length, microbatch in (
                ("receive wait", waits[stage] * 1_000_000, 0),
                ("forward", FORWARD, 0),
                ("forward", FORWARD, 1),
                ("backward", BACKWARD, 0),
                ("send", 500_000, 0),
                ("backward", BACKWARD, 1),
            ):
                with trace.span(name, batch=batch, microbatch=microbatch, version=batch):
                    ticks.now += length
            with trace.span("step", batch=batch):
                ticks.now += 500_000
                with trace.span("norm wait", batch=batch):
                    ticks.now += norm * 1_000_000
                ticks.now += 500_000
            ticks.now += gap * 1_000_000
            trace.next_step()


def plot(*arguments: object) -> int:
    return plot_timeline.main([str(argument) for argument in arguments])


def rows(output: str) -> dict[str, list[float]]:
    """The percentages of the last table, by stage."""
    found: dict[str, list[float]] = {}
    for line in output.splitlines():
        label, _, rest = line.strip().partition(" ")
        if "%" in rest:
            found[label] = [float(value) for value in rest.replace("%", "").split()]
    return found


def test_fractions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", waits=(1, 3), norm=2, gap=1)
    assert plot(tmp_path / "run") == 0
    output = capsys.readouterr().out
    found = rows(output)
    # A batch of stage 0: 7 ms of work, waits of 1 and 2, sends of 0.5, 1 of nothing: 11.5 ms; stage 1: 13.5 ms.
    assert found["0"] == pytest.approx([60.87, 39.13, 8.70, 17.39, 4.35, 8.70], abs=0.006)
    assert found["1"] == pytest.approx([51.85, 48.15, 22.22, 14.81, 3.70, 7.41], abs=0.006)
    assert found["mean"] == pytest.approx([56.36, 43.64, 15.46, 16.10, 4.03, 8.05], abs=0.011)
    assert "from the end of batch 0 to the end of batch 3, 12.50 ms a batch" in output
    header = next(line for line in output.splitlines() if "busy" in line)
    assert " ".join(header.split()) == "stage busy bubble receive wait norm/reduction wait send other"


def test_no_bubble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, batches=2)
    assert plot(tmp_path) == 0
    assert rows(capsys.readouterr().out)["0"] == pytest.approx([93.33, 6.67, 0, 0, 6.67, 0], abs=0.006)


def test_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One above the other on one time scale: colours are where they should be."""
    write_run(tmp_path / "sync", waits=(6, 6), batches=2)
    write_run(tmp_path / "async", batches=2)
    picture = tmp_path / "out" / "both.png"
    assert plot(tmp_path / "sync", tmp_path / "async", "--output", picture, "--titles", "1F1B", "2bw-async") == 0
    assert f"wrote {picture}" in capsys.readouterr().out
    pixels = imread(picture)[:, :, :3]
    half = pixels.shape[0] // 2
    upper, lower = (
        {colour: int((abs(part - value).max(axis=2) < 0.01).sum()) for colour, value in COLOURS.items()}
        for part in (pixels[:half], pixels[half:])
    )
    for part in (upper, lower):
        assert min(part.values()) > 1000
        # Two backwards of 2 ms in each batch, a step of 1 ms in both.
        assert part["batch 0"] == pytest.approx(part["batch 1"], rel=0.1)
        assert part["batch 0"] == pytest.approx(2 * part["step"], rel=0.15)
    # The same time has the same width.
    assert lower["batch 0"] == pytest.approx(upper["batch 0"], rel=0.05)


COLOURS = {
    "batch 0": [0x48 / 255, 0x78 / 255, 0xA8 / 255],
    "batch 1": [0xD9 / 255, 0x8B / 255, 0x3A / 255],
    "step": [0x30 / 255] * 3,
}


def test_default_output(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert plot(tmp_path) == 0
    assert (tmp_path / "timeline.png").stat().st_size > 5000


def test_batches_and_edges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, norm=3)
    assert plot(tmp_path, "--batches", 1, 2, "--start", 0.001, "--end", 0.005) == 0
    assert "from the end of batch 1 to the end of batch 2, 10.50 ms a batch" in capsys.readouterr().out
    assert plot(tmp_path, "--start", 2, "--end", 1) == 2
    assert "--end 1.0 must be after --start 2.0" in capsys.readouterr().err


def test_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, ranks={0: 0, 2: 1})
    write_run(tmp_path, ranks={1: 0, 3: 1}, gap=5)
    for replica, batch in ((0, "7.50 ms"), (1, "12.50 ms")):
        assert plot(tmp_path, "--replica", replica) == 0
        assert f"{batch} a batch" in capsys.readouterr().out
    assert plot(tmp_path, "--replica", 2) == 2
    assert "has 2 rank(s) of a stage, there is no replica 2" in capsys.readouterr().err


def test_a_stage_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    (tmp_path / "trace-rank-00000.json").unlink()
    assert plot(tmp_path) == 0
    assert "no trace of stage 0" in capsys.readouterr().out


def no_folder(folder: Path) -> None:
    folder.rmdir()


def file_in_place_of_folder(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("")


def empty(folder: Path) -> None:
    pass


def foreign_files(folder: Path) -> None:
    (folder / "notes.txt").write_text("")


def foreign_trace(folder: Path) -> None:
    (folder / "trace-rank-00000.json").write_text(json.dumps({"traceEvents": []}))


def a_list(folder: Path) -> None:
    (folder / "trace-rank-00000.json").write_text("[]")


def cut_off(folder: Path) -> None:
    write_run(folder)
    path = folder / "trace-rank-00001.json"
    path.write_text(path.read_text()[:300])


def not_text(folder: Path) -> None:
    (folder / "trace-rank-00000.json").write_bytes(b"\xff\xfe\x00")


def change_event(folder: Path, **values: Any) -> None:
    write_run(folder)
    path = folder / "trace-rank-00001.json"
    content = json.loads(path.read_text())
    content["traceEvents"][-1].update(values)
    path.write_text(json.dumps(content))


def damaged_event(folder: Path) -> None:
    change_event(folder, ts="soon")


def unknown_name(folder: Path) -> None:
    change_event(folder, name="lunch")


def two_runs(folder: Path) -> None:
    write_run(folder, ranks={0: 0, 1: 1})
    write_run(folder, ranks={2: 0, 3: 1}, origin=99)


def one_batch(folder: Path) -> None:
    write_run(folder, batches=1)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (no_folder, "is not a folder"),
        (file_in_place_of_folder, "is not a folder"),
        (empty, "holds no trace-rank-*.json; train with --async-trace"),
        (foreign_files, "holds no trace-rank-*.json"),
        (foreign_trace, "trace-rank-00000.json was not written by --async-trace"),
        (a_list, "was not written by --async-trace"),
        (cut_off, "trace-rank-00001.json cannot be read"),
        (not_text, "trace-rank-00000.json cannot be read"),
        (damaged_event, "trace-rank-00001.json was not written by --async-trace"),
        (unknown_name, "unknown names: lunch"),
        (two_runs, "holds traces of 2 runs; trace into an empty folder"),
        (one_batch, "--async-trace-steps 2 or more"),
    ],
)
def test_bad_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Any, message: str) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    prepare(folder)
    output = tmp_path / "picture.png"
    assert plot(folder, "--output", output) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("plot_timeline.py: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize("batches", [(0, 9), (2, 2), (2, 1)])
def test_bad_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str], batches: tuple[int, int]) -> None:
    write_run(tmp_path)
    assert plot(tmp_path, "--batches", *batches) == 2
    assert "holds the whole batches 0 to 3" in capsys.readouterr().err


def test_bad_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    for name in ("picture.docx", "trace-rank-00000.json/picture.png"):
        assert plot(tmp_path, "--output", tmp_path / name) == 2
        assert f"{name} cannot be written" in capsys.readouterr().err


def test_bad_titles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plot(tmp_path, "--titles", "a", "b")
    assert "--titles needs 1 titles" in capsys.readouterr().err
