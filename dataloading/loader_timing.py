"""The result of timing a loop, and the raw marks that it is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from dataloading.codes import Finding
from dataloading.observing import Observed
from dataloading.results import Result, format_seconds, format_value
from dataloading.settings import LoaderSettings
from dataloading.worker_costs import WorkerCosts

SPIKE_FACTOR = 3.0  # a step of more than 3 medians did something else than train
MIN_STEADY_STEPS = 3  # below this, the discarded steps are used after all, with a note
RATE_PARTS = 10  # the range of the rate is taken over this many parts of the run


@dataclass(frozen=True, repr=False, eq=False)
class LoaderTiming(Result):
    """Seconds of each steady step, and what start-up and epoch restarts cost apart from them.

    Attributes:
        wait_s: Array over steady steps: seconds the training waited for its batch.
        transfer_s: Array: moving the batch to `device` (0 where no device was given).
        step_s: Array: the train step itself, on a GPU as the GPU saw it.
        other_s: Array: host work that is neither loading nor training (logging, hooks).
        samples: Array: samples in each batch.
        startup_s: From asking for an iterator to its first batch; None when not seen.
        epoch_restart_s: Median seconds from the last step of an epoch to the first batch of the
            next; None when no second epoch was seen.
        steps_per_epoch: Batches in an epoch, where known.
        fetch_s: Median seconds that one batch costs the process that prepares it, where known.
        discarded_steps: Steps kept out of the steady figures: first batches and prefetch burst.
        clock: "host" or "cuda events".
        settings: The loader's settings, where it was a `DataLoader`.
        workers: What a batch costs inside the workers, where it could be measured.
        observed: The queue and the memory during the run, where they were watched.
        steps_are_training: Whether `step_s` holds training only: it was read off a GPU, or reported by
            `make_train_step` or `simulated_train_step`.
        first_wait_factor: Mean wait of the first epoch (or quarter of the run) over that of the
            rest; None where there is no rest.
        failure: Why the run was cut short, where the loader was the reason.
        notes: What the reader should know about these figures.
    """

    wait_s: np.ndarray
    transfer_s: np.ndarray
    step_s: np.ndarray
    other_s: np.ndarray
    samples: np.ndarray
    startup_s: float | None = None
    epoch_restart_s: float | None = None
    steps_per_epoch: int | None = None
    fetch_s: float | None = None
    discarded_steps: int = 0
    clock: str = "host"
    settings: LoaderSettings | None = None
    workers: WorkerCosts | None = None
    observed: Observed | None = None
    steps_are_training: bool = False
    first_wait_factor: float | None = None
    failure: Finding | None = None
    notes: tuple[str, ...] = ()

    derived: ClassVar[tuple[str, ...]] = (
        "steps",
        "samples_per_s",
        "slowest_samples_per_s",
        "fastest_samples_per_s",
        "wait_share",
        "transfer_share",
        "step_share",
        "other_share",
        "median_wait_s",
        "p95_wait_s",
        "overlap_ratio",
        "epoch_s",
    )

    @property
    def steps(self) -> int:
        """How many steady steps stand behind the figures."""
        return len(self.wait_s)

    @property
    def total_s(self) -> np.ndarray:
        """Seconds of each steady step, all parts together."""
        return self.wait_s + self.transfer_s + self.step_s + self.other_s

    @property
    def period_s(self) -> float:
        """Mean seconds from one steady step to the next."""
        return float(self.total_s.mean())

    @property
    def samples_per_s(self) -> float:
        """Steady rate over the whole run, weighted by time."""
        elapsed = float(self.total_s.sum())
        return float(self.samples.sum()) / elapsed if elapsed > 0 else float("inf")

    @property
    def slowest_samples_per_s(self) -> float:
        """Rate in the slowest tenth of the run."""
        return float(self._part_rates().min())

    @property
    def fastest_samples_per_s(self) -> float:
        """Rate in the fastest tenth of the run."""
        return float(self._part_rates().max())

    def _part_rates(self) -> np.ndarray:
        parts = min(RATE_PARTS, self.steps)
        chunks = np.array_split(np.arange(self.steps), parts)
        seconds = np.array([max(self.total_s[c].sum(), 1e-9) for c in chunks])
        return np.array([self.samples[c].sum() for c in chunks]) / seconds

    def _share(self, part: np.ndarray) -> float:
        elapsed = float(self.total_s.sum())
        return float(part.sum()) / elapsed if elapsed > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the steady time spent waiting for data."""
        return self._share(self.wait_s)

    @property
    def transfer_share(self) -> float:
        """Share of the steady time spent moving batches to the device."""
        return self._share(self.transfer_s)

    @property
    def step_share(self) -> float:
        """Share of the steady time spent training."""
        return self._share(self.step_s)

    @property
    def other_share(self) -> float:
        """Share of the steady time spent on other work of the host."""
        return self._share(self.other_s)

    @property
    def median_wait_s(self) -> float:
        """Median wait of a steady step."""
        return float(np.median(self.wait_s))

    @property
    def p95_wait_s(self) -> float:
        """Wait that 95 % of the steady steps stay below."""
        return float(np.percentile(self.wait_s, 95))

    @property
    def spike_share(self) -> float:
        """Share of the steady time by which rare long steps exceed the median step.

        0 where the steps are known to be training and nothing else (`steps_are_training`).
        """
        if self.steps_are_training:
            return 0.0
        usual = float(np.median(self.step_s))
        long = self.step_s[self.step_s > SPIKE_FACTOR * usual]
        return self._share(long - usual) if usual > 0 else 0.0

    @property
    def overlap_ratio(self) -> float | None:
        """How much of loading and training ran at the same time: 0 not at all, 1 fully.

        (sum of fetch + sum of step - total) / the smaller sum; None when fetching was not measured
        or there is nothing to overlap.
        """
        if self.fetch_s is None:
            return None
        fetch, step = self.fetch_s * self.steps, float(self.step_s.sum())
        smaller = min(fetch, step)
        if smaller <= 0:
            return None
        return float(np.clip((fetch + step - float(self.total_s.sum())) / smaller, 0.0, 1.0))

    @property
    def epoch_s(self) -> float | None:
        """Estimated seconds of one later epoch: restart and steady steps."""
        if self.steps_per_epoch is None:
            return None
        restart = self.epoch_restart_s if self.epoch_restart_s is not None else self.startup_s
        return (restart or 0.0) + self.period_s * self.steps_per_epoch

    def summary(self) -> str:
        """Rate, and how the time of a step splits."""
        parts = ", ".join(
            f"{name} {format_value('x_share', self._share(getattr(self, f'{name}_s')))}"
            for name in ("wait", "transfer", "step", "other")
        )
        rate = format_value("samples_per_s", self.samples_per_s)
        cut = "; cut short: " + self.failure.message if self.failure is not None else ""
        return (
            f"{rate}, {format_seconds(self.period_s)} a step ({parts}) over {self.steps} steps{cut}"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw how the time of a step splits; returns the Axes."""
        from dataloading.plots import plot_time_split

        return plot_time_split(self, ax=ax)


@dataclass
class StepLog:
    """Raw marks of a run, one entry per step, before anything is left out."""

    epoch: list[int] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    other_s: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    startup_s: float | None = None
    restarts_s: list[float] = field(default_factory=list)
    steps_per_epoch: int | None = None
    steps_are_training: bool = False

    def add(
        self,
        epoch: int,
        wait_s: float,
        step_s: float,
        samples: int,
        transfer_s: float = 0.0,
        other_s: float = 0.0,
    ) -> None:
        """Note one step."""
        self.epoch.append(epoch)
        self.wait_s.append(wait_s)
        self.transfer_s.append(transfer_s)
        self.step_s.append(step_s)
        self.other_s.append(other_s)
        self.samples.append(samples)

    def forget(self, keep: int) -> None:
        """Drop the oldest steps beyond `keep`."""
        surplus = len(self.epoch) - keep
        if surplus > 0:
            for column in (
                self.epoch,
                self.wait_s,
                self.transfer_s,
                self.step_s,
                self.other_s,
                self.samples,
            ):
                del column[:surplus]

    def timing(
        self,
        *,
        clock: str = "host",
        settings: LoaderSettings | None = None,
        workers: WorkerCosts | None = None,
        observed: Observed | None = None,
        failure: Finding | None = None,
        note: str | None = None,
    ) -> LoaderTiming:
        """Leave out start-up and prefetch burst, and summarise the rest."""
        queued_batches = settings.queued_batches if settings is not None else 0
        keep = steady_steps(np.array(self.epoch), queued_batches)
        notes = [note] if note else []
        if keep.sum() < MIN_STEADY_STEPS:
            keep = np.arange(len(self.epoch)) > 0 if len(self.epoch) > 1 else np.array([True])
            notes.append(
                "The run or its epochs are too short for steady figures: start-up is part of them."
            )
        waits = np.array(self.wait_s)[keep]
        fetch_s: float | None = None
        if workers is not None:
            fetch_s = workers.batch_s
        elif settings is not None and settings.num_workers == 0:  # then waiting is fetching
            fetch_s = float(np.median(waits))
        return LoaderTiming(
            wait_s=waits,
            transfer_s=np.array(self.transfer_s)[keep],
            step_s=np.array(self.step_s)[keep],
            other_s=np.array(self.other_s)[keep],
            samples=np.array(self.samples)[keep],
            startup_s=self.startup_s,
            epoch_restart_s=float(np.median(self.restarts_s)) if self.restarts_s else None,
            steps_per_epoch=self.steps_per_epoch,
            fetch_s=fetch_s,
            discarded_steps=int((~keep).sum()),
            clock=clock,
            settings=settings,
            workers=workers,
            observed=observed,
            failure=failure,
            steps_are_training=self.steps_are_training,
            first_wait_factor=self._first_wait_factor(),
            notes=tuple(notes),
        )

    def _first_wait_factor(self) -> float | None:
        """Wait of the first epoch, or quarter of the run, over the rest; first batches left out."""
        epoch, wait = np.array(self.epoch), np.array(self.wait_s)
        inner = np.flatnonzero(np.diff(epoch, prepend=-1) == 0)
        if len(inner) < 4 * MIN_STEADY_STEPS:
            return None
        first = epoch[inner] == epoch[0]
        if first.all():
            first = np.arange(len(inner)) < len(inner) // 4
        rest = float(wait[inner[~first]].mean())
        return float(wait[inner[first]].mean()) / rest if rest > 0 else None


def steady_steps(epoch: np.ndarray, queued_batches: int) -> np.ndarray:
    """Which steps show the steady state.

    Left out are the first step of the run and, with workers, the first batch of each epoch, the
    batches that were prepared while the first one was awaited (twice the queue, at most a third of
    the epoch) and the drain at its end (the queue, at most a sixth).

    Args:
        epoch: Epoch number of each step, ascending; shape (steps,).
        queued_batches: Workers x prefetch factor; 0 without workers.

    Returns:
        Boolean array of shape (steps,).
    """
    keep = np.ones(len(epoch), dtype=bool)
    keep[:1] = False
    if queued_batches == 0:
        return keep
    for number in np.unique(epoch):
        steps = np.flatnonzero(epoch == number)
        burst = max(1, min(2 * queued_batches, len(steps) // 3))
        drain = min(queued_batches, len(steps) // 6)
        keep[steps[:burst]] = False
        keep[steps[len(steps) - drain :]] = False
    return keep
