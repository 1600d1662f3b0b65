"""The plan of a study: what one YAML file asks for, checked, and the training runs that it comes to."""

from __future__ import annotations

import fnmatch
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

OWN_FLAGS = (
    "--lr", "--min-lr", "--seed", "--data-path", "--data-cache-path", "--tensorboard-dir",
    "--wandb-project", "--wandb-exp-name", "--wandb-save-dir",
)  # fmt: skip
"""Flags that the harness gives itself."""

REQUIRED_FLAGS = ("--train-iters", "--eval-iters", "--eval-interval")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+-]*")


class StudyError(Exception):
    """The study file or the command line asks for something that cannot be done; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer of a study.

    Attributes:
        name: Row of the table.
        flags: Its flags, ``--optimizer`` among them.
        learning_rates: Ascending; several of them are tuned over, or each is run.
    """

    name: str
    flags: tuple[str, ...]
    learning_rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that share a learning rate: one optimizer at one point of the sweep.

    Attributes:
        optimizer: Whose runs these are.
        point: Point of the sweep; "" without a sweep.
        flags: Flags of the optimizer and of the point.
        learning_rates: What to tune over; a single one is taken as it is.
    """

    optimizer: str
    point: str
    flags: tuple[str, ...]
    learning_rates: tuple[float, ...]

    @property
    def name(self) -> str:
        """Optimizer and point."""
        return f"{self.optimizer}/{self.point}" if self.point else self.optimizer


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        group: Optimizer and point of the sweep.
        arm: Name of the arm, such as sync or async.
        learning_rate: Peak.
        seed: Of the weights and of the order of the data.
        flags: All flags but where to write.
        iterations: Length of a complete run.
    """

    group: Group
    arm: str
    learning_rate: float
    seed: int
    flags: tuple[str, ...]
    iterations: int

    @property
    def name(self) -> str:
        """Path of the run's directory below that of the study, and its label in the log."""
        return f"{self.group.name}/lr-{self.learning_rate:g}/{self.arm}/seed-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data of a study.

    Attributes:
        path: Prefix of a built data set, relative to the repository.
        prepare: Command line, without the interpreter, that builds it; empty: it must be there.
    """

    path: str
    prepare: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as its file describes it.

    Attributes:
        name: Of the output folder and of the wandb group.
        title: Above table and pictures.
        data: What is trained on.
        common: Flags of every run.
        environment: Environment variables of every run.
        optimizers: In the order of the table.
        arms: Name to flags; the first is the baseline that learning rates are tuned on.
        recovery: Arm to the arm whose gap it is to close.
        seeds: Of every arm; learning rates are tuned on the first.
        tune: False: every learning rate is run in every arm, and none is chosen.
        min_lr_ratio: Final learning rate over the peak.
        axis: What the points of the sweep change; "" without a sweep.
        points: Point of the sweep to the flags it gives each optimizer.
    """

    name: str
    title: str
    data: Data
    common: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    optimizers: tuple[Optimizer, ...]
    arms: dict[str, tuple[str, ...]]
    recovery: dict[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...]
    tune: bool = True
    min_lr_ratio: float = 0.1
    axis: str = ""
    points: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """The arm that gaps are measured from."""
        return next(iter(self.arms))

    def groups(self) -> list[Group]:
        """Every optimizer at every point of the sweep."""
        found = []
        for optimizer in self.optimizers:
            for point, flags in (self.points or {"": {optimizer.name: ()}}).items():
                if optimizer.name not in flags:
                    continue
                own = (*optimizer.flags, *flags[optimizer.name])
                rates = [optimizer.learning_rates] if self.tune else [(rate,) for rate in optimizer.learning_rates]
                for some in rates:
                    label = point if self.tune else "-".join(filter(None, (point, f"lr={some[0]:g}")))
                    found.append(Group(optimizer=optimizer.name, point=label, flags=own, learning_rates=some))
        return found

    def run(self, group: Group, arm: str, learning_rate: float, seed: int) -> Run:
        """The run of one arm with one learning rate and one seed."""
        flags = (
            *self.common, *group.flags, *self.arms[arm],
            "--lr", f"{learning_rate:g}", "--min-lr", f"{learning_rate * self.min_lr_ratio:g}", "--seed", str(seed),
        )  # fmt: skip
        return Run(
            group=group,
            arm=arm,
            learning_rate=learning_rate,
            seed=seed,
            flags=flags,
            iterations=int(flag_value(flags, "--train-iters") or 0),
        )

    def tuning_runs(self, group: Group) -> list[Run]:
        """Runs that a learning rate is chosen by: synchronous, first seed; none where there is nothing to choose."""
        if len(group.learning_rates) == 1:
            return []
        return [self.run(group, self.baseline, rate, self.seeds[0]) for rate in group.learning_rates]

    def arm_runs(self, group: Group, learning_rate: float) -> list[Run]:
        """Runs of all arms and seeds, seed by seed."""
        return [self.run(group, arm, learning_rate, seed) for seed in self.seeds for arm in self.arms]


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """What the last ``name VALUE`` or ``name=VALUE`` says; None where there is none."""
    found = None
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        if flag == name:
            found = following
        elif flag.startswith(f"{name}="):
            found = flag.partition("=")[2]
    return found


