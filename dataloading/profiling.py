"""What one sample costs, stage by stage: read, decode, each transform, collate, transfer.

The stages are timed in this process with one thread, as a worker would run them, on a shallow copy
of the dataset whose transforms and file reader carry clocks. The dataset itself is not changed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
)

from dataloading.arguments import check_int
from dataloading.batches import batch_bytes, count_tensors
from dataloading.results import Result, format_bytes, format_seconds, format_share
from dataloading.sending import time_sending
from dataloading.stages import StageClock, dearest, stage_table, with_clocks
from dataloading.thread_counters import read_counters
from dataloading.watchdog import (
    ProbeTimeout,
    generators_of,
    one_thread,
    random_state_kept,
    time_limit,
)

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_BATCH_SIZE = 32  # for a bare dataset: the course's batch size
WARM_UP_SAMPLES = 2  # the first calls pay for lazy imports and opened files
SLOW_FACTOR = 5.0  # a sample of more than 5 medians is an outlier worth a look
BUDGET_S = 10.0  # a probe ends after this many seconds, with the samples it has by then
LIMIT_S = 11.0  # a single sample may not hold the probe longer than this
COLLATE_REPEATS = 5


@dataclass(frozen=True, repr=False, eq=False)
class SampleProfile(Result):
    """What one sample costs where it is prepared.

    Attributes:
        stages: DataFrame with a row per stage: `stage`, `wall_s`, `cpu_s`, `wait_s` (seconds per
            sample) and `share` of the sample's wall time, collate included.
        sample_wall_s, sample_cpu_s: Mean seconds to get one sample, without collating.
        collate_s: Seconds to collate one batch.
        batch_size: Samples in the batch that was collated.
        batch_bytes: Bytes of its tensors.
        tensors_per_batch: How many tensors travel with a batch.
        transfer_s: Seconds to send one such batch from a worker to this process; None where it
            was not measured.
        slow_samples: DataFrame of outliers: `index`, `wall_s`, `times_median`.
        samples: How many samples were timed.
        wall_s: Array of the seconds of each sample, in the order they were fetched.
        run_delay_s: Mean seconds that a sample waited for a CPU which others were using; None
            where the system does not tell.
        notes: What the reader should know about these figures.
    """

    stages: pd.DataFrame
    sample_wall_s: float
    sample_cpu_s: float
    collate_s: float
    batch_size: int
    batch_bytes: int
    tensors_per_batch: int
    transfer_s: float | None
    slow_samples: pd.DataFrame
    samples: int
    wall_s: np.ndarray
    run_delay_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def batch_s(self) -> float:
        """Seconds to fetch and collate one batch."""
        return self.sample_wall_s * self.batch_size + self.collate_s

    @property
    def sample_wait_s(self) -> float:
        """Mean seconds that a sample waits for something else than a CPU, such as a disk."""
        waiting = self.sample_wall_s - self.sample_cpu_s - (self.run_delay_s or 0.0)
        return max(0.0, waiting)

    @property
    def cpu_share(self) -> float:
        """Share of a batch's time in which the CPU works."""
        cpu = self.sample_cpu_s * self.batch_size + self.collate_s
        return min(1.0, cpu / self.batch_s) if self.batch_s > 0 else 1.0

    @property
    def top_stage(self) -> tuple[str, float]:
        """Name and share of the dearest stage."""
        return dearest(self.stages)

    def rows(self) -> list[tuple[str, Any]]:
        """Each stage, then the batch."""
        stages = [
            (stage, f"{format_seconds(wall_s)} ({format_share(share)})")
            for stage, wall_s, share in self.stages[["stage", "wall_s", "share"]]
            .to_numpy()
            .tolist()
        ]
        return [
            *stages,
            ("batch", f"{format_bytes(self.batch_bytes)} in {self.tensors_per_batch} tensors"),
            ("transfer_s", self.transfer_s),
            ("slow samples", len(self.slow_samples)),
            ("notes", self.notes),
        ]

    def summary(self) -> str:
        """Cost of a sample and its largest stage."""
        stage, share = self.top_stage
        return (
            f"{format_seconds(self.sample_wall_s)} a sample "
            f"(CPU busy {format_share(self.sample_cpu_s / max(self.sample_wall_s, 1e-12))}), "
            f"most of it {stage} ({format_share(share)}), over {self.samples} samples"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the stages of one sample as a waterfall; returns the Axes."""
        from dataloading.plots import plot_sample_stages

        return plot_sample_stages(self, ax=ax)


def profile_samples(
    dataset_or_dataloader: Dataset | DataLoader, *, samples: int = 64
) -> SampleProfile:
    """Find out what one sample costs, stage by stage, in this process.

    Args:
        dataset_or_dataloader: A dataset, or a loader whose dataset, batch size and collate
            function are taken. Samples are drawn evenly over a map-style dataset.
        samples: How many samples to time; fewer when ten seconds are over.

    Returns:
        A `SampleProfile`.

    Raises:
        TypeError: Neither a dataset nor a loader, or `samples` is not a whole number.
        ValueError: `samples` is below 1, or the dataset is empty.
        ProbeTimeout: The first sample took longer than the probe's time limit.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> profile = profile_samples(TensorDataset(torch.zeros(100, 3)))
        >>> profile.samples, profile.tensors_per_batch, profile.batch_bytes
        (64, 1, 384)

    Explained in: notebook 01
    """
    check_int("samples", samples, least=1)
    loader = dataset_or_dataloader if isinstance(dataset_or_dataloader, DataLoader) else None
    dataset = loader.dataset if loader is not None else dataset_or_dataloader
    known = hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset)
    if not known or isinstance(dataset, str | bytes | type):
        raise TypeError(f"Expected a dataset or a DataLoader, got {type(dataset).__name__}.")
    clock = StageClock()
    timed = with_clocks(dataset, clock)
    with (
        random_state_kept(*generators_of(loader)),
        one_thread(),
        time_limit(LIMIT_S, lambda: f"Fetching sample {clock.current.index}"),
    ):
        before = read_counters()
        fetched = _fetch(timed, dataset, clock, samples, _batch_size(loader))
        delay_ns = read_counters().since(before).run_delay_ns
        if not fetched:
            raise ValueError(
                f"{type(dataset).__name__} has no samples to profile; expected at least one."
            )
        unbatched = (
            loader is not None and loader.batch_sampler is None and loader.batch_size is None
        )
        size = 1 if unbatched else min(_batch_size(loader), len(fetched))
        collate = loader.collate_fn if loader is not None else default_collate
        batch, collate_s = _time_collate(collate, fetched[0] if unbatched else fetched[:size])
    transfer_s, notes = time_sending(batch)
    run_delay_s = None if delay_ns is None else delay_ns / 1e9 / len(fetched)
    return _summarise(clock, batch, size, collate_s, transfer_s, run_delay_s, notes)


def _fetch(timed: Any, dataset: Any, clock: StageClock, samples: int, batch_size: int) -> list[Any]:
    """Fetch samples until there are enough or the budget is over."""
    deadline = time.perf_counter() + BUDGET_S
    fetched: list[Any] = []
    iterable = isinstance(dataset, IterableDataset)
    if iterable:
        source = _iterate(timed, clock)
    elif fetches_batches(dataset):
        source = _pick_batches(timed, clock, samples, batch_size)
    else:
        source = _pick(timed, clock, samples)
    try:
        for item in islice(source, samples + WARM_UP_SAMPLES):
            fetched.append(item)
            if time.perf_counter() > deadline:
                break
    except ProbeTimeout:
        if not fetched:
            raise
    if len(fetched) > WARM_UP_SAMPLES:
        del clock.samples[:WARM_UP_SAMPLES]
        if not iterable:  # it was the first sample again
            del fetched[:WARM_UP_SAMPLES]
    return fetched


def _pick(dataset: Any, clock: StageClock, samples: int) -> Iterator[Any]:
    """Samples spread evenly over a map-style dataset, the first of them again for warming up."""
    count = len(dataset)
    if count == 0:
        return
    spread = np.linspace(0, count - 1, num=min(samples, count)).astype(int).tolist()
    for index in [*(spread[:1] * WARM_UP_SAMPLES), *spread]:
        yield clock.sample(index, partial(dataset.__getitem__, index))


def fetches_batches(dataset: Any) -> bool:
    """Whether a data set gets the samples of a batch at once; a `Subset` does as what it holds."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _pick_batches(dataset: Any, clock: StageClock, samples: int, size: int) -> Iterator[Any]:
    """The same for a data set that gets a batch at once; each sample counts as its share."""
    count = len(dataset)
    spread = (
        np.linspace(0, count - 1, num=min(samples, count)).astype(int).tolist() if count else []
    )
    parts = [spread[first : first + size] for first in range(0, len(spread), size)]
    for chosen in [spread[:1] * WARM_UP_SAMPLES, *parts] if spread else []:
        items = clock.sample(chosen[0], partial(dataset.__getitems__, chosen))
        clock.share_out(chosen)
        yield from items


def _iterate(dataset: Any, clock: StageClock) -> Iterator[Any]:
    source = iter(dataset)
    number = 0
    while True:
        try:
            item = clock.sample(number, lambda: next(source))
        except StopIteration:
            return
        number += 1
        yield item


def _batch_size(loader: DataLoader | None) -> int:
    if loader is None:
        return DEFAULT_BATCH_SIZE
    if loader.batch_size is not None:
        return loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None) or DEFAULT_BATCH_SIZE


