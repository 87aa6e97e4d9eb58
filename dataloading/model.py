"""How fast a loader with other settings would be, and what it would need.

The step time is the largest of what the parts need (an operational bound): the train step itself,
the workers (batch time over workers) and the CPUs (all CPU work of a step over the usable CPUs).
The formulas and their measured error are discussed in notebook 00; the timeline below shows the same
thing batch by batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.arguments import check_amount
from dataloading.machine import Machine, inspect_machine
from dataloading.profiling import SampleProfile
from dataloading.results import Result, format_seconds, format_share, format_value
from dataloading.settings import LoaderSettings
from dataloading.worker_costs import WorkerCosts

if TYPE_CHECKING:
    import pandas as pd

MODEL_ERROR = 0.15  # half-width of the 90 % interval, as a share of the step time
MEMORY_ERROR = 0.3  # half-width of the memory interval, as a share
WORKER_BYTES = {  # private memory of a worker that has loaded a few batches; torch imported anew
    "fork": 64 * 2**20,  # where the worker is not forked
    "forkserver": 320 * 2**20,
    "spawn": 320 * 2**20,
}
FILES_PER_WORKER = 6  # pipes and sentinels that each worker keeps open in the main process
TIMELINE_BATCHES = 60  # enough to see the steady state behind a first burst


@dataclass(frozen=True, repr=False, eq=False)
class BatchCosts(Result):
    """What one batch costs, whoever prepares it; all in seconds.

    Attributes:
        cpu_s: CPU work: fetching, collating and sending.
        wait_s: Waiting, for example for a disk.
        send_s: Part of `cpu_s` that is paid only with workers: handing the batch over.
        batch_size: Samples in the batch.
        batch_bytes: Bytes of its tensors.
        tensors: Tensors in it.
        step_cpu_s: CPU work of the train step, over all its threads.
    """

    cpu_s: float
    wait_s: float
    send_s: float
    batch_size: int
    batch_bytes: int
    tensors: int
    step_cpu_s: float = 0.0

    @classmethod
    def of(
        cls, profile: SampleProfile, workers: WorkerCosts | None = None, step_cpu_s: float = 0.0
    ) -> BatchCosts:
        """Costs from a profile; CPU work as seen inside the workers, where it was measured."""
        size = profile.batch_size
        cpu_s = profile.sample_cpu_s * size + profile.collate_s
        if workers is not None and workers.samples > 0:
            cpu_s = (workers.fetch_cpu_s + workers.collate_cpu_s) * size / workers.samples
        return cls(
            cpu_s=cpu_s,
            wait_s=profile.sample_wait_s * size,
            send_s=profile.transfer_s or 0.0,
            batch_size=size,
            batch_bytes=profile.batch_bytes,
            tensors=profile.tensors_per_batch,
            step_cpu_s=step_cpu_s,
        )

    def for_batch_size(self, batch_size: int | None) -> BatchCosts:
        """The same work for another batch size; the train step's share is left as it is."""
        if batch_size is None or batch_size == self.batch_size:
            return self
        factor = batch_size / self.batch_size
        return BatchCosts(
            cpu_s=self.cpu_s * factor,
            wait_s=self.wait_s * factor,
            send_s=self.send_s * factor,
            batch_size=batch_size,
            batch_bytes=int(self.batch_bytes * factor),
            tensors=self.tensors,
            step_cpu_s=self.step_cpu_s,
        )

    @property
    def batch_s(self) -> float:
        """Seconds that one worker, undisturbed, needs for one batch.

        Sending happens in a thread of its own, so it overlaps with waiting, not with computing.
        """
        return self.cpu_s + max(self.wait_s, self.send_s)

    @property
    def cpu_share(self) -> float:
        """Share of a worker's time in which it needs a CPU."""
        return min(1.0, (self.cpu_s + self.send_s) / self.batch_s) if self.batch_s > 0 else 1.0

    def summary(self) -> str:
        """One line."""
        return (
            f"{format_seconds(self.batch_s)} a batch of {self.batch_size}, "
            f"CPU busy {format_share(self.cpu_share)} of it"
        )


