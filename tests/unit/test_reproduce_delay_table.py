"""scripts/reproduce_delay_table.py without training: study files, what runs when, the arithmetic and the report."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import reproduce_delay_table  # noqa: E402
from delay_study import plan, report, results, runner, store  # noqa: E402
from delay_study.plan import Run, Study, StudyError, load  # noqa: E402
from delay_study.runner import Runner, Scheduler, command_line, tuned_learning_rate  # noqa: E402
from delay_study.store import DIVERGED, DONE, FAILED, Outcome, Store  # noqa: E402

MINIMAL: dict[str, Any] = {
    "data": {"path": "data/corpus"},
    "common": "--train-iters 10 --eval-interval 5 --eval-iters 2",
    "optimizers": {"adamw": {"flags": "--optimizer adam", "learning_rates": [2e-3, "1e-3", 4e-3]}},
    "arms": {"sync": None, "async": "--delay", "async-ef": "--delay --ef"},
    "recovery": {"async-ef": "async"},
    "seeds": [1, 2],
}


def write(tmp_path: Path, **changes: Any) -> Path:
    content = {**MINIMAL, **changes}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v != "absent"}, sort_keys=False))
    return path


def make(tmp_path: Path, **changes: Any) -> tuple[Study, Store]:
    study = load(write(tmp_path, **changes))
    return study, Store(tmp_path / "out", study.environment)


def keep(place: Store, run: Run, loss: float | None, *, z: float | None = None, status: str = DONE) -> None:
    """Leave behind what a run of this loss leaves behind."""
    place.begin(run)
    place.log(run).write_text("")
    outcome = {"status": status, "flags": list(run.flags), "environment": {}, "seconds": 3.0, "training": [[10, 1.5]]}
    outcome |= {"validation_loss": loss, "validation_loss_z": z, "seconds_per_iteration": 0.02}
    outcome["validation"] = [[10, loss if loss is not None else math.nan]]
    (place.folder(run) / "outcome.json").write_text(json.dumps(outcome))


# Study files


@pytest.mark.parametrize("path", sorted((SCRIPTS / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_studies_of_the_repository(path: Path) -> None:
    study = load(path)
    assert study.baseline == "sync"
    assert study.data.prepare, "the data set is built where it is missing"
    known = set()
    for group in study.groups():
        runs = [*study.tuning_runs(group), *study.arm_runs(group, group.learning_rates[0])]
        for run in set(runs):
            assert run.name not in known, "two runs would write to one folder"
            known.add(run.name)
            assert plan.flag_value(run.flags, "--seed") == str(run.seed)
            asynchronous = plan.flag_value(run.flags, "--pipeline-schedule") != "1f1b"
            assert asynchronous == (run.arm != "sync")


def test_table_has_what_the_issue_asks_for() -> None:
    study = load(SCRIPTS / "studies" / "delay_table.yaml")
    assert [o.name for o in study.optimizers] == ["adamw", "muon", "normuon", "soap", "lion", "adan", "mars"]
    assert list(study.arms) == ["sync", "async", "async-ef"]
    assert "--async-error-feedback" not in study.arms["async"]
    assert set(study.arms["async"]) < set(study.arms["async-ef"])
    assert len(study.seeds) >= 3
    assert int(plan.flag_value(study.common, "--train-iters") or 0) >= 1000


def test_learning_rates_written_without_a_point_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-3 as text."""
    study, _ = make(tmp_path)
    assert study.optimizers[0].learning_rates == (1e-3, 2e-3, 4e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": "absent"}, "no key 'seeds'"),
        ({"seed": [1]}, "unknown key 'seed'; known: .*seeds"),
        ({"seeds": [1, 1]}, "seeds: must be a list of different whole numbers"),
        ({"seeds": [True]}, "seeds: must be a list"),
        ({"common": "--eval-interval 5 --eval-iters 2"}, "no --train-iters"),
        ({"common": ["--train-iters"]}, "common: must be flags in one text"),
        ({"common": f"{MINIMAL['common']} --lr 1e-3"}, "common: --lr is set by the harness; .* learning_rates"),
        ({"arms": {"sync": "--seed=3"}}, "arms.sync: --seed=3 is set by the harness; .* seeds"),
        ({"arms": {}}, "arms: must be a mapping with at least one name"),
        ({"arms": {"a/b": ""}}, "the name 'a/b' becomes a folder"),
        ({"optimizers": {"o": {"flags": "", "learning_rates": [1]}}}, "optimizers.o.flags: no --optimizer"),
        ({"optimizers": {"o": {"flags": "--optimizer o"}}}, "optimizers.o: no key 'learning_rates'"),
        ({"optimizers": {"o": {"flags": "--optimizer o", "learning_rates": [0.0]}}}, "different positive numbers"),
        ({"optimizers": {"o": {"flags": "--optimizer o", "learning_rates": ["x"]}}}, "different positive numbers"),
        ({"recovery": {"ef": "async"}}, "recovery: ef: async: both must be arms; arms are sync, async, async-ef"),
        ({"tune": "yes"}, "tune: must be true or false"),
        ({"min_lr_ratio": 2}, "min_lr_ratio: must be a number from 0 to 1"),
        ({"sweep": {"axis": "b", "points": {"1": {"sgd": ""}}}}, "sweep.points.1: unknown key 'sgd'; known: adamw"),
        ({"environment": ["A=1"]}, "environment: must be a mapping"),
    ],
)
def test_errors_of_a_study_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=message) as error:
        load(write(tmp_path, **changes))
    assert "study.yaml: " in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"no\.yaml: cannot be read"):
        load(tmp_path / "no.yaml")
    (tmp_path / "broken.yaml").write_text("arms: [")
    with pytest.raises(StudyError, match=r"broken\.yaml: not YAML"):
        load(tmp_path / "broken.yaml")


