#!/usr/bin/env python3
"""Draw what each pipeline stage does over time, synchronous 1F1B above 2bw-async, from the plans that are executed.

The times are those of a model machine (forward 1, backward 2, messages free), not a measurement.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megatron_async.pipeline.plan import Action, Op, TwoBufferedWeights, run_steps

FORWARD_TIME, BACKWARD_TIME = 1.0, 2.0
COLOURS = ("#4878a8", "#d98b3a", "#5b9a5b", "#a05a8c", "#8a7a5c", "#4aa0a0")


@dataclass(frozen=True)
class Block:
    """One forward or backward on the time axis."""

    stage: int
    action: Action
    start: float
    end: float


def asynchronous_plans(stages: int, microbatches: int, batches: int) -> list[list[Action]]:
    """The plans of 2bw-async."""
    return [
        [a for step in run_steps([microbatches] * batches) for a in TwoBufferedWeights(stages, stage).actions(step)]
        for stage in range(stages)
    ]


def synchronous_plans(stages: int, microbatches: int, batches: int) -> list[list[Action]]:
    """1F1B with a flush after every batch."""
    plans = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        plan: list[Action] = []
        for k in range(batches):
            forwards = [Action(Op.FORWARD, k, i, k) for i in range(microbatches)]
            backwards = [Action(Op.BACKWARD, k, i, k) for i in range(microbatches)]
            plan += forwards[:warmup]
            for i, backward in enumerate(backwards):
                plan += [*forwards[warmup + i : warmup + i + 1], backward]
            plan.append(Action(Op.COMPLETE_UPDATE, k))
        plans.append(plan)
    return plans


def simulate(plans: list[list[Action]]) -> list[Block]:
    """Time every forward and backward: it starts when its stage is free and its input is there.

    The updates take no time; complete waits until every stage has run the last backward of its batch.
    """
    last = len(plans) - 1
    done: dict[tuple[Op, int, int, int], float] = {}
    clock = [0.0] * len(plans)
    position = [0] * len(plans)
    blocks: list[Block] = []
    sizes: dict[int, int] = {}
    for action in (a for plan in plans for a in plan if a.op is Op.BACKWARD):
        sizes[action.batch] = max(sizes.get(action.batch, 0), action.microbatch + 1)

    def needs(stage: int, action: Action) -> Iterable[tuple[Op, int, int, int]]:
        if action.op is Op.FORWARD and stage > 0:
            yield Op.FORWARD, stage - 1, action.batch, action.microbatch
        elif action.op is Op.BACKWARD:
            yield Op.FORWARD, stage, action.batch, action.microbatch
            if stage < last:
                yield Op.BACKWARD, stage + 1, action.batch, action.microbatch
        elif action.op is Op.COMPLETE_UPDATE:
            for other in range(len(plans)):
                yield Op.BACKWARD, other, action.batch, sizes[action.batch] - 1

    moved = True
    while moved:
        moved = False
        for stage, plan in enumerate(plans):
            while position[stage] < len(plan):
                action = plan[position[stage]]
                wanted = list(needs(stage, action))
                if any(key not in done for key in wanted):
                    break
                start = max([clock[stage], *(done[key] for key in wanted)])
                length = {Op.FORWARD: FORWARD_TIME, Op.BACKWARD: BACKWARD_TIME}.get(action.op, 0.0)
                clock[stage] = start + length
                if length:
                    done[action.op, stage, action.batch, action.microbatch] = clock[stage]
                    blocks.append(Block(stage, action, start, clock[stage]))
                position[stage] += 1
                moved = True
    return blocks


def idle_fraction(blocks: list[Block], microbatches: int) -> float:
    """Idle fraction of a stage in the steady state, from the time between the ends of two batches in the middle."""
    ends = {b.action.batch: b.end for b in blocks if b.stage == 0 and b.action.op is Op.BACKWARD}
    return 1.0 - microbatches * (FORWARD_TIME + BACKWARD_TIME) / (ends[3] - ends[2])


def draw(axis: plt.Axes, blocks: list[Block], stages: int, end: float, title: str) -> None:
    """One row a stage; a batch has one colour, its forwards are lighter than its backwards."""
    for block in blocks:
        if block.start >= end:
            continue
        forward = block.action.op is Op.FORWARD
        axis.barh(
            block.stage,
            block.end - block.start,
            left=block.start,
            height=0.9,
            color=COLOURS[block.action.batch % len(COLOURS)],
            alpha=0.45 if forward else 1.0,
            edgecolor="white",
            linewidth=0.8,
        )
        axis.text(
            (block.start + block.end) / 2,
            block.stage,
            str(block.action.microbatch),
            ha="center",
            va="center",
            fontsize=7,
            color="black" if forward else "white",
        )
    axis.set_xlim(0, end)
    axis.set_facecolor("#f0f0f0")
    dress(axis, range(stages), title)


def dress(axis: plt.Axes, stages: Sequence[int], title: str) -> None:
    """Give an axis a row for each of the stages, from the top, and a title."""
    axis.set_ylim(len(stages) - 0.5, -0.5)
    axis.set_yticks(range(len(stages)), [f"stage {stage}" for stage in stages])
    axis.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(left=False)


def main() -> None:
    """Parse the command line, write the picture, print the idle fractions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="PNG or SVG file to write")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages p (default: 4)")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches a batch m, at least p (default: 4)")
    arguments = parser.parse_args()
    stages, microbatches = arguments.stages, arguments.microbatches
    if stages < 1 or microbatches < stages:
        parser.error(f"--microbatches must be at least --stages, got {microbatches} and {stages}")
    batches = 6
    period = microbatches * (FORWARD_TIME + BACKWARD_TIME)
    kinds = {
        "1F1B: every batch ends in a flush": simulate(synchronous_plans(stages, microbatches, batches)),
        "2bw-async: the next batch fills the gaps, reading weights one update old": simulate(
            asynchronous_plans(stages, microbatches, batches)
        ),
    }
    end = 3 * (period + (stages - 1) * (FORWARD_TIME + BACKWARD_TIME))
    figure, axes = plt.subplots(len(kinds), 1, figsize=(12, 0.45 * stages * len(kinds) + 1.6), layout="constrained")
    for axis, (title, blocks) in zip(axes, kinds.items(), strict=True):
        idle = idle_fraction(blocks, microbatches)
        print(f"{title.split(':')[0]:<10} idle {100 * idle:5.1f} % in the steady state")
        draw(axis, blocks, stages, end, title)
    axes[-1].set_xlabel("time, in forwards of one microbatch (light: forward, full: backward, colour: batch)")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=130)


if __name__ == "__main__":
    main()
