"""What tuning inside the training finds within three epochs, and what it costs where nothing is to find.

    python -m benchmarks.while_training [--only NAME ...] [--json PATH]

For each workload a training of ten epochs, tuned from no workers on; then every setting of a grid in
short blocks by turns, and a final between the best of the grid and the setting that the training had
after three epochs. What it costs: trainings that begin with the best setting, tuned and plain by
turns, starts of workers included.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.tuner import FINAL_BLOCK_S, FINAL_ROUNDS, GRID_BLOCK_S, grid, race, ratio
from benchmarks.workloads import WORKLOADS, Workload
from dataloading.making import Maker
from dataloading.paired_ratios import bootstrap_interval
from dataloading.progress import time_bar
from dataloading.trials import Bench
from helper_functions import (
    LoaderSettings,
    inspect_machine,
    measure_dataloader,
    rebuild_dataloader,
    simulated_train_step,
    tune_while_training,
)

EPOCHS, LEARNING_EPOCHS = 10, 3
EPOCH_S = 2.0  # of the loader without workers
BEST_OF_GRID = 3
PAIRS = 4  # of trainings, tuned and plain
PROMISED = {"found": 0.95, "lost": 0.01}


def epoch_of(loader: DataLoader, step: Callable[[Any], None], seconds: float) -> DataLoader:
    """The same loader with epochs of about so many seconds."""
    period_s = measure_dataloader(loader, step, seconds=2.0, progress=False).period_s
    size = loader.batch_size or 1
    samples = size * max(8, round(seconds / period_s))
    sampler = RandomSampler(loader.dataset, replacement=True, num_samples=samples)  # type: ignore[arg-type]
    return DataLoader(loader.dataset, batch_size=size, sampler=sampler)


def found(workload: Workload, folder: Path) -> dict[str, Any]:
    """Train tuned, run the grid and the final; the rate of its setting over that of the best."""
    loader, step = workload.loader(folder), simulated_train_step(workload.step_s)
    tuner = tune_while_training(epoch_of(loader, step, EPOCH_S), epochs=EPOCHS)
    used = []
    for epoch in tuner:
        used.append(epoch.settings)
        for batch in epoch:
            step(batch)
    choice = used[LEARNING_EPOCHS].changed(batch_size=None)
    with time_bar(1.0, "", enabled=False) as bar, Bench(Maker.of(loader), step, None, bar) as bench:
        landscape = race(bench, grid(), 1, GRID_BLOCK_S)
        landscape.sort(key=lambda trial: -(trial.samples_per_s or 0.0))
        best = [trial.settings for trial in landscape[:BEST_OF_GRID]]
        finalists = list(dict.fromkeys([choice, *best]))
        final = {t.settings: t for t in race(bench, finalists, FINAL_ROUNDS, FINAL_BLOCK_S)}
    first = max((final[one] for one in best), key=lambda trial: trial.samples_per_s or 0.0)
    return {
        "workload": workload.name,
        "chosen": choice.summary(),
        "best": first.settings.summary(),
        "best_workers": first.settings.num_workers,
        "ratio": ratio(final.get(choice), first),
        "tried": len(set(used)),
    }


def lost(workload: Workload, folder: Path, workers: int) -> list[float]:
    """Seconds of a tuned training over those of a plain one, both with good settings, by turns."""
    step = simulated_train_step(workload.step_s)
    settings = LoaderSettings.cleaned(num_workers=workers, persistent_workers=workers > 0).settings
    loader = epoch_of(rebuild_dataloader(workload.loader(folder), settings), step, EPOCH_S / 2)
    loader = rebuild_dataloader(loader, settings)

    def plain() -> None:
        own = rebuild_dataloader(loader, settings)
        for _ in range(EPOCHS):
            for batch in own:
                step(batch)

    def tuned() -> None:
        for epoch in tune_while_training(loader, epochs=EPOCHS):
            for batch in epoch:
                step(batch)

    ratios = []
    for number in range(PAIRS):
        order = (plain, tuned) if number % 2 == 0 else (tuned, plain)
        seconds = {train: seconds_of(train) for train in order}
        ratios.append(seconds[tuned] / seconds[plain])
    return ratios


def seconds_of(train: Callable[[], None]) -> float:
    """How long a training takes."""
    begun = time.perf_counter()
    train()
    return time.perf_counter() - begun


def main() -> None:
    """Run all workloads and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", choices=[one.name for one in WORKLOADS])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all outcomes there")
    options = parser.parse_args()
    print(inspect_machine())
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            if options.only and workload.name not in options.only:
                continue
            one = found(workload, Path(folder))
            one["lost"] = lost(workload, Path(folder), one["best_workers"])
            outcomes.append(one)
            cost = np.exp(np.mean(np.log(one["lost"]))) - 1
            print(
                f"{one['workload']}: {one['ratio']:.0%} of the grid's best after "
                f"{LEARNING_EPOCHS} epochs ({one['chosen']}; best {one['best']}); a training with "
                f"good settings takes {cost:+.1%}",
                flush=True,
            )
    ratios = [one["ratio"] for one in outcomes if one["ratio"] is not None]
    print(
        f"\nfound: {np.mean(ratios):.0%} of the best on average, {min(ratios):.0%} at worst "
        f"(promised {PROMISED['found']:.0%})"
    )
    costs = np.log([ratio for one in outcomes for ratio in one["lost"]])
    low, high = bootstrap_interval(costs)
    print(
        f"lost: {math.expm1(float(np.mean(costs))):+.2%} ({math.expm1(low):+.2%} to "
        f"{math.expm1(high):+.2%}, 95 % interval over {len(costs)} pairs; promised at most "
        f"{PROMISED['lost']:.0%})"
    )
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