def test_a_study_that_differs_from_its_base(tmp_path: Path) -> None:
    write(tmp_path)
    child = tmp_path / "child.yaml"
    child.write_text("base: study.yaml\nflags: --train-iters 20\noptimizers: {adamw: {learning_rates: [1.0]}}\n")
    study = load(child)
    assert study.name == "child"
    assert study.optimizers[0].flags == ("--optimizer", "adam")
    (group,) = study.groups()
    assert study.tuning_runs(group) == [], "one learning rate: nothing to choose"
    assert study.run(group, "sync", 1.0, 1).iterations == 20, "the last flag counts, as in argparse"
    child.write_text("base: study.yaml\ncommon: --train-iters 3\n")
    with pytest.raises(StudyError, match="common: this study takes it from its base"):
        load(child)


# What runs when


def test_arms_differ_in_their_own_flags_only(tmp_path: Path) -> None:
    study, _ = make(tmp_path)
    (group,) = study.groups()
    sync, delayed, corrected = (study.run(group, arm, 1e-3, 1).flags for arm in study.arms)
    assert [flag for flag in delayed if flag != "--delay"] == list(sync)
    assert [flag for flag in corrected if flag not in ("--delay", "--ef")] == list(sync)
    assert plan.flag_value(sync, "--lr") == "0.001"
    assert plan.flag_value(sync, "--min-lr") == "0.0001"


def test_learning_rate_is_chosen_on_synchronous_runs_then_kept(tmp_path: Path) -> None:
    study, place = make(tmp_path)
    scheduler = Scheduler(study, place)
    (group,) = study.groups()
    runs, later = scheduler.runs()
    assert [(run.arm, run.seed, run.learning_rate) for run in runs] == [("sync", 1, r) for r in (1e-3, 2e-3, 4e-3)]
    assert len(runs) + later == 3 + 3 * 2 - 1, "the best synchronous run is not run twice"
    for run, loss in zip(runs, (2.0, 1.5, 1.7), strict=True):
        assert tuned_learning_rate(study, place, group) is None
        keep(place, run, loss)
    runs, later = scheduler.runs()
    assert later == 0
    assert len(runs) == 8
    assert {run.learning_rate for run in runs[3:]} == {2e-3}
    assert [(run.seed, run.arm) for run in runs[3:]] == [
        (1, "async"), (1, "async-ef"), (2, "sync"), (2, "async"), (2, "async-ef"),
    ]  # fmt: skip