def step_bounds(
    costs: BatchCosts, settings: LoaderSettings, step_s: float, machine: Machine
) -> dict[str, float]:
    """Seconds a step takes at least, for each part that could be the limit.

    Args:
        costs: What a batch costs.
        settings: The settings asked about.
        step_s: Seconds of the train step when data is free.
        machine: CPUs and ranks.

    Returns:
        `compute`, `workers` and `cpu` in seconds; without workers, `loading` takes the place of
        `workers`: the sum of loading and training, which take turns.
    """
    costs = costs.for_batch_size(settings.batch_size)
    cpus = machine.cpus_per_rank
    if settings.num_workers == 0:
        alone = costs.cpu_s + costs.wait_s + step_s
        return {"compute": step_s, "loading": alone, "cpu": costs.cpu_s}
    return {
        "compute": step_s,
        "workers": costs.batch_s / settings.num_workers,
        "cpu": (costs.cpu_s + costs.send_s + costs.step_cpu_s) / cpus,
    }


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(Result):
    """What a setting would give; every figure has a 90 % interval `(low, high)`.

    Attributes:
        step_s: Seconds from one step to the next.
        samples_per_s: Samples per second.
        wait_share: Share of a step spent waiting for data.
        memory_bytes: Private memory of the workers, and their queue.
        shared_memory_bytes: Bytes of finished batches that wait in shared memory.
        open_files: File descriptors held by workers and queued batches.
        limit: The part that binds: `compute`, `workers`, `loading` or `cpu`.
        timeline: DataFrame of the simulated run, see `simulate_timeline`.
    """

    step_s: float
    step_s_interval: tuple[float, float]
    samples_per_s: float
    samples_per_s_interval: tuple[float, float]
    wait_share: float
    wait_share_interval: tuple[float, float]
    memory_bytes: int
    memory_bytes_interval: tuple[int, int]
    shared_memory_bytes: int
    shared_memory_bytes_interval: tuple[int, int]
    open_files: int
    open_files_interval: tuple[int, int]
    limit: str
    settings: LoaderSettings
    timeline: pd.DataFrame

    def summary(self) -> str:
        """One line."""
        low, high = self.samples_per_s_interval
        rate = format_value("samples_per_s", self.samples_per_s)
        return f"{rate} (90 % interval {low:,.0f} to {high:,.0f}), limited by {self.limit}"

    def plot(self, ax: Any = None) -> Any:
        """Draw the simulated run; returns the Axes."""
        from dataloading.plots import plot_timeline

        return plot_timeline(self.timeline, ax=ax)


def predict_dataloader(
    profile: SampleProfile | BatchCosts,
    settings: LoaderSettings,
    *,
    step_s: float,
    machine: Machine | None = None,
) -> Prediction:
    """Predict speed and needs of a loader with other settings, before running it.

    Args:
        profile: What a sample costs (`profile_samples`), or the costs of a batch.
        settings: The settings asked about.
        step_s: Seconds of the train step when data is free.
        machine: Where it would run; None means here.

    Returns:
        A `Prediction`.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: `step_s` is negative or not finite.

    Explained in: notebook 00
    """
    check_amount("step_s", step_s)
    machine = machine or inspect_machine()
    costs = BatchCosts.of(profile) if isinstance(profile, SampleProfile) else profile
    for name, value, kind in (
        ("a SampleProfile from profile_samples", costs, BatchCosts),
        ("LoaderSettings", settings, LoaderSettings),
        ("a Machine from inspect_machine", machine, Machine),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"Expected {name}, got {type(value).__name__}.")
    costs = costs.for_batch_size(settings.batch_size)
    bounds = step_bounds(costs, settings, step_s, machine)
    limit = max(bounds, key=lambda part: bounds[part])
    seconds = max(bounds[limit], 1e-9)
    low, high = seconds * (1 - MODEL_ERROR), seconds * (1 + MODEL_ERROR)
    needs = resource_needs(costs, settings, machine)
    memory = needs["memory_bytes"]
    return Prediction(
        step_s=seconds,
        step_s_interval=(max(low, step_s), max(high, step_s)),
        samples_per_s=costs.batch_size / seconds,
        samples_per_s_interval=(costs.batch_size / high, costs.batch_size / max(low, step_s, 1e-9)),
        wait_share=1 - step_s / seconds,
        wait_share_interval=(1 - step_s / max(low, step_s, 1e-9), 1 - step_s / high),
        memory_bytes=memory,
        memory_bytes_interval=(int(memory * (1 - MEMORY_ERROR)), int(memory * (1 + MEMORY_ERROR))),
        shared_memory_bytes=needs["shared_memory_bytes"],
        shared_memory_bytes_interval=(0, needs["shared_memory_bytes"] + 2 * costs.batch_bytes),
        open_files=needs["open_files"],
        open_files_interval=(0, needs["open_files"] + 2 * costs.tensors),
        limit=limit,
        settings=settings,
        timeline=simulate_timeline(costs, settings, step_s=step_s, machine=machine),
    )