def is_selected(run: Run, patterns: Iterable[str]) -> bool:
    """Whether ``--only`` asks for a run: OPTIMIZER[/POINT]/ARM/SEED or a beginning of it, * and ? as in a shell."""
    name = f"{run.group.name}/{run.arm}/{run.seed}"
    return any(fnmatch.fnmatchcase(name, form) for pattern in patterns for form in (pattern, f"{pattern}/*"))


def load(path: Path) -> Study:
    """Read and check a study file.

    Args:
        path: YAML file; docs/delay_study.md describes it.

    Raises:
        StudyError: With the key and the remedy.
    """
    content = _read_yaml(path)
    try:
        if isinstance(content, dict) and "base" in content:
            content = _with_base(content, path)
        return _Reader(path.stem).study(content)
    except StudyError as error:
        raise StudyError(f"{path}: {error}") from None


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise StudyError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def _with_base(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """A study that says only in what it differs from another: key by key, optimizer by optimizer."""
    base = _read_yaml(path.parent / str(content["base"]))
    if not isinstance(base, dict) or "base" in base:
        raise StudyError(f"base: {content['base']} must be a whole study, without a base of its own")
    if "common" in content:
        raise StudyError("common: this study takes it from its base; give what differs as flags")
    own = {key: value for key, value in content.items() if key not in ("base", "flags")}
    merged = {**base, **own}
    if isinstance(own.get("optimizers"), dict) and isinstance(base.get("optimizers"), dict):
        known = base["optimizers"]
        merged["optimizers"] = {
            name: {**known.get(name, {}), **(more or {})} for name, more in own["optimizers"].items()
        }
    if "flags" in content:
        merged["common"] = f"{base.get('common', '')} {content['flags'] or ''}"
    return merged


class _Reader:
    """Turns the content of a study file into a Study, and says which key is wrong."""

    def __init__(self, name: str) -> None:
        self._name = name

    def study(self, content: Any) -> Study:
        required = {"data", "common", "optimizers", "arms", "seeds"}
        optional = {"title", "environment", "recovery", "tune", "min_lr_ratio", "sweep"}
        keys = self._keys("", content, required, optional)
        optimizers = self._optimizers(keys["optimizers"])
        axis, points = self._sweep(keys.get("sweep"), [optimizer.name for optimizer in optimizers])
        study = Study(
            name=self._name,
            title=str(keys.get("title", self._name)),
            data=self._data(keys["data"]),
            common=self._flags("common", keys["common"]),
            environment={name: str(value) for name, value in self._map("environment", keys.get("environment")).items()},
            optimizers=optimizers,
            arms={name: self._flags(f"arms.{name}", flags) for name, flags in self._named("arms", keys["arms"])},
            recovery={name: str(of) for name, of in self._map("recovery", keys.get("recovery")).items()},
            seeds=tuple(self._numbers("seeds", keys["seeds"], int)),
            tune=self._bool("tune", keys.get("tune", True)),
            min_lr_ratio=self._ratio(keys.get("min_lr_ratio", 0.1)),
            axis=axis,
            points=points,
        )
        self._check(study)
        return study

    def _check(self, study: Study) -> None:
        for arm, other in study.recovery.items():
            if not {arm, other} <= set(study.arms):
                raise StudyError(f"recovery: {arm}: {other}: both must be arms; arms are {', '.join(study.arms)}")
        for group in study.groups():
            flags = (*study.common, *group.flags)
            for name in REQUIRED_FLAGS:
                if not re.fullmatch(r"[1-9]\d*", flag_value(flags, name) or ""):
                    raise StudyError(f"common: no {name} with a number of at least 1; add it")

    def _data(self, value: Any) -> Data:
        keys = self._keys("data", value, {"path"}, {"prepare"})
        prepare = keys.get("prepare") or ""
        return Data(path=str(keys["path"]), prepare=tuple(shlex.split(str(prepare))))

    def _optimizers(self, value: Any) -> tuple[Optimizer, ...]:
        found = []
        for name, content in self._named("optimizers", value):
            where = f"optimizers.{name}"
            keys = self._keys(where, content, {"flags", "learning_rates"}, set())
            rates = self._numbers(f"{where}.learning_rates", keys["learning_rates"], float)
            flags = self._flags(f"{where}.flags", keys["flags"])
            if flag_value(flags, "--optimizer") is None:
                raise StudyError(f"{where}.flags: no --optimizer; add it, e.g. --optimizer adam")
            found.append(Optimizer(name=name, flags=flags, learning_rates=tuple(sorted(rates))))
        return tuple(found)

    def _sweep(self, value: Any, optimizers: list[str]) -> tuple[str, dict[str, dict[str, tuple[str, ...]]]]:
        if value is None:
            return "", {}
        keys = self._keys("sweep", value, {"axis", "points"}, set())
        points = {}
        for point, content in self._named("sweep.points", keys["points"]):
            where = f"sweep.points.{point}"
            if not isinstance(content, dict):
                points[point] = dict.fromkeys(optimizers, self._flags(where, content))
                continue
            self._keys(where, content, set(), set(optimizers))
            points[point] = {name: self._flags(f"{where}.{name}", flags) for name, flags in content.items()}
        return str(keys["axis"]), points

    def _flags(self, where: str, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, str):
            raise StudyError(f"{where}: must be flags in one text, as on a command line, got {value!r}")
        flags = tuple(shlex.split(value, comments=True))
        for flag in flags:
            if flag.partition("=")[0] in OWN_FLAGS:
                raise StudyError(f"{where}: {flag} is set by the harness; take it out ({self._instead(flag)})")
        return flags

    @staticmethod
    def _instead(flag: str) -> str:
        instead = {"--lr": "learning_rates", "--min-lr": "min_lr_ratio", "--seed": "seeds", "--data-path": "data"}
        key = instead.get(flag.partition("=")[0])
        return f"the key {key} says it" if key else "it belongs to where results are written"

    @staticmethod
    def _keys(where: str, value: Any, required: set[str], optional: set[str]) -> dict[str, Any]:
        prefix = f"{where}: " if where else ""
        if not isinstance(value, dict):
            raise StudyError(f"{prefix}must be a mapping with the keys {', '.join(sorted(required | optional))}")
        for key in value:
            if key not in required | optional:
                known = ", ".join(sorted(required | optional))
                raise StudyError(f"{prefix}unknown key {key!r}; known: {known}")
        for key in sorted(required - set(value)):
            raise StudyError(f"{prefix}no key {key!r}; add it")
        return value

    @staticmethod
    def _map(where: str, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise StudyError(f"{where}: must be a mapping of names, got {value!r}")
        return value

    @staticmethod
    def _named(where: str, value: Any) -> list[tuple[str, Any]]:
        if not isinstance(value, dict) or not value:
            raise StudyError(f"{where}: must be a mapping with at least one name")
        named = [(str(name), content) for name, content in value.items()]
        for name, _ in named:
            if not NAME.fullmatch(name):
                raise StudyError(f"{where}: the name {name!r} becomes a folder; use letters, digits and any of _.=+-")
        return named

    @staticmethod
    def _numbers(where: str, value: Any, kind: type) -> list[Any]:
        """Distinct numbers; YAML 1.1 reads 1e-3 as text, which is meant as a number here."""
        try:
            numbers = [kind(item) for item in value if not isinstance(item, bool)] if isinstance(value, list) else []
        except (TypeError, ValueError):
            numbers = []
        fine = all(math.isfinite(number) and (number > 0 or kind is int) for number in numbers)
        if not numbers or not fine or len(set(numbers)) < len(value):
            what = "positive numbers" if kind is float else "whole numbers"
            raise StudyError(f"{where}: must be a list of different {what}, got {value!r}")
        return numbers

    @staticmethod
    def _bool(where: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise StudyError(f"{where}: must be true or false, got {value!r}")
        return value

    def _ratio(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise StudyError(f"min_lr_ratio: must be a number from 0 to 1, got {value!r}")
        return float(value)