def test_a_diverged_learning_rate_is_not_chosen(tmp_path: Path) -> None:
    study, place = make(tmp_path)
    (group,) = study.groups()
    low, middle, high = study.tuning_runs(group)
    keep(place, low, 2.0)
    keep(place, middle, 1.9)
    keep(place, high, None, status=DIVERGED)
    assert tuned_learning_rate(study, place, group) == 2e-3
    for run in (low, middle):
        keep(place, run, None, status=DIVERGED)
        place = Store(place.directory, {})
    assert tuned_learning_rate(study, place, group) is None
    runs, later = Scheduler(study, place).runs()
    assert (len(runs), later) == (3, 0), "no arm runs without a learning rate, and none is waited for"
    assert "no learning rate gave a loss" in report.warnings(study, results.rows(study, place))[0]


def test_sweeps_choose_at_every_point(tmp_path: Path) -> None:
    sweep = {"axis": "momentum", "points": {"0.5": {"adamw": "--adam-beta1 0.5"}, "0.9": "--adam-beta1 0.9"}}
    study, _ = make(tmp_path, sweep=sweep)
    assert [group.name for group in study.groups()] == ["adamw/0.5", "adamw/0.9"]
    assert [plan.flag_value(group.flags, "--adam-beta1") for group in study.groups()] == ["0.5", "0.9"]
    assert all(len(study.tuning_runs(group)) == 3 for group in study.groups())


def test_without_tuning_every_learning_rate_is_a_point(tmp_path: Path) -> None:
    study, place = make(tmp_path, tune=False)
    assert [group.name for group in study.groups()] == ["adamw/lr=0.001", "adamw/lr=0.002", "adamw/lr=0.004"]
    runs, later = Scheduler(study, place).runs()
    assert (len(runs), later) == (3 * 3 * 2, 0)


@pytest.mark.parametrize(
    ("pattern", "count"), [("adamw", 3 + 5), ("adamw/async", 3 + 2), ("*/2", 3 + 3), ("adamw/async/1", 3 + 1)]
)
def test_only_takes_what_it_names_and_what_that_needs(pattern: str, count: int, tmp_path: Path) -> None:
    study, place = make(tmp_path)
    runs, later = Scheduler(study, place, [pattern]).runs()
    assert len(runs) + later == count


def test_only_that_names_nothing(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="--only sgd: no run is called so"):
        Scheduler(*make(tmp_path), ["sgd"])


def test_a_run_counts_while_its_flags_do(tmp_path: Path) -> None:
    study, place = make(tmp_path)
    run = study.tuning_runs(study.groups()[0])[0]
    keep(place, run, 1.0)
    assert place.is_finished(run)
    changed, _ = make(tmp_path, common=f"{MINIMAL['common']} --num-layers 3")
    other = changed.tuning_runs(changed.groups()[0])[0]
    assert other.name == run.name
    assert not Store(place.directory, {}).is_finished(other), "another command line is another run"
    assert not Store(place.directory, {"TORCHDYNAMO_DISABLE": "1"}).is_finished(run), "so is another environment"
    keep(place, run, None, status=DIVERGED)
    assert place.is_finished(run), "that it diverged is a result"
    keep(place, run, None, status=FAILED)
    assert not place.is_finished(run)


# What a run leaves behind


def write_events(folder: Path, *, last: float, z: float | None = None, iterations: int = 10) -> None:
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for iteration in range(1, iterations + 1):
            writer.add_scalar("lm loss", 3.0 - iteration / 10, iteration)
        for loss in (last - 0.1, last + 0.1):  # at the end of training, Megatron evaluates twice
            writer.add_scalar("lm loss validation", loss, iterations)
            if z is not None:
                writer.add_scalar("lm loss z validation", loss - last + z, iterations)


