"""Run the faults, each in a process of its own, and print what was named and what it adds up to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.cases import CASES, Case
from benchmarks.faults.figure import figure_png
from benchmarks.faults.running import run_apart, run_here
from benchmarks.faults.scoring import Outcome, confusion, in_words, summary

BY_NAME = {case.name: case for case in CASES}
QUICK = (  # of each group and tool some, within five minutes on two cores
    *("F01", "F03", "F06", "F11", "F13", "F14", "F16", "F17", "F19", "F21"),
    *("F23a", "F23b", "F23c", "F24", "K1", "K3", "K5", "K6"),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case (default: 1)")
    parser.add_argument("--only", nargs="*", default=[], metavar="CASE", choices=[*BY_NAME])
    parser.add_argument(
        "--quick", action="store_true", help="a subset within five minutes; advice is not tried"
    )
    parser.add_argument("--no-advice", action="store_true", help="do not try the advice")
    parser.add_argument("--verbose", action="store_true", help="show what each run printed")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all outcomes there")
    parser.add_argument("--figure", type=Path, metavar="PATH", help="draw a PNG there")
    parser.add_argument(
        "--rivals",
        nargs="?",
        const="",
        metavar="DIR",
        help="run other packages instead, in an environment made in DIR (default: a temporary one)",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--advise", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_all(cases: list[Case], seeds: int, *, advise: bool, verbose: bool) -> Iterator[Outcome]:
    """Run each case with each seed, and say how it went."""
    for case in cases:
        for seed in range(seeds):
            outcome, printed = run_apart(case, seed, advise=advise)
            if verbose:
                print(printed, file=sys.stderr)
            print(line(case, outcome), flush=True)
            yield outcome


def line(case: Case, outcome: Outcome) -> str:
    """One outcome in one line."""
    mark = "right" if outcome.is_right else "WRONG"
    said = ", ".join(code for code, _ in outcome.named) or "nothing"
    if outcome.cannot_run is not None:
        mark, said = "     ", f"cannot run here: {outcome.cannot_run}"
    elif outcome.error is not None:
        said = f"failed: {outcome.error}"
    advice = outcome.advice
    tried = f"; advice {advice.ratio:.2f}x" if advice is not None and advice.ratio else ""
    form = f" ({outcome.form})" if outcome.form else ""
    return (
        f"{case.name:5} seed {outcome.seed}  {mark}  {outcome.seconds:5.1f} s  "
        f"{case.what}{form}: {said}{tried}"
    )


def main() -> None:
    """Run what was asked for, print the sums, and write the files."""
    options = parse()
    if options.one:
        outcome = run_here(BY_NAME[options.one], options.seed, advise=options.advise)
        print(json.dumps(outcome.to_dict()))
        return
    names = options.only or (QUICK if options.quick else list(BY_NAME))
    cases = [BY_NAME[name] for name in names]
    if options.rivals is not None:
        from benchmarks.faults.rivals import run_rivals

        folder = Path(options.rivals).resolve() if options.rivals else None
        run_rivals(cases, options.seeds, folder, options.json)
        return
    outcomes = list(
        run_all(
            cases,
            options.seeds,
            advise=not (options.quick or options.no_advice),
            verbose=options.verbose,
        )
    )
    print("", confusion(outcomes).to_string(), "", *in_words(summary(outcomes)), sep="\n")
    if options.json:
        figures = {"summary": summary(outcomes), "outcomes": [one.to_dict() for one in outcomes]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        options.figure.write_bytes(figure_png(outcomes))


if __name__ == "__main__":
    main()
