"""How fast a loader with other settings would be, and what it would need.

The step time is the largest of what the parts need (an operational bound): the train step with the
hand-over of its batch, the workers (batch time over workers) and the CPUs (all CPU work of a step
over the usable CPUs). Where batch times differ, a queue of finished batches hides that only in part:
the timeline plays the run batch by batch and says how much is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dataloading.arguments import check_amount
from dataloading.batch_costs import BatchCosts
from dataloading.budgets import over_budget, resource_needs
from dataloading.machine import Machine, inspect_machine
from dataloading.profiling import SampleProfile
from dataloading.results import Result, format_value
from dataloading.settings import LoaderSettings

if TYPE_CHECKING:
    import pandas as pd

# Standard errors of a prediction, as shares of the step time; `benchmarks/model` checks that the
# intervals made from them cover what is measured.
SAME_ERROR = 0.02  # of the formulas, where everything was measured
STEP_ERROR = 0.01  # of the train step when it alone is the limit
FURTHER_ERROR = 0.03  # with more workers than were tried
RESIZED_ERROR = 0.03  # for each halving or doubling of the batch size
WAKE_UP_S = 0.0005  # seconds: what waited goes on with cold caches, on a core that slept
ELSEWHERE_ERROR = 0.10  # on another machine, whose CPUs may be faster or slower
NINETY = 1.645  # standard errors on each side of a 90 % interval
MEMORY_ERROR = 0.3  # half-width of the memory interval, as a share, where a worker was not weighed
WEIGHED_ERROR = 0.1  # the same where it was
TIMELINE_BATCHES = 60  # enough to see the steady state behind a first burst
PLAYED_BATCHES = 200  # enough for the mean of batches that differ
FELT_SHARE = 0.1  # of a train step
UNEVEN = 0.02  # batches whose times differ by less (standard deviation over mean) need no play


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
        `compute`, `workers` and `cpu` in seconds, and `transfer` where handing over a batch that
        stands ready is a noticeable part of a step; without workers, `loading` takes the place of
        `workers`: the sum of loading and training, which take turns.

    Source: P. Denning, J. Buzen, The Operational Analysis of Queueing Network Models (1978).
    """
    costs = costs.for_batch_size(settings.batch_size)
    cpus = machine.cpu_time_per_rank
    workers = settings.num_workers
    if workers == 0:
        alone = costs.alone_s if costs.alone_s is not None else costs.cpu_s + costs.wait_s
        in_turn_s = (costs.cpu_s + costs.step_cpu_s) / min(1.0, cpus)
        return {"compute": step_s, "loading": alone + step_s, "cpu": in_turn_s}
    crowding = costs.crowding_with(workers, cpus)
    # a hand-over that is felt has a name of its own
    ready = "transfer" if costs.handover_s > FELT_SHARE * step_s else "compute"
    return {
        "compute": step_s,
        ready: step_s + costs.handover_s,
        "workers": costs.batch_s * crowding / workers,
        "cpu": _cpu_s(costs, workers, crowding, cpus) + costs.step_cpu_s / cpus,
    }