@pytest.mark.parametrize(
    ("events", "log", "exit_code", "status", "message"),
    [
        ({"last": 2.0, "z": 2.5}, "", 0, DONE, ""),
        ({"last": math.nan}, "", 0, DIVERGED, ""),
        ({"last": 2.0, "iterations": 8}, "NaN in the loss of a microbatch", 1, DIVERGED, ""),
        ({"last": 2.0, "iterations": 8}, "found NaN in local grad norm", 1, DIVERGED, ""),
        ({"last": 2.0, "iterations": 8}, "number of nan iterations:   0 | Out of memory", 1, FAILED, "exit code 1"),
        ({"last": 2.0}, "", -9, FAILED, "signal 9"),
        ({"last": 2.0, "iterations": 8}, "", 0, FAILED, "without a validation loss at its last iteration, 10"),
    ],
)
def test_how_a_run_ended(
    events: dict[str, Any], log: str, exit_code: int, status: str, message: str, tmp_path: Path
) -> None:
    study, place = make(tmp_path)
    run = study.tuning_runs(study.groups()[0])[0]
    place.begin(run)
    place.log(run).write_text(log)
    write_events(place.folder(run), **events)
    outcome = place.end(run, exit_code=exit_code, seconds=1.5)
    assert outcome.status == status
    assert message in outcome.message
    if status == DONE:
        assert outcome.validation_loss == pytest.approx(2.0, abs=1e-5), "both evaluations"
        assert outcome.validation_loss_z == pytest.approx(2.5, abs=1e-5)
        assert outcome.training_loss == pytest.approx(statistics.fmean(3.0 - i / 10 for i in range(1, 11)))
    else:
        assert outcome.validation_loss is None
    again = Store(place.directory, study.environment).outcome(run)
    assert again is not None
    assert again.status == status


# What the runs say


def fill(study: Study, place: Store, losses: dict[str, list[float | None]], z: list[float] | None = None) -> None:
    """Tuning chooses 2e-3; then the losses of every arm, seed by seed; None: diverged."""
    (group,) = study.groups()
    for run, loss in zip(study.tuning_runs(group), (2.5, losses["sync"][0], 2.4), strict=True):
        keep(place, run, loss)
    for run in study.arm_runs(group, 2e-3):
        loss = losses[run.arm][run.seed - 1]
        plain = z[run.seed - 1] if z and run.arm == "async-ef" else None
        keep(place, run, loss, z=plain, status=DIVERGED if loss is None else DONE)


def test_gaps_are_paired_by_seed(tmp_path: Path) -> None:
    study, place = make(tmp_path)
    fill(study, place, {"sync": [1.0, 2.0], "async": [1.4, 2.42], "async-ef": [1.1, 2.14]}, z=[1.2, 2.2])
    (row,) = results.rows(study, place)
    assert row.learning_rate == 2e-3
    assert not row.at_end
    arms = {arm.name: arm for arm in row.arms}
    assert list(arms) == ["sync", "async", "async-ef", "async-ef z"]
    gap = arms["async"].gap
    assert gap is not None
    assert gap.values == {1: pytest.approx(0.4), 2: pytest.approx(0.42)}
    assert gap.mean == pytest.approx(0.41)
    assert gap.deviation == pytest.approx(statistics.stdev([0.4, 0.42])), "of the differences, not of the losses"
    assert arms["async"].loss is not None
    assert arms["async"].loss.deviation == pytest.approx(statistics.stdev([1.4, 2.42]))
    assert arms["async-ef"].recovered == pytest.approx(100 * (1 - 0.24 / 0.82))
    assert arms["async-ef z"].recovered == pytest.approx(100 * (1 - 0.40 / 0.82))
    assert arms["sync"].gap is None
    assert arms["async"].recovered is None


def test_noise_is_not_recovered(tmp_path: Path) -> None:
    study, place = make(tmp_path)
    fill(study, place, {"sync": [1.0, 2.0], "async": [1.05, 1.98], "async-ef": [1.1, 2.1]})
    (row,) = results.rows(study, place)
    arm = row.arm("async-ef")
    assert arm is not None
    assert arm.gap is not None
    assert arm.recovered is None, "the gap to close is within its own noise"


