"""How often a comparison is wrong: equal loaders called different, and a true gain not found.

    python -m benchmarks.compare [--runs 100] [--effect 3] [--seconds 8] [--disturbed] [--json PATH]

Batches of both loaders take a fixed time to wait for, after's by --effect percent less time, and the
train step is simulated too: so the truth is known, and a run is short enough to be repeated often.
A/A runs compare equal loaders, effect runs those that differ. Rates come with their 95 % interval
(Clopper-Pearson). With --disturbed a process beside it computes on all CPUs, on and off at random.

Beside the promise (A/A called different in at most 5 %, the effect found in at least 90 %) stands how
long the runs took: a comparison ends early when it is precise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from dataloading.results import format_share
from helper_functions import compare_dataloaders, inspect_machine, simulated_train_step

BATCH_S = 0.008  # a batch of before
STEP_S = 0.002
SAMPLES_PER_BATCH = 8
EPOCH_BATCHES = 100_000  # no epoch ends during a run
BUSY_S, IDLE_S = 0.5, 1.5  # means of the disturbing process


class Waiting(Dataset[int]):
    """A data set that gets batches at once and takes a fixed time for each."""

    def __init__(self, batch_s: float) -> None:
        self.batch_s = batch_s

    def __len__(self) -> int:
        return EPOCH_BATCHES * SAMPLES_PER_BATCH

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        time.sleep(self.batch_s)
        return indices


@dataclass(frozen=True)
class Outcome:
    """What one comparison said, and how long it took."""

    verdict: str
    ratio: float
    interval: tuple[float, float] | None
    pairs: int
    took_s: float


def loader(batch_s: float, workers: int) -> DataLoader:
    """A loader whose batches take so long."""
    return DataLoader(
        Waiting(batch_s),
        batch_size=SAMPLES_PER_BATCH,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def compare_once(effect: float, seconds: float, workers: int) -> Outcome:
    """One comparison of loaders whose rates differ by a share of `effect`."""
    whole_s = BATCH_S + STEP_S  # without workers, a step takes both
    batch_s = whole_s / (1 + effect) - STEP_S if workers == 0 else BATCH_S / (1 + effect)
    before, after = loader(BATCH_S, workers), loader(batch_s, workers)
    begun = time.perf_counter()
    result = compare_dataloaders(
        before, after, simulated_train_step(STEP_S), seconds=seconds, progress=False
    )
    took_s = time.perf_counter() - begun
    assert result.ratio is not None, result
    return Outcome(result.verdict, result.ratio, result.interval, len(result.pairs), took_s)


def disturb(cpu: int) -> None:
    """Compute on and off, for ever; the process is ended from outside."""
    chance = random.Random(cpu)
    while True:
        end = time.monotonic() + chance.expovariate(1 / BUSY_S)
        while time.monotonic() < end:
            sum(range(1000))
        time.sleep(chance.expovariate(1 / IDLE_S))


@contextlib.contextmanager
def disturbance(wanted: bool) -> Iterator[None]:
    """Processes that disturb, one a usable CPU, while the block runs."""
    context = multiprocessing.get_context("spawn")
    cpus = range(inspect_machine().usable_cpus) if wanted else ()
    others = [context.Process(target=disturb, args=(cpu,), daemon=True) for cpu in cpus]
    try:
        for other in others:
            other.start()
        yield
    finally:
        for other in others:
            if other.is_alive():
                other.terminate()
            other.join()


def rate_text(count: int, runs: int) -> str:
    """A count of runs as a rate with its 95 % interval."""
    from scipy import stats

    bounds = stats.binomtest(count, runs).proportion_ci(method="exact")
    low, high = format_share(bounds.low, 1), format_share(bounds.high, 1)
    return f"{count} of {runs} ({format_share(count / runs, 1)}, 95 % interval {low} to {high})"


def describe(outcomes: list[Outcome]) -> str:
    """How long runs took, and how precise they were."""
    took = sorted(one.took_s for one in outcomes)
    widths = sorted(one.interval[1] - one.interval[0] for one in outcomes if one.interval)
    width = format_share(widths[len(widths) // 2], 1) if widths else "none"
    pairs = sorted(one.pairs for one in outcomes)[len(outcomes) // 2]
    return (
        f"median width of the interval {width}, {pairs} pairs, {took[len(took) // 2]:.1f} s a run "
        f"(longest {took[-1]:.1f} s)"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all comparisons, A/A and effect by turns; print what came out."""
    effect = options.effect / 100
    seen: dict[str, list[Outcome]] = {"A/A": [], "effect": []}
    with disturbance(options.disturbed):
        for number in range(options.runs):
            for kind, true in (("A/A", 0.0), ("effect", effect)):
                one = compare_once(true, options.seconds, options.workers)
                seen[kind].append(one)
                print(
                    f"{number + 1}/{options.runs} {kind}: {one.ratio:.4f} {one.verdict}", flush=True
                )
    wrong = sum(one.verdict != "no difference shown" for one in seen["A/A"])
    gain = "faster" if effect > 0 else "slower"
    found = sum(one.verdict == gain for one in seen["effect"])
    print(f"equal loaders called different: {rate_text(wrong, options.runs)}; promised: <= 5 %")
    print(f"  {describe(seen['A/A'])}")
    print(
        f"a true {options.effect:+g} % found: {rate_text(found, options.runs)}; promised: >= 90 %, of 3 %"
    )
    print(f"  {describe(seen['effect'])}")
    return {
        "runs": options.runs,
        "effect_percent": options.effect,
        "seconds": options.seconds,
        "workers": options.workers,
        "disturbed": options.disturbed,
        "called_different": wrong,
        "found": found,
        "outcomes": {kind: [vars(one) for one in outcomes] for kind, outcomes in seen.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    """Compare again and again, and print how often it was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=100, help="of each kind")
    parser.add_argument("--effect", type=float, default=3.0, help="true gain in percent")
    parser.add_argument("--seconds", type=float, default=8.0, help="budget of a comparison")
    parser.add_argument("--workers", type=int, default=0, help="of each loader")
    parser.add_argument("--disturbed", action="store_true", help="with other work beside it")
    parser.add_argument("--json", type=Path, help="where to write every outcome")
    options = parser.parse_args(arguments)
    print(inspect_machine())
    results = run(options)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
