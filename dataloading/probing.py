"""One short probe of a loader: what a batch costs with no worker, with one, and with many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from dataloading.arguments import check_seconds
from dataloading.batch_costs import PROFILE_ERROR, BatchCosts
from dataloading.batches import batch_bytes, count_samples, count_tensors
from dataloading.budgets import over_budget
from dataloading.loader_timing import LoaderTiming
from dataloading.machine import Machine, inspect_machine
from dataloading.making import MakeDataLoader, Maker
from dataloading.model import step_seconds
from dataloading.profiling import profile_samples
from dataloading.progress import TimeBar, time_bar
from dataloading.settings import LoaderSettings
from dataloading.timing import TrainStep, measure_dataloader
from dataloading.train_steps import simulated_train_step
from dataloading.watchdog import ProbeTimeout, loader_warnings_hidden

# How the budget is shared out.
NONE_SHARE, ONE_SHARE, HANDOVER_SHARE, CROWD_SHARE, SATURATED_SHARE = 0.15, 0.3, 0.1, 0.25, 0.2
MOST_WORKERS = 8  # more are not started for a probe
BUSY_SHARE = 0.6  # of a worker's time: more than this, and twice as many workers may fill the CPUs
FIXED_MOST_S = 0.002  # of a batch: what takes longer grows with the bytes
SLOW_START_SHARE = 0.5  # of an arm's time: workers that need longer to start are started once only
SLACK = 1.5  # a train step this many batch times long finds every batch ready
ERROR_PARTS = 5  # of an arm, whose rates show how steady it was
LEAST_ERROR = 0.005


def measure_batch_costs(
    dataloader: DataLoader | MakeDataLoader, *, seconds: float = 10.0, progress: bool = True
) -> BatchCosts:
    """Find out what a batch costs with no worker, with one, and with as many as there are CPUs.

    Args:
        dataloader: A `DataLoader`, or a function that builds one from `LoaderSettings`.
        seconds: Time budget. Where workers are not forked, each arm takes the seconds of their
            start on top.
        progress: Show progress bars.

    Returns:
        `BatchCosts`, which `predict_dataloader` predicts any settings from.

    Raises:
        TypeError: A loader that cannot be built again with other settings.
        ValueError: A bad argument, or a loader that delivers no batch.

    Explained in: notebook 03
    """
    check_seconds(seconds)
    maker = Maker.of(dataloader)
    machine = inspect_machine()
    with time_bar(seconds, "Probing the loader", progress) as bar:
        return probe(maker, machine, seconds, bar)


def probe(maker: Maker, machine: Machine, seconds: float, bar: TimeBar) -> BatchCosts:
    """The same, under somebody else's progress bar."""
    seen = _Sizes(bar)

    def run(
        workers: int, share: float, step_s: float = 0.0, *, clocks: bool = False
    ) -> LoaderTiming:
        settings = maker.settings.changed(num_workers=workers, persistent_workers=workers > 0)
        seen.step = simulated_train_step(step_s) if step_s else None
        with loader_warnings_hidden():
            return measure_dataloader(
                maker.make(settings),
                seen,
                seconds=share * seconds,
                clocks=clocks,
                progress=False,
            )

    alone = run(0, NONE_SHARE)
    costs = BatchCosts(
        cpu_s=alone.period_s,
        wait_s=0.0,
        send_s=0.0,
        batch_size=seen.samples,
        batch_bytes=seen.bytes,
        tensors=seen.tensors,
        alone_s=alone.period_s,
        start_method=maker.settings.multiprocessing_context or machine.start_method,
        cpus=machine.cpu_time_per_rank,
        error_share=_error(alone),
    )
    one = run(1, ONE_SHARE, clocks=True)
    costs = _with_one_worker(costs, one, maker.present)
    if (one.startup_s or 0.0) > SLOW_START_SHARE * ONE_SHARE * seconds:
        return costs
    costs = _with_handover(costs, run, one)
    crowd = _crowd(costs, maker.settings, machine)
    if crowd < 2:
        return costs
    try:
        costs = _with_crowd(costs, run(crowd, CROWD_SHARE), crowd, machine)
        twice = maker.settings.changed(num_workers=2 * crowd)
        if costs.cpu_share > BUSY_SHARE and not over_budget(twice, costs, machine):
            return replace(costs, saturated_s=run(2 * crowd, SATURATED_SHARE).period_s)
    except (ProbeTimeout, RuntimeError, OSError, MemoryError):
        pass  # what one worker costs is known; whoever tries several will see
    return costs


