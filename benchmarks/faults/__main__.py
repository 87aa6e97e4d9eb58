"""Run the faults, each in a process of its own, and print what was named."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.faults.cases import CASES, Built, Case

LIMIT_S = 90  # for one case, start of Python included
DIAGNOSIS_S = 14.0


def codes_of(built: Built) -> list[str]:
    """Ask the tool that fits, and return the codes it found, first one first."""
    import helper_functions as h

    if built.how == "samples":
        return [f.code for f in h.check_samples(built.loader, **built.options).findings]
    if built.how == "check":
        return [f.code for f in h.check_dataloader(built.loader)]
    if built.how == "scaling":
        return [f.code for f in h.measure_scaling(built.loader, **built.options).findings]
    diagnosis = h.diagnose_dataloader(built.loader, built.step, seconds=DIAGNOSIS_S, progress=False)
    print(diagnosis, *diagnosis.findings, sep="\n", file=sys.stderr)
    return [f.code for f in diagnosis.findings]


def run_here(case: Case, seed: int) -> dict[str, Any]:
    """Run one case in this process."""
    built = case.build(Random(f"{case.name}-{seed}"))
    started = time.perf_counter()
    with built.around:
        codes = codes_of(built)
    return {"codes": codes, "seconds": time.perf_counter() - started}


def run_apart(case: Case, seed: int, verbose: bool) -> dict[str, Any]:
    """Run one case in a process of its own, with a time limit."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.faults"]
    command += ["--one", case.name, "--seed", str(seed)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=Path(__file__).resolve().parents[2],
        )
    except subprocess.TimeoutExpired:
        return {"codes": ["(time limit)"], "seconds": float(LIMIT_S)}
    if verbose:
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["?"])[-1]
        return {"codes": [f"(failed: {last})"], "seconds": 0.0}
    return json.loads(done.stdout.strip().splitlines()[-1])


def is_right(case: Case, codes: list[str]) -> bool:
    """The right cause comes first in its group; a control without a right code stays silent."""
    from dataloading.codes import CODES

    if not case.right:
        return not codes
    group = CODES[case.right[0]].group
    same_group = [code for code in codes if code in CODES and CODES[code].group == group]
    return bool(same_group) and same_group[0] in case.right


def main() -> None:
    """Run all cases for all seeds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    if options.one:
        print(json.dumps(run_here(by_name[options.one], options.seed)))
        return
    chosen = [by_name[name] for name in options.only] or list(CASES)
    right: dict[bool, list[bool]] = defaultdict(list)
    seconds = []
    for case in chosen:
        for seed in range(options.seeds):
            result = run_apart(case, seed, options.verbose)
            ok = is_right(case, result["codes"])
            right[case.control].append(ok)
            seconds.append(result["seconds"])
            mark = "right" if ok else "WRONG"
            print(
                f"{case.name:6} {case.what:32} seed {seed}  {mark}  {result['seconds']:5.1f} s  "
                f"{', '.join(result['codes'])}",
                flush=True,
            )
    for control, results in sorted(right.items()):
        kind = "controls" if control else "faults"
        print(f"{kind}: {sum(results)} of {len(results)} right ({sum(results) / len(results):.0%})")
    print(f"median seconds: {sorted(seconds)[len(seconds) // 2]:.1f}")


if __name__ == "__main__":
    main()