def test_report_of_a_diverged_arm(tmp_path: Path) -> None:
    study, place = make(tmp_path)
    fill(study, place, {"sync": [1.0, 2.0], "async": [None, None], "async-ef": [1.1, None]})
    found = results.rows(study, place)
    text = report.markdown(study, found, place)
    losses = next(line for line in text.splitlines() if line.startswith("| adamw") and "0.002" in line)
    cells = [cell.strip() for cell in losses.strip("|").split("|")]
    assert cells[2:] == ["1.5000 ± 0.7071", "diverged", "1.1000 (1 of 2 diverged)"]
    content = report.content(study, found, place)
    json.dumps(content, allow_nan=False)
    statuses = [run["status"] for run in content["runs"] if run["arm"] == "async"]
    assert statuses == [DIVERGED, DIVERGED]
    assert content["rows"][0]["arms"]["async-ef"]["gap"]["values"] == {1: pytest.approx(0.1)}


def test_report_of_a_study_under_way(tmp_path: Path) -> None:
    study, place = make(tmp_path)
    text = report.markdown(study, results.rows(study, place), place)
    assert "8 runs are still to come" in text
    keep(place, study.tuning_runs(study.groups()[0])[0], 2.25)
    text = report.markdown(study, results.rows(study, place), place)
    assert "7 runs are still to come" in text
    assert "0.001: 2.2500, 0.002: …" in text


@pytest.mark.parametrize(("losses", "end"), [((1.0, 2.0, 3.0), "lowest"), ((3.0, 2.0, 1.0), "highest")])
def test_best_learning_rate_at_an_end_of_its_grid(losses: tuple[float, ...], end: str, tmp_path: Path) -> None:
    study, place = make(tmp_path)
    for run, loss in zip(study.tuning_runs(study.groups()[0]), losses, strict=True):
        keep(place, run, loss)
    (line,) = report.warnings(study, results.rows(study, place))
    assert f"is the {end} of its grid; extend optimizers.adamw.learning_rates" in line


@pytest.mark.parametrize("tune", [True, False], ids=["bars", "lines"])
def test_pictures(tune: bool, tmp_path: Path) -> None:
    from matplotlib import image

    study, place = make(tmp_path, tune=tune)
    for group in study.groups():
        for run in [*study.tuning_runs(group), *study.arm_runs(group, 2e-3 if tune else group.learning_rates[0])]:
            keep(place, run, 1.0 + 0.1 * len(run.arm) + 0.01 * run.seed * len(run.arm) + abs(run.learning_rate - 2e-3))
    reproduce_delay_table.write_report(study, place)
    for name in ("gaps.png", "losses.png"):
        pixels = image.imread(str(place.directory / name))
        assert min(pixels.shape[:2]) > 400
        assert pixels[..., :3].std() > 0.05, "not blank"


