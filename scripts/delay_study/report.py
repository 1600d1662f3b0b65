"""A study as Markdown and as JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from delay_study.plan import Study
from delay_study.results import Arm, Row, Spread
from delay_study.store import DIVERGED, FAILED, Store

NONE = "–"


def markdown(study: Study, found: list[Row], store: Store) -> str:
    """The report: losses, gaps, learning rates, time, and what is missing or failed."""
    parts = [f"# {study.title}", _state(study, found, store)]
    parts += ["## Validation loss", _losses(study, found)]
    if len(study.arms) > 1:
        parts += [f"## Gap to {study.baseline}", _gaps(study, found), _legend(study)]
    if any(row.group.learning_rates[1:] for row in found):
        parts += [f"## Learning rates (validation loss of {study.baseline}, seed {study.seeds[0]})", _tuning(found)]
    parts += ["## Milliseconds per update", _times(study, found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def warnings(study: Study, found: list[Row]) -> list[str]:
    """What a reader of the numbers must know first."""
    lines = []
    for row in found:
        if row.at_end and row.learning_rate is not None:
            end = "lowest" if row.learning_rate == min(row.group.learning_rates) else "highest"
            lines.append(
                f"{row.group.name}: the best learning rate, {row.learning_rate:g}, is the {end} of its grid; extend "
                f"optimizers.{row.group.optimizer}.learning_rates"
            )
        if row.tuning and row.learning_rate is None and len(row.tuning) == len(row.group.learning_rates):
            lines.append(f"{row.group.name}: no learning rate gave a loss; lower them")
    return lines


def content(study: Study, found: list[Row], store: Store) -> dict[str, Any]:
    """Everything the report is made of, for json.dumps: no value in it is NaN or infinite."""
    return {
        "study": study.name,
        "title": study.title,
        "baseline": study.baseline,
        "axis": study.axis,
        "arms": {name: " ".join(flags) for name, flags in study.arms.items()},
        "common": " ".join(study.common),
        "environment": study.environment,
        "seeds": list(study.seeds),
        "rows": [_json_row(row) for row in found],
        "runs": _json_runs(study, found, store),
        "warnings": warnings(study, found),
    }


def _json_row(row: Row) -> dict[str, Any]:
    arms = {}
    for arm in row.arms:
        values = {"loss": arm.loss, "gap": arm.gap}
        shown: dict[str, Any] = {key: asdict(value) if value else None for key, value in values.items()}
        arms[arm.name] = {**shown, "recovered_percent": arm.recovered, "diverged_seeds": arm.diverged}
    tuning = {f"{rate:g}": outcome.validation_loss for rate, outcome in row.tuning.items()}
    return {
        "optimizer": row.group.optimizer,
        "point": row.group.point,
        "flags": " ".join(row.group.flags),
        "learning_rate": row.learning_rate,
        "learning_rate_at_end_of_grid": row.at_end,
        "tuning": tuning,
        "arms": arms,
    }


def _json_runs(study: Study, found: list[Row], store: Store) -> list[dict[str, Any]]:
    listed = []
    for run in _known_runs(study, found):
        outcome = store.outcome(run)
        if outcome is None:
            continue
        shown = asdict(outcome)
        for key in ("flags", "environment", "training"):  # in the study, and in the run's own outcome.json
            del shown[key]
        for key in ("validation", "validation_z"):
            shown[key] = [[step, loss if loss == loss else None] for step, loss in shown[key]]
        if outcome.status == DIVERGED:
            shown["training_loss"] = None
        about = {"optimizer": run.group.optimizer, "point": run.group.point, "arm": run.arm, "seed": run.seed}
        listed.append({**about, "learning_rate": run.learning_rate, **shown})
    return listed


def _known_runs(study: Study, found: list[Row]) -> list[Any]:
    runs = []
    for row in found:
        runs += study.tuning_runs(row.group)
        if row.learning_rate is not None:
            runs += study.arm_runs(row.group, row.learning_rate)
    return list(dict.fromkeys(runs))


def _state(study: Study, found: list[Row], store: Store) -> str:
    known = _known_runs(study, found)
    outcomes = {run: store.outcome(run) for run in known}
    missing = sum(outcome is None for outcome in outcomes.values())
    missing += sum(len(study.seeds) * len(study.arms) - 1 for row in found if row.learning_rate is None)
    failed = [run.name for run, outcome in outcomes.items() if outcome is not None and outcome.status == FAILED]
    lines = [f"**Warning:** {line}" for line in warnings(study, found)]
    if missing:
        lines.append(f"**Unfinished:** {missing} runs are still to come.")
    lines += [f"**Failed:** {name}" for name in failed]
    return "\n\n".join(lines)


def _names(study: Study, row: Row) -> list[str]:
    has_point = bool(study.axis) or not study.tune
    return [row.group.optimizer, *([row.group.point] if has_point else [])]


def _columns(study: Study, found: list[Row]) -> list[str]:
    """Arms in the order of the study, each followed by its plain iterate where one was evaluated."""
    names = [part for name in study.arms for part in (name, f"{name} z")]
    return [name for name in names if name in study.arms or any(row.arm(name) for row in found)]


def _losses(study: Study, found: list[Row]) -> str:
    columns = _columns(study, found)
    lines = [[*_axis_head(study), "learning rate", *columns]]
    for row in found:
        rate = NONE if row.learning_rate is None else f"{row.learning_rate:g}"
        lines.append([*_names(study, row), rate, *(_loss_cell(study, row.arm(name)) for name in columns)])
    return table(lines)


def _gaps(study: Study, found: list[Row]) -> str:
    columns = [name for name in _columns(study, found) if name != study.baseline]
    closing = [name for name in columns if name.removesuffix(" z") in study.recovery]
    lines = [[*_axis_head(study), *columns, *(f"recovered by {name}" for name in closing)]]
    for row in found:
        gaps = []
        for name in columns:
            arm = row.arm(name)
            gaps.append(cell(arm.gap if arm else None, "{:+.4f}"))
        shares = [arm.recovered if (arm := row.arm(name)) else None for name in closing]
        lines.append([*_names(study, row), *gaps, *(NONE if s is None else f"{s:.0f} %" for s in shares)])
    return table(lines)


def _legend(study: Study) -> str:
    seeds = "one seed" if len(study.seeds) == 1 else f"mean ± standard deviation over {len(study.seeds)} seeds"
    text = f"Nats per token, {seeds}; a gap is the difference to {study.baseline} with the same seed, so same start, "
    text += "same batches and same validation data."
    if study.recovery:
        pairs = ", ".join(f"{name} of the gap of {other}" for name, other in study.recovery.items())
        text += f" Recovered: {pairs}; {NONE} where that gap is within two standard errors of zero."
    if any("both" in flags for flags in study.arms.values()):
        text += " z is the plain iterate of the optimizer, evaluated in the same run on the same data."
    return text


def _tuning(found: list[Row]) -> str:
    lines = [["optimizer", "learning rate: validation loss (chosen in bold)"]]
    for row in found:
        if len(row.group.learning_rates) > 1:
            shown = []
            for rate in row.group.learning_rates:
                outcome = row.tuning.get(rate)
                loss = "…" if outcome is None else outcome.status
                if outcome is not None and outcome.validation_loss is not None:
                    loss = f"{outcome.validation_loss:.4f}"
                text = f"{rate:g}: {loss}"
                shown.append(f"**{text}**" if rate == row.learning_rate else text)
            lines.append([row.group.name, ", ".join(shown)])
    return table(lines)


def _times(study: Study, found: list[Row]) -> str:
    lines = [[*_axis_head(study), *study.arms]]
    for row in found:
        times = []
        for name in study.arms:
            arm = row.arm(name)
            seconds = [o.seconds_per_iteration for o in arm.outcomes.values()] if arm else []
            known = [value for value in seconds if value is not None]
            times.append(f"{1e3 * statistics.median(known):.0f}" if known else NONE)
        lines.append([*_names(study, row), *times])
    return table(lines)


def _axis_head(study: Study) -> list[str]:
    if not study.axis and study.tune:
        return ["optimizer"]
    return ["optimizer", study.axis or "learning rate"]


def _loss_cell(study: Study, arm: Arm | None) -> str:
    if arm is None:
        return NONE
    text = cell(arm.loss, "{:.4f}")
    if arm.diverged:
        text = f"{text} ({len(arm.diverged)} of {len(study.seeds)} diverged)" if arm.loss else "diverged"
    missing = len(study.seeds) - len(arm.outcomes)
    return f"{text} ({missing} to come)" if missing and arm.outcomes else text


def cell(value: Spread | None, form: str) -> str:
    """Mean ± standard deviation."""
    if value is None:
        return NONE
    deviation = "" if value.deviation is None else f" ± {value.deviation:.4f}"
    return form.format(value.mean) + deviation


def table(lines: list[list[str]]) -> str:
    """A Markdown table, aligned to be read as text too; the first line is its head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [f"| {' | '.join(t.ljust(w) for t, w in zip(line, widths, strict=True))} |" for line in lines]
    rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    return "\n".join([shown[0], rule, *shown[1:]])
