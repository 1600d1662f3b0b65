#!/usr/bin/env python3
"""Check the guarantee for LMO methods under a fixed gradient delay, with and without error feedback.

Muon (exact polar factor), sign descent and normalized descent minimize a non-convex function of a matrix whose
smoothness constant is known in each norm, under delay 0, 1 and 2, without and with error feedback, with gradient noise
of known variance and without. Step size and momentum follow from K and the constants as the theory prescribes, and
delayed runs use the same. The program

  measures  the mean dual norm of the gradient over a range of K and fits its exponent: -1/4 with noise, -1/2 without,
  compares  it with the bound that docs/theory.md states and proves, term by term,
  shows     that with noise the gap between delayed and undelayed runs shrinks faster than the gradient.

It also prints how one step of delay limits heavy-ball SGD on a quadratic. The update is the package's own
calculate_error_feedback. Figures: docs/theory.md.
Exit codes: 0 the measurement agrees with the guarantee, 1 it does not, 2 bad command line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the package, if it is not installed

import torch
from lmo_delay.experiment import REGIMES, failures, measure_all
from lmo_delay.oracles import GEOMETRIES
from lmo_delay.problems import Problem
from lmo_delay.report import damping_table, draw, rates_table, stability_table, to_json

STEPS = {True: tuple(2**i for i in range(8, 15)), False: tuple(2**i for i in range(7, 13))}
FAST_STEPS = {True: tuple(2**i for i in range(7, 12)), False: tuple(2**i for i in range(6, 11))}
"""Every K, by whether there is momentum."""


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--methods", nargs="+", choices=GEOMETRIES, default=["muon", "sign", "normalized"], metavar="NAME",
        help=f"of {', '.join(GEOMETRIES)} (default: all exact ones)")  # fmt: skip
    add("--seeds", type=int, metavar="N", help="runs of every arm with noise; half without (default: 8; --fast: 4)")
    add("--noise", type=float, default=Problem().noise, metavar="SIGMA",
        help="E||noise||_F^2 = SIGMA^2 (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of starting points and noise (default: %(default)s)")
    add("--fast", action="store_true", help="fewer steps and seeds: about 15 seconds instead of 2 minutes")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--png", type=Path, metavar="FILE", help="draw the curves")
    args = parser.parse_args(arguments)
    args.seeds = args.seeds if args.seeds is not None else (4 if args.fast else 8)
    if args.seeds < 2:
        parser.error(f"--seeds {args.seeds}: a spread needs at least 2")
    if args.noise <= 0:
        parser.error(f"--noise {args.noise:g}: must be positive; runs without noise are always part of the check")
    return args


def _progress(text: str) -> None:
    """One line that is overwritten on a terminal, plain lines elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    args = parse_args(arguments)
    torch.set_num_threads(1)  # small matrices: threads only cost
    start = time.process_time()
    problem = Problem(noise=args.noise)
    series = measure_all(
        problem,
        args.methods,
        FAST_STEPS if args.fast else STEPS,
        seeds=args.seeds,
        seed=args.seed,
        progress=_progress,
    )
    _progress("")
    for regime in REGIMES:
        print(f"\n**{regime.name}**: promised exponent {regime.exponent}\n")
        print(rates_table([one for one in series if one.regime is regime]))
    print("\n**Quadratic, SGD: largest stable lr·a**\n")
    print(stability_table())
    print("\n**Quadratic, SGD: modulus of the slowest mode a step**\n")
    print(damping_table())
    found = [text for one in series for text in failures(one)]
    if args.json:
        shown = {"methods": args.methods, "seeds": args.seeds, "seed": args.seed, "fast": args.fast}
        _write_json(args.json, to_json(problem, series, found, shown))
    if args.png:
        draw(series, args.png)
    verdict = "not as promised" if found else "all agrees with the guarantee"
    print(f"\n{time.process_time() - start:.0f} s of processor time; {verdict}")
    for text in found:
        print(f"check_lmo_delay.py: {text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