# Processes


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces training by a Python program, which gets name and folder of its run; losses come from loss.json."""

    def read(outcome: Outcome, folder: Path) -> None:
        if (folder / "loss.json").is_file():
            outcome.validation = [tuple(json.loads((folder / "loss.json").read_text()))]

    def install(program: str) -> None:
        text = f"import json, os, sys, time\nname, folder = sys.argv[1:]\n{program}\n"

        def command(study: Study, place: Store, run: Run, **_: Any) -> list[str]:
            return [sys.executable, "-S", "-c", text, run.name, str(place.folder(run))]

        monkeypatch.setattr(runner, "command_line", command)
        monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)
        monkeypatch.setattr(store, "_read_losses", read)

    return install


def go(study: Study, place: Store, *, jobs: int = 2) -> tuple[list[str], list[str]]:
    """Failed runs and lines said."""
    said: list[str] = []
    work = Runner(study, place, Scheduler(study, place), jobs=jobs, wandb=False, say=said.append)
    return [run.name for run, _ in work.run()], said


LOSS = "json.dump([10, 2.0], open(folder + '/loss.json', 'w'))"


def test_a_failing_run_is_shown_and_the_others_go_on(stubs: Callable[[str], None], tmp_path: Path) -> None:
    study, place = make(tmp_path)
    stubs(f"print('what went wrong') or sys.exit(3) if '/async/' in name else {LOSS}")
    failed, said = go(study, place)
    assert [name.split("/")[2:] for name in failed] == [["async", "seed-1"], ["async", "seed-2"]]
    assert len(said) == 8
    (line,) = [line for line in said if "async/seed-1" in line]
    assert "failed (exit code 3)" in line
    assert "    what went wrong" in line
    stubs(LOSS)
    failed, said = go(study, Store(place.directory, {}))
    assert failed == []
    assert len(said) == 2, "only what had failed runs again"
    assert go(study, Store(place.directory, {})) == ([], [])


def test_runs_go_in_parallel_with_one_thread_and_a_port_of_their_own(
    stubs: Callable[[str], None], tmp_path: Path
) -> None:
    study, place = make(tmp_path, environment={"OWN": 5})
    tuning = study.tuning_runs(study.groups()[0])
    keys = ("MASTER_PORT", "OMP_NUM_THREADS", "WORLD_SIZE", "WANDB_MODE", "WANDB_RUN_GROUP", "OWN")
    together = [str(place.folder(run) / "seen.json") for run in tuning]
    stubs(
        f"json.dump([os.environ[key] for key in {keys}], open(folder + '/seen.json', 'w'))\n"
        f"deadline = time.monotonic() + 30\n"
        f"while not all(map(os.path.exists, {together})): time.monotonic() < deadline or sys.exit(4)\n{LOSS}"
    )
    failed, _ = go(study, place, jobs=len(tuning))
    assert failed == [], "each waited for the others to start"
    seen = [json.loads(Path(file).read_text()) for file in together]
    assert len({port for port, *_ in seen}) == len(tuning)
    assert {tuple(rest) for _, *rest in seen} == {("1", "1", "offline", "study", "5")}


def test_two_runs_at_a_time_have_two_caches(tmp_path: Path) -> None:
    study, place = make(tmp_path)
    run = study.tuning_runs(study.groups()[0])[0]
    caches = {
        plan.flag_value(command_line(study, place, run, wandb=False, slot=s), "--data-cache-path") for s in (0, 1)
    }
    assert len(caches) == 2
    assert "--wandb-project" not in command_line(study, place, run, wandb=False)
    assert "--wandb-project" in command_line(study, place, run, wandb=True)


def test_interruption_ends_the_runs_and_resuming_starts_them_anew(stubs: Callable[[str], None], tmp_path: Path) -> None:
    study, place = make(tmp_path)
    stubs(
        "open(folder + '/pid', 'w').write(str(os.getpid()))\n"
        f"open({str(tmp_path / 'ready')!r} + str(os.getpid()), 'w').close()\ntime.sleep(60)"
    )

    def interrupt_when_two_run() -> None:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt_when_two_run)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        go(study, place)
    thread.join()
    assert time.monotonic() - start < 40, "not the 60 s of the runs"
    begun = [run for run in study.tuning_runs(study.groups()[0]) if (place.folder(run) / "pid").exists()]
    assert len(begun) == 2
    for run in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(int((place.folder(run) / "pid").read_text()), 0)
        assert place.outcome(run) is None
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    stubs(LOSS)
    failed, said = go(study, Store(place.directory, {}))
    assert (failed, len(said)) == ([], 8)
    assert not (place.folder(begun[0]) / "pid").exists(), "from scratch"


# Command line


def test_dry_run_prints_command_lines_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert reproduce_delay_table.main([str(path), "--dry-run", "--output", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert output.count("scripts/pretrain_gpt.py") == 3
    assert "and 5 runs with the learning rates that these lead to" in output
    assert not (tmp_path / "out").exists()


def test_missing_data_without_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, data={"path": "no/such"})
    assert reproduce_delay_table.main([str(path), "--output", str(tmp_path / "out")]) == 2
    assert "build it with scripts/prepare_data.py, or add data.prepare" in capsys.readouterr().err


def test_a_study_runs_once_at_a_time(tmp_path: Path) -> None:
    with (
        reproduce_delay_table.locked(tmp_path),
        pytest.raises(StudyError, match="this study is running; --report"),
        reproduce_delay_table.locked(tmp_path),
    ):
        pass


def test_help_names_the_flags() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / "reproduce_delay_table.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for flag in ("--jobs", "--only", "--dry-run", "--report", "--no-wandb"):
        assert flag in result.stdout
