"""How far the model's predictions are from what is measured, and how often its intervals hold.

    python -m benchmarks.model [--seconds 2.5] [--only NAME ...] [--json PATH]

For each workload one probe of ten seconds at one batch size; from it, steps of other numbers of
workers, prefetch factors and batch sizes are predicted and then measured, each setting once, in an
order drawn by chance. Memory: the private memory of all workers plus a full queue in shared memory.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch.utils.data import DataLoader

from benchmarks.workloads import WORKLOADS, Workload
from dataloading.memory import read_sum, worker_pids
from dataloading.processes import shared_memory_used_bytes
from dataloading.watchdog import close_iterator, loader_warnings_hidden, open_iterator
from helper_functions import (
    LoaderSettings,
    Prediction,
    inspect_machine,
    measure_batch_costs,
    measure_dataloader,
    predict_dataloader,
    rebuild_dataloader,
    simulated_train_step,
)

PROBE_S = 10.0
WORKERS = (0, 1, 2, 3, 4)
PREFETCH = (2, 4)
BATCH_FACTORS = (1, 2)  # times the batch size of the probe
WEIGHED_BATCHES = 40  # of each worker, before its memory is read: it grows over the first ones
PROMISED = {"synthetic": 0.03, "photos": 0.08, "covered": 0.85, "memory": 0.10}


def settings_of(workload: Workload) -> list[LoaderSettings]:
    """All settings that are predicted and measured."""
    return [
        LoaderSettings.cleaned(
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            batch_size=factor * workload.batch_size,
        ).settings
        for factor in BATCH_FACTORS
        for workers in WORKERS
        for prefetch in (PREFETCH if workers else PREFETCH[:1])
    ]


def run(workload: Workload, folder: Path, seconds: float, chance: random.Random) -> pd.DataFrame:
    """Probe once, predict all, measure all; a row per setting."""
    loader = workload.loader(folder)
    costs = measure_batch_costs(loader, seconds=PROBE_S, progress=False)
    step = simulated_train_step(workload.step_s)
    rows = []
    settings = settings_of(workload)
    for one in chance.sample(settings, len(settings)):
        predicted = predict_dataloader(costs, one, step_s=workload.step_s)
        with loader_warnings_hidden():
            built = rebuild_dataloader(loader, one)
            measured = measure_dataloader(built, step, seconds=seconds, progress=False)
        low, high = predicted.step_s_interval
        rows.append(
            {
                "workload": workload.name,
                "is_real": workload.is_real,
                "num_workers": one.num_workers,
                "prefetch_factor": one.prefetch_factor,
                "batch_size": one.batch_size,
                "limit": predicted.limit,
                "predicted_s": predicted.step_s,
                "measured_s": measured.period_s,
                "error": predicted.step_s / measured.period_s - 1,
                "inside": low <= measured.period_s <= high,
                "memory_error": memory_error(built, predicted),
            }
        )
    return pd.DataFrame(rows)


def memory_error(loader: DataLoader, predicted: Prediction) -> float | None:
    """Predicted over measured memory of workers and a full queue, less one; None without workers."""
    if not loader.num_workers:
        return None
    before = shared_memory_used_bytes() or 0
    with loader_warnings_hidden():
        iterator = open_iterator(loader)
    try:
        for _ in range(WEIGHED_BATCHES * loader.num_workers):
            next(iterator)
        full_s = 2 * loader.num_workers * (loader.prefetch_factor or 2) * predicted.step_s
        time.sleep(0.3 + full_s)
        own = read_sum(worker_pids(iterator))
        queue = (shared_memory_used_bytes() or 0) - before
    finally:
        close_iterator(iterator)
        loader._iterator = None
    return predicted.memory_bytes / (own[0] + queue) - 1 if own else None


def in_words(cells: pd.DataFrame) -> list[str]:
    """What the cells add up to, beside what is promised."""
    lines = []
    for name, own in (("synthetic", cells[~cells.is_real]), ("photos", cells[cells.is_real])):
        if not own.empty:
            error = own["error"].abs().median()
            covered = own["inside"].mean()
            lines.append(
                f"{name}: {len(own)} cells, median error {error:.1%} (promised "
                f"{PROMISED[name]:.0%}), 90 % of errors below {own['error'].abs().quantile(0.9):.1%}; "
                f"intervals hold {covered:.0%} (promised {PROMISED['covered']:.0%})"
            )
    memory = cells["memory_error"].dropna().astype(float)
    if not memory.empty:
        lines.append(
            f"memory: median error {memory.abs().median():.1%} over {len(memory)} cells, "
            f"{(memory.abs() <= PROMISED['memory']).mean():.0%} within {PROMISED['memory']:.0%}"
        )
    return lines


def by_workload(cells: pd.DataFrame) -> pd.DataFrame:
    """A row per workload."""
    own: dict[str, Any] = {
        "cells": ("error", "size"),
        "median_error": ("error", lambda e: e.abs().median()),
        "bias": ("error", "median"),
        "worst_error": ("error", lambda e: e.abs().max()),
        "inside": ("inside", "mean"),
        "memory_error": ("memory_error", lambda e: np.nanmedian(e.astype(float))),
    }
    return cells.groupby("workload", sort=False).agg(**own).round(3)


def main() -> None:
    """Run all workloads and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.5, help="for measuring each setting")
    parser.add_argument("--only", nargs="*", choices=[one.name for one in WORKLOADS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", action="store_true", help="print every cell")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all cells there")
    options = parser.parse_args()
    print(inspect_machine())
    chance = random.Random(options.seed)
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            if options.only and workload.name not in options.only:
                continue
            tables.append(run(workload, Path(folder), options.seconds, chance))
            print(by_workload(tables[-1]).to_string(header=len(tables) == 1), flush=True)
            if options.cells:
                print(tables[-1].round(4).to_string())
    cells = pd.concat(tables, ignore_index=True)
    print("", *in_words(cells), sep="\n")
    if options.json:
        options.json.write_text(cells.to_json(orient="records", indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