def _cpu_s(costs: BatchCosts, workers: int, crowding: float, cpus: float) -> float:
    """Seconds a batch keeps all CPUs busy; as measured where more workers than CPUs were tried."""
    busy_s = (costs.cpu_s + costs.send_s) * crowding / cpus
    if costs.saturated_s is None or costs.cpus != cpus or workers <= costs.crowd:
        return busy_s
    full_s = costs.batch_s * costs.crowding / costs.crowd
    share = min(1.0, (workers - costs.crowd) / costs.crowd)
    return full_s + share * (costs.saturated_s - full_s)


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(Result):
    """What a setting would give; every figure has a 90 % interval `(low, high)`.

    Attributes:
        step_s: Seconds from one step to the next.
        samples_per_s: Samples per second.
        wait_share: Share of a step spent waiting for data.
        memory_bytes: Private memory of the workers, and their queue of finished batches.
        shared_memory_bytes: Bytes of finished batches that wait in shared memory.
        open_files: File descriptors held by workers and queued batches.
        limit: The part that binds: `compute`, `transfer`, `workers`, `loading` or `cpu`.
        shortage: Which budget of the machine this would overrun, in words; None when it fits.
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
    shortage: str | None = None

    def summary(self) -> str:
        """One line."""
        low, high = self.samples_per_s_interval
        rate = format_value("samples_per_s", self.samples_per_s)
        short = f"; does not fit: {self.shortage}" if self.shortage else ""
        interval = f"90 % interval {format_value('samples_per_s', low)} to {format_value('samples_per_s', high)}"
        return f"{rate} ({interval}), limited by {self.limit}{short}"

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
        (
            "BatchCosts (measure_batch_costs) or a SampleProfile (profile_samples)",
            costs,
            BatchCosts,
        ),
        ("LoaderSettings", settings, LoaderSettings),
        ("a Machine from inspect_machine", machine, Machine),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"Expected {name}, got {type(value).__name__}.")
    asked, costs = costs, costs.for_batch_size(settings.batch_size)
    bounds = step_bounds(costs, settings, step_s, machine)
    limit = max(bounds, key=lambda part: bounds[part])
    seconds = step_seconds(costs, settings, step_s, machine)
    error = NINETY * _error(asked, settings, machine, limit, seconds)
    low, high = max(seconds / (1 + error), step_s, 1e-9), seconds * (1 + error)
    needs = resource_needs(costs, settings, machine)
    memory, spread = needs["memory_bytes"], WEIGHED_ERROR if costs.worker_bytes else MEMORY_ERROR
    return Prediction(
        step_s=seconds,
        step_s_interval=(low, high),
        samples_per_s=costs.batch_size / seconds,
        samples_per_s_interval=(costs.batch_size / high, costs.batch_size / low),
        wait_share=1 - step_s / seconds,
        wait_share_interval=(1 - step_s / low, 1 - step_s / high),
        memory_bytes=memory,
        memory_bytes_interval=(int(memory * (1 - spread)), int(memory * (1 + spread))),
        shared_memory_bytes=needs["shared_memory_bytes"],
        shared_memory_bytes_interval=(0, needs["shared_memory_bytes"] + 2 * costs.batch_bytes),
        open_files=needs["open_files"],
        open_files_interval=(0, needs["open_files"] + 2 * costs.tensors),
        limit=limit,
        settings=settings,
        timeline=simulate_timeline(costs, settings, step_s=step_s, machine=machine),
        shortage=over_budget(settings, costs, machine, fraction=1.0),
    )


def step_seconds(
    costs: BatchCosts, settings: LoaderSettings, step_s: float, machine: Machine
) -> float:
    """Seconds from one step to the next: the largest bound, or more where batches are uneven.

    Arguments as for `step_bounds`.
    """
    costs = costs.for_batch_size(settings.batch_size)
    bound = max(step_bounds(costs, settings, step_s, machine).values())
    return max(bound, _uneven_s(costs, settings, step_s, machine), 1e-9)


def _uneven_s(
    costs: BatchCosts, settings: LoaderSettings, step_s: float, machine: Machine
) -> float:
    """Seconds a step takes where batches differ more than the queue hides; 0 where they do not."""
    spread = costs.batch_factors
    if spread is None or settings.num_workers == 0 or float(np.std(spread)) < UNEVEN:
        return 0.0
    # every size of batch as often as it was seen, in an order that does not follow the size
    factors = np.quantile(spread, (np.arange(PLAYED_BATCHES) + 0.5) / PLAYED_BATCHES)
    factors = np.random.default_rng(0).permutation(
        factors * float(np.mean(spread) / factors.mean())
    )
    played = simulate_timeline(
        costs,
        settings,
        step_s=step_s,
        machine=machine,
        batches=PLAYED_BATCHES,
        batch_factors=factors,
    )
    ended = played["step_ended_s"].to_numpy()
    begun = PLAYED_BATCHES // 4  # the first batches come from all workers at once
    return float(ended[-1] - ended[begun]) / (PLAYED_BATCHES - 1 - begun)


def _error(
    costs: BatchCosts, settings: LoaderSettings, machine: Machine, limit: str, seconds: float
) -> float:
    """Standard error of a predicted step time, as a share."""
    wakes_up = WAKE_UP_S / max(seconds, WAKE_UP_S)
    if limit == "compute":
        return float(np.hypot(STEP_ERROR, wakes_up))
    parts = [SAME_ERROR, costs.error_share]
    if limit in ("transfer", "loading"):  # the training process waits in each step
        parts.append(wakes_up)
    if settings.num_workers > max(costs.crowd, 1):
        parts.append(FURTHER_ERROR)
    if settings.batch_size is not None:
        parts.append(RESIZED_ERROR * abs(float(np.log2(settings.batch_size / costs.batch_size))))
    if costs.cpus is not None and costs.cpus != machine.cpu_time_per_rank:
        parts.append(ELSEWHERE_ERROR)
    return float(np.hypot.reduce(parts))


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
        step_s: Seconds of a train step when data is free.
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
    alone = step_bounds(costs, settings, 0.0, machine)["loading"]
    now = startup_s
    for number, factor in enumerate(factors):
        ready = now + factor * alone
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
    batch_s = max(bounds["workers"], bounds["cpu"]) * workers  # a lack of CPUs slows all alike
    busy_s = step_s + costs.handover_s
    free = [startup_s] * workers
    under_way: dict[int, tuple[float, float]] = {}
    rows: list[tuple[float, ...]] = []
    now = 0.0

    def begin(number: int, at: float) -> None:
        worker = number % workers
        begun = max(free[worker], at)
        free[worker] = begun + factors[number] * batch_s
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
        rows.append((number, number % workers, begun, ready, now, step_begun, step_begun + busy_s))
        if following < len(factors):
            begin(following, step_begun)
            following += 1
        now = step_begun + busy_s
    return rows