def resource_needs(costs: BatchCosts, settings: LoaderSettings, machine: Machine) -> dict[str, int]:
    """Memory, shared memory and open files that a loader would hold.

    Args:
        costs: Costs of a batch at the batch size in question.
        settings: Workers and prefetch.
        machine: Its start method says what a worker weighs.

    Returns:
        `memory_bytes`, `shared_memory_bytes` and `open_files`.
    """
    queued = settings.queued_batches
    shared = queued * costs.batch_bytes
    method = settings.multiprocessing_context or machine.start_method
    per_worker = WORKER_BYTES.get(method, WORKER_BYTES["spawn"]) + costs.batch_bytes
    pinned = shared if settings.pin_memory else 0
    return {
        "memory_bytes": settings.num_workers * per_worker + shared + pinned,
        "shared_memory_bytes": shared,
        "open_files": queued * costs.tensors + settings.num_workers * FILES_PER_WORKER,
    }


def simulate_timeline(
    costs: BatchCosts,
    settings: LoaderSettings,
    *,
    step_s: float,
    machine: Machine,
    batches: int = TIMELINE_BATCHES,
    startup_s: float = 0.0,
    batch_factors: np.ndarray | None = None,
) -> pd.DataFrame:
    """Play a run batch by batch: who prepares what when, and when the training waits.

    As in PyTorch, batch n goes to worker n mod W; each delivered batch lets one more be begun; at
    most W x prefetch are under way.

    Args:
        costs: What a batch costs.
        settings: Workers, prefetch and order.
        step_s: Seconds of a train step.
        machine: CPUs; more work than CPUs slows all workers down alike.
        batches: How many batches to play.
        startup_s: Seconds until the workers begin.
        batch_factors: How many times the usual cost each batch takes; shape (batches,).

    Returns:
        DataFrame in order of delivery: `batch`, `worker` (-1 is the training process),
        `begun_s`, `ready_s`, `asked_s`, `step_begun_s`, `step_ended_s`, `wait_s`.
    """
    import pandas as pd

    costs = costs.for_batch_size(settings.batch_size)
    factors = np.ones(batches) if batch_factors is None else np.asarray(batch_factors, dtype=float)
    columns = ["batch", "worker", "begun_s", "ready_s", "asked_s", "step_begun_s", "step_ended_s"]
    play = _play_alone if settings.num_workers == 0 else _play_workers
    table = pd.DataFrame(
        play(costs, settings, step_s, machine, factors, startup_s), columns=columns
    )
    table["wait_s"] = table["step_begun_s"] - table["asked_s"]
    return table


def _play_alone(
    costs: BatchCosts,
    settings: LoaderSettings,
    step_s: float,
    machine: Machine,
    factors: np.ndarray,
    startup_s: float,
) -> list[tuple[float, ...]]:
    rows: list[tuple[float, ...]] = []
    now = startup_s
    for number, factor in enumerate(factors):
        ready = now + factor * (costs.cpu_s + costs.wait_s)
        rows.append((number, -1, now, ready, now, ready, ready + step_s))
        now = ready + step_s
    return rows


def _play_workers(
    costs: BatchCosts,
    settings: LoaderSettings,
    step_s: float,
    machine: Machine,
    factors: np.ndarray,
    startup_s: float,
) -> list[tuple[float, ...]]:
    workers, queue = settings.num_workers, settings.queued_batches
    bounds = step_bounds(costs, settings, step_s, machine)
    slowdown = max(1.0, bounds["cpu"] / max(bounds["workers"], 1e-12))
    free = [startup_s] * workers
    under_way: dict[int, tuple[float, float]] = {}
    rows: list[tuple[float, ...]] = []
    now = 0.0

    def begin(number: int, at: float) -> None:
        worker = number % workers
        begun = max(free[worker], at)
        free[worker] = begun + factors[number] * costs.batch_s * slowdown
        under_way[number] = (begun, free[worker])

    for number in range(min(queue, len(factors))):
        begin(number, startup_s)
    following = len(under_way)
    while under_way:
        number = (
            min(under_way) if settings.in_order else min(under_way, key=lambda n: under_way[n][1])
        )
        begun, ready = under_way.pop(number)
        step_begun = max(now, ready)
        rows.append((number, number % workers, begun, ready, now, step_begun, step_begun + step_s))
        if following < len(factors):
            begin(following, step_begun)
            following += 1
        now = step_begun + step_s
    return rows
