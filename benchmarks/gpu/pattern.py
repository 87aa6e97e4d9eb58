"""Whether the monitor's curve of a GPU tells a fed one from one that starves, in bursts or evenly."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.plan import Plan, Work
from benchmarks.gpu.utilisation import QUICK, busy_column
from dataloading.monitoring import monitor_resources
from dataloading.watchdog import close_iterator, open_iterator

STARTING_S = 1.5  # workers start, the driver's readings settle


@dataclass(frozen=True)
class Load:
    """A loader and a step, and the pattern that they give.

    Attributes:
        expected: What the monitor should say.
        workers: Worker processes, which all deliver at the same time.
        batch_s: Seconds that a worker waits for a batch.
        step_s: Seconds of a train step.
    """

    expected: str
    workers: int
    batch_s: float
    step_s: float


LOADS = {
    "fed": Load("steady", workers=2, batch_s=0.005, step_s=0.020),
    "starved evenly": Load("starved", workers=1, batch_s=0.040, step_s=0.010),
    "starved in bursts": Load("sawtooth", workers=8, batch_s=1.0, step_s=0.050),
}


class Sleepy(Dataset):
    """Batches that take a while, without any work."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(8)


def measure(plan: Plan, figures: dict[str, Any]) -> None:
    """Run a loop with each loader under the monitor, and ask for the pattern.

    Args:
        plan: Where, and how long.
        figures: Filled as the measuring goes on.
    """
    rows: list[dict[str, Any]] = figures.setdefault("loads", [])
    for name, load in LOADS.items():
        found = one_load(plan, load, plan.seconds / len(LOADS))
        rows.append({"load": name, "expected": load.expected, **found})


def one_load(plan: Plan, load: Load, seconds: float) -> dict[str, Any]:
    """The pattern that the monitor saw."""
    faster = QUICK if plan.dry_run else 1
    workers = min(load.workers, 2) if plan.dry_run else load.workers
    loader = DataLoader(
        Sleepy(load.batch_s / faster),
        batch_size=None,
        shuffle=False,
        num_workers=workers,
    )
    work = Work(plan, load.step_s / faster)
    with monitor_resources(interval_s=0.1 if plan.dry_run else 0.2, workers=False) as trace:
        steps = train(loader, work, seconds)
    column = busy_column(plan)
    pattern = trace.pattern(column, after_s=min(STARTING_S, seconds / 4))
    return {
        "found": pattern.name,
        "right": pattern.name == load.expected,
        "period_s": pattern.period_s,
        "mean_percent": pattern.evidence.get("mean"),
        "reason": pattern.evidence["reason"],
        "readings": pattern.evidence.get("readings", 0),
        "source": trace.gpu_source or column,
        "steps": steps,
    }


def train(loader: DataLoader, work: Work, seconds: float) -> int:
    """Train for so long, within one epoch; returns the steps."""
    deadline = time.perf_counter() + seconds
    iterator = open_iterator(loader)
    try:
        for steps, batch in enumerate(iterator, start=1):
            work.wait(batch)
            if time.perf_counter() > deadline:
                return steps
    finally:
        close_iterator(iterator)
    raise AssertionError("the epoch has ended")
