"""Measure what only a GPU can tell, in one go: no installation, no network, within 8 minutes.

    python -m benchmarks.gpu [--json PATH] [--seconds-total 420] [--dry-run]

Without a CUDA device, or with --dry-run, the same code runs on the CPU for a few seconds: it shows
that everything runs, and its figures mean nothing. Only `cuda:0` is used.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.reporting import in_words, table
from benchmarks.gpu.running import PARTS, Outcome, choose_device, run_all, run_here


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    parser.add_argument(
        "--seconds-total", type=float, default=420.0, help="for all parts (default: %(default)g)"
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="PART")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=600.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 0 < options.seconds_total < float("inf"):
        parser.error(f"--seconds-total {options.seconds_total} must be a number above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was asked for, print it, and write the file."""
    options = parse(arguments)
    if options.part:
        device = choose_device(dry_run=options.dry_run)
        plan = Plan(device, options.seconds_total, dry_run=device.type == "cpu")
        print(json.dumps(run_here(options.part, plan, options.limit)))
        return

    def keep(results: Outcome) -> None:
        """Print the last part; write what there is, so that a run that is ended leaves it."""
        name = list(results["parts"])[-1]
        print(f"{time.strftime('%X')}  {in_words(name, results['parts'][name])}", flush=True)
        if options.json:
            text = json.dumps(results, indent=1) + "\n"
            options.json.write_text(text, encoding="utf-8")

    results = run_all(
        options.seconds_total, dry_run=options.dry_run, only=tuple(options.only), keep=keep
    )
    print("", table(results), sep="\n")


if __name__ == "__main__":
    main()