class _Sizes:
    """A train step that looks at the size of the first batch, and waits where it is told to."""

    samples = bytes = tensors = 0
    step: TrainStep | None = None

    def __init__(self, bar: TimeBar) -> None:
        self.bar = bar

    def __call__(self, batch: Any) -> None:
        self.bar.update()
        if self.step is not None:
            self.step(batch)
        if not self.samples:
            self.samples = count_samples(batch)
            self.bytes, self.tensors = batch_bytes(batch), count_tensors(batch)


def _with_one_worker(costs: BatchCosts, one: LoaderTiming, present: DataLoader) -> BatchCosts:
    """What a batch costs in a worker that is alone."""
    cycle_s = one.period_s
    cpu_s, send_s, fixed_s = cycle_s, 0.0, 0.0
    if (workers := one.workers) is not None:
        cpu_s = min(cycle_s, workers.fetch_cpu_s + workers.collate_cpu_s)
        send_s = (workers.extra_cpu_share or 0.0) * workers.batch_s
        fixed_s = min(max(0.0, cycle_s - workers.batch_s), FIXED_MOST_S)
    elif (share := _cpu_share(present)) is not None:  # a loader that could not be given clocks
        cpu_s = share * cycle_s
    return replace(
        costs,
        cpu_s=cpu_s,
        send_s=send_s,
        wait_s=cycle_s - cpu_s,
        cycle_s=cycle_s,
        fixed_s=fixed_s,
        batch_factors=one.total_s / cycle_s,
        error_share=max(costs.error_share, _error(one)),
    )


def _cpu_share(loader: DataLoader) -> float | None:
    try:
        return profile_samples(loader, samples=16).cpu_share
    except Exception:  # the data set's own code; without the figure all time counts as computing
        return None


def _with_handover(costs: BatchCosts, run: Any, one: LoaderTiming) -> BatchCosts:
    """What it takes to get a batch that stands ready."""
    try:
        slow = run(1, HANDOVER_SHARE, SLACK * float(np.percentile(one.total_s, 90)))
    except ProbeTimeout:
        return costs
    handover_s = slow.observed.handover_s if slow.observed is not None else None
    weighed = slow.observed.worker_bytes if slow.observed is not None else None
    if handover_s is None:  # too few batches: the shortest wait is the nearest to it
        handover_s = min(float(slow.wait_s.min()), costs.batch_s)
    return replace(costs, handover_s=handover_s, worker_bytes=weighed)


def _crowd(costs: BatchCosts, present: LoaderSettings, machine: Machine) -> int:
    """How many workers to try together: as many as CPUs, within memory and a limit."""
    crowd = min(MOST_WORKERS, int(machine.cpus_per_rank))
    while crowd > 1 and over_budget(present.changed(num_workers=crowd), costs, machine):
        crowd -= 1
    return crowd


def _with_crowd(
    costs: BatchCosts, timing: LoaderTiming, crowd: int, machine: Machine
) -> BatchCosts:
    """How much workers that are busy at the same time slow one another down."""
    if timing.failure is not None:
        return costs
    settings = LoaderSettings(num_workers=crowd)
    expected_s = step_seconds(costs, settings, 0.0, machine)
    weighed = timing.observed.worker_bytes if timing.observed is not None else None
    return replace(
        costs,
        crowding=max(1.0, timing.period_s / expected_s),
        crowd=crowd,
        worker_bytes=weighed or costs.worker_bytes,
        error_share=max(costs.error_share, _error(timing)),
    )


def _error(timing: LoaderTiming) -> float:
    """Standard error of the mean step of an arm, as a share; drift within the arm counts."""
    parts = [part.mean() for part in np.array_split(timing.total_s, min(ERROR_PARTS, timing.steps))]
    if len(parts) < 3:
        return PROFILE_ERROR
    spread = float(np.std(parts, ddof=1) / np.mean(parts))
    return max(LEAST_ERROR, spread / len(parts) ** 0.5)