def _time_collate(collate: Callable[[Any], Any], samples: Any) -> tuple[Any, float]:
    """Collate the same samples a few times; returns a batch and the median seconds."""
    times = []
    for _ in range(COLLATE_REPEATS):
        fresh = _fresh(samples)
        started = time.perf_counter()
        batch = collate(fresh)
        times.append(time.perf_counter() - started)
    return batch, float(np.median(times))


def _fresh(samples: Any) -> Any:
    """The same samples in new lists and dicts: some collate functions take things out of them."""
    if isinstance(samples, list):
        return [
            copy.copy(sample) if isinstance(sample, dict | list) else sample for sample in samples
        ]
    return copy.copy(samples) if isinstance(samples, dict) else samples


def _summarise(
    clock: StageClock,
    batch: Any,
    batch_size: int,
    collate_s: float,
    transfer_s: float | None,
    run_delay_s: float | None,
    notes: Iterable[str],
) -> SampleProfile:
    import pandas as pd

    wall = np.array([sample.wall_ns for sample in clock.samples]) / 1e9
    wall_mean = float(wall.mean())
    cpu_mean = float(np.mean([sample.cpu_ns for sample in clock.samples])) / 1e9
    collate = (collate_s / batch_size, collate_s / batch_size)
    stages = stage_table(clock.stage_means_s(), (wall_mean, cpu_mean), collate)
    median = float(np.median(wall))
    slow = [
        (sample.index, seconds, seconds / median)
        for sample, seconds in zip(clock.samples, wall.tolist(), strict=True)
        if median > 0 and seconds > SLOW_FACTOR * median
    ]
    return SampleProfile(
        stages=stages,
        sample_wall_s=wall_mean,
        sample_cpu_s=min(cpu_mean, wall_mean),
        collate_s=collate_s,
        batch_size=batch_size,
        batch_bytes=batch_bytes(batch),
        tensors_per_batch=count_tensors(batch),
        transfer_s=transfer_s,
        slow_samples=pd.DataFrame(slow, columns=["index", "wall_s", "times_median"]),
        samples=len(wall),
        wall_s=wall,
        run_delay_s=run_delay_s,
        notes=tuple(notes),
    )
