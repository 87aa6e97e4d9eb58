"""Clocks that travel with the dataset into the workers and note what each batch costs there.

Nothing of PyTorch is changed: the dataset and the collate function are wrapped, in a loader built
for the measurement only. Records go to a small file mapped into memory, one part per worker, so
that no queue adds the cost that it should measure.
"""

from __future__ import annotations

import operator
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from dataloading.file_opens import OpenCounter
from dataloading.progress_notes import Progress
from dataloading.results import Result, format_seconds, format_share
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.stages import with_clocks
from dataloading.thread_counters import ThreadCounters, read_counters
from dataloading.watchdog import ProbeTimeout
from dataloading.worker_stages import StageNotes, StageWatch

if TYPE_CHECKING:
    import pandas as pd

SLOTS = 4096  # batches kept per worker; older ones are overwritten
RECORD = np.dtype(
    [
        ("fetch_wall_ns", "i8"),
        ("fetch_cpu_ns", "i8"),
        ("collate_wall_ns", "i8"),
        ("collate_cpu_ns", "i8"),
        ("samples", "i8"),
        ("ended_ns", "i8"),
        # running totals of the worker: the difference of two records is what happened in between
        ("worker", "i8"),
        ("process_cpu_ns", "i8"),
        ("run_delay_ns", "i8"),
        ("switches", "i8"),
        ("forced_switches", "i8"),
        ("major_faults", "i8"),
        ("read_calls_bytes", "i8"),
        ("storage_bytes", "i8"),
        ("threads", "i8"),
        ("opens", "i8"),
        ("open_ns", "i8"),
    ]
)
ENDED = object()  # what comes after the last sample of a stream
COUNTERS_EVERY_NS = 20_000_000  # reading them takes some 50 µs; short batches share a reading
UNKNOWN = -1  # stands in a record where the system does not tell
FEWEST_FOR_TAIL = 30  # records below which a 99th percentile says nothing


class WorkerRecords:
    """A file of records, one row of slots per worker; opened where it is used."""

    def __init__(self, workers: int) -> None:
        self.workers = max(1, workers)
        handle, name = tempfile.mkstemp(prefix="dataloading-", suffix=".records")
        os.close(handle)
        self.path = Path(name)
        shape = (self.workers, SLOTS)
        np.memmap(self.path, dtype=RECORD, mode="w+", shape=shape).flush()
        self.progress = Progress(self.path.with_suffix(".progress"), self.workers)
        self.stages = StageNotes(self.path.with_suffix(".stages"), self.workers)
        self._open: np.memmap | None = None
        self._count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_count": 0}

    def write(self, record: tuple[int, ...]) -> None:
        """Note one batch; called in the worker that made it."""
        row = worker_id() % self.workers
        if self._open is None:
            shape = (self.workers, SLOTS)
            self._open = np.memmap(self.path, dtype=RECORD, mode="r+", shape=shape)
            # behind the records of the worker that had this row in the epoch before
            self._count = int(np.count_nonzero(self._open["ended_ns"][row]))
        self._open[row, self._count % SLOTS] = record
        self._count += 1

    def read(self) -> np.ndarray:
        """The records so far, oldest first; a structured array with one row per batch."""
        shape = (self.workers, SLOTS)
        mapped = np.memmap(self.path, dtype=RECORD, mode="r", shape=shape)
        records = np.array(mapped).ravel()
        del mapped
        records = records[records["ended_ns"] > 0]
        return records[np.argsort(records["ended_ns"])]

    def summary(self) -> WorkerCosts | None:
        """What a batch cost so far; None when no batch was made."""
        costs = WorkerCosts.from_records(self.read())
        if costs is None or not costs.samples:
            return costs
        collate = (costs.collate_s / costs.samples, costs.collate_cpu_s / costs.samples)
        return replace(costs, stages=self.stages.table(*collate))

    def remove(self) -> None:
        """Delete the file."""
        self._open = None
        self.path.unlink(missing_ok=True)
        self.progress.remove()
        self.stages.remove()


def worker_id() -> int:
    """Number of the worker that this process is; 0 in the training process."""
    info = get_worker_info()
    return info.id if info is not None else 0


class BatchClock:
    """The time of the batch that is being made in this process."""

    def __init__(self, records: WorkerRecords) -> None:
        self.records = records
        self.opens = OpenCounter()
        self.wall_ns = self.cpu_ns = self.samples = 0
        self._counters = ThreadCounters()
        self._counters_due_ns = 0
        self._watch: StageWatch | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None}

    @property
    def watch(self) -> StageWatch | None:
        """What times samples in detail; None in the training process, whose data set is the user's."""
        if self._watch is None and get_worker_info() is not None:
            self._watch = StageWatch(self.records.stages, worker_id())
        return self._watch

    def noted(self, index: Any, fetch: Callable[..., Any], *args: Any) -> Any:
        """Call `fetch` for a sample, a batch or the next one of a stream, and leave word of it."""
        progress, worker = self.records.progress, worker_id()
        progress.begin(worker, index)
        try:
            item = fetch(*args)
        except ProbeTimeout:  # the watchdog's, not the data set's: the sample is still under way
            raise
        except Exception as error:
            progress.fail(worker, index, error)
            raise
        progress.end(worker)
        return item

    def fetch_all(self, dataset: Any, indices: list[Any]) -> list[Any]:
        """Fetch samples one by one, leaving word of which is under way, and of how one failed."""
        progress, worker = self.records.progress, worker_id()
        if not all(type(index) is int and index >= 0 for index in indices):
            return [self.noted(index, operator.getitem, dataset, index) for index in indices]
        items: list[Any] = []
        if indices and (watch := self.watch) is not None and watch.is_due():
            items.append(self.noted(indices[0], watch.fetch, operator.getitem, dataset, indices[0]))
        entries, place = progress.entry(worker)
        began, clock, index = place + 1, time.perf_counter_ns, None
        try:
            for index in indices[
                len(items) :
            ]:  # a call of our own in here would cost every sample some 5 µs
                entries[began] = clock()
                entries[place] = index
                items.append(dataset[index])
        except ProbeTimeout:
            raise
        except Exception as error:
            progress.fail(worker, index, error)
            raise
        progress.end(worker)
        return items

    def fetch_batch(self, dataset: Any, indices: list[Any]) -> Any:
        """Fetch a batch that the data set gets at once."""
        if (watch := self.watch) is not None and watch.is_due():
            return self.noted(indices, watch.fetch, get_items, dataset, indices, len(indices))
        return self.noted(indices, get_items, dataset, indices)

    def add(self, wall_ns: int, cpu_ns: int, samples: int) -> None:
        """Count time spent on fetching samples."""
        self.opens.begin()
        self.wall_ns += wall_ns
        self.cpu_ns += cpu_ns
        self.samples += samples

    def close(self, collate_wall_ns: int, collate_cpu_ns: int) -> None:
        """The batch is collated: write it down and start with the next one."""
        now = time.perf_counter_ns()
        if now > self._counters_due_ns:
            self._counters = read_counters()
            self._counters_due_ns = now + COUNTERS_EVERY_NS
        counters = self._counters
        totals = (
            worker_id(),
            time.process_time_ns(),
            counters.run_delay_ns,
            counters.switches,
            counters.forced_switches,
            counters.major_faults,
            counters.read_calls_bytes,
            counters.storage_bytes,
            counters.threads,
            self.opens.count,
            self.opens.estimated_ns,
        )
        self.records.write(
            (
                *(self.wall_ns, self.cpu_ns, collate_wall_ns, collate_cpu_ns, self.samples, now),
                *(UNKNOWN if total is None else total for total in totals),
            )
        )
        self.wall_ns = self.cpu_ns = self.samples = 0


def get_items(dataset: Any, indices: list[Any]) -> Any:
    """The samples of a batch, from a data set that gets them at once."""
    return dataset.__getitems__(indices)


class _Delegating:
    """Answers for the wrapped object wherever the wrapper has no answer of its own."""

    def __init__(self, inner: Any, clock: BatchClock) -> None:
        self.inner = inner
        self.clock = clock

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("inner", "clock"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("inner", "clock"):
            object.__setattr__(self, name, value)
        else:  # a worker_init_fn may give each worker its part through get_worker_info().dataset
            setattr(self.inner, name, value)


class TimedDataset(_Delegating, Dataset):
    """A map-style dataset that notes what fetching costs, once per batch."""

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: Any) -> Any:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        item = self.clock.noted(index, operator.getitem, self.inner, index)
        self.clock.add(time.perf_counter_ns() - wall, time.thread_time_ns() - cpu, 1)
        return item

    def __getitems__(self, indices: list[Any]) -> Any:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        if getattr(self.inner, "__getitems__", None):  # the same rule as in torch's fetcher
            items = self.clock.fetch_batch(self.inner, indices)
        else:
            items = self.clock.fetch_all(self.inner, indices)
        self.clock.add(time.perf_counter_ns() - wall, time.thread_time_ns() - cpu, len(indices))
        return items


class TimedIterable(_Delegating, IterableDataset):
    """An iterable dataset that notes what each sample costs."""

    def __iter__(self) -> Iterator[Any]:
        watch = self.clock.watch
        samples = iter(self.inner if watch is None else with_clocks(self.inner, watch.clock))
        for number in count():
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            take = watch.next if watch is not None and watch.is_due() else next
            sample = self.clock.noted(number, take, samples, ENDED)
            if sample is ENDED:
                return
            self.clock.add(time.perf_counter_ns() - wall, time.thread_time_ns() - cpu, 1)
            yield sample


class TimedIterableWithLen(TimedIterable):
    """The same for an iterable dataset that knows its length."""

    def __len__(self) -> int:
        return len(self.inner)


class TimedSampler:
    """A sampler in the training process that notes what choosing indices costs."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.spent_ns = 0
        self.draws = 0

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self.inner)
        while True:
            started = time.perf_counter_ns()
            try:
                chosen = next(indices)
            except StopIteration:
                return
            finally:
                self.spent_ns += time.perf_counter_ns() - started
            self.draws += 1
            yield chosen

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def draw_s(self) -> float | None:
        """Mean seconds of a draw: one index, or the indices of one batch; None before the first."""
        return self.spent_ns / self.draws / 1e9 if self.draws else None


class TimedCollate:
    """A collate function that notes what it costs, and ends the record of the batch."""

    def __init__(self, inner: Any, clock: BatchClock) -> None:
        self.inner = inner
        self.clock = clock

    def __call__(self, samples: Any) -> Any:
        """Collate and note what it cost."""
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        batch = self.inner(samples)
        self.clock.close(time.perf_counter_ns() - wall, time.thread_time_ns() - cpu)
        return batch


@dataclass(frozen=True, repr=False, eq=False)
class WorkerCosts(Result):
    """What one batch costs in the process that prepares it (medians over batches).

    Attributes:
        batches: How many batches were seen.
        fetch_s, fetch_cpu_s: Wall and CPU seconds for getting the samples of one batch.
        collate_s, collate_cpu_s: The same for putting them together.
        samples: Samples per batch.
        slow_batch_factor: 99th percentile of the batches over their median; None with few batches.
        run_delay_share: Share of the batch time spent waiting for a CPU; None where unknown.
        extra_cpu_share: CPU time of the process's other threads, as a share of the batch time.
        threads: Threads in the process.
        read_bytes_per_sample: Bytes read, from the page cache too.
        storage_share: Share of them that came from storage, in the second half of the run.
        first_storage_share: The same in the first quarter.
        opens_per_sample, open_share: Files opened for a sample, and the share of its time that
            opening them takes; None where there are no workers to count in.
        switches_per_sample, forced_switches_per_sample: Times that a sample gave the CPU up to wait,
            and that the CPU was taken from it.
        major_faults_per_sample: Page faults that had to read from storage.
        stages: What each stage costs inside the workers, as `SampleProfile.stages`; None where too
            few samples were timed in detail.
    """

    batches: int
    fetch_s: float
    fetch_cpu_s: float
    collate_s: float
    collate_cpu_s: float
    samples: float
    slow_batch_factor: float | None = None
    run_delay_share: float | None = None
    extra_cpu_share: float | None = None
    threads: int | None = None
    read_bytes_per_sample: float | None = None
    storage_share: float | None = None
    first_storage_share: float | None = None
    opens_per_sample: float | None = None
    open_share: float | None = None
    switches_per_sample: float | None = None
    forced_switches_per_sample: float | None = None
    major_faults_per_sample: float | None = None
    stages: pd.DataFrame | None = None

    @classmethod
    def from_records(cls, records: np.ndarray) -> WorkerCosts | None:
        """Summarise records; None when there are none."""
        if len(records) == 0:
            return None

        def median(name: str) -> float:
            return float(np.median(records[name]))

        return cls(
            batches=len(records),
            fetch_s=median("fetch_wall_ns") / 1e9,
            fetch_cpu_s=median("fetch_cpu_ns") / 1e9,
            collate_s=median("collate_wall_ns") / 1e9,
            collate_cpu_s=median("collate_cpu_ns") / 1e9,
            samples=median("samples"),
            **extra_costs(records),
        )

    @property
    def batch_s(self) -> float:
        """Wall seconds that one batch takes in one worker."""
        return self.fetch_s + self.collate_s

    @property
    def cpu_share(self) -> float:
        """Share of that time in which the CPU worked; the rest was waiting."""
        return (self.fetch_cpu_s + self.collate_cpu_s) / self.batch_s if self.batch_s else 1.0

    def summary(self) -> str:
        """One line."""
        return (
            f"{format_seconds(self.fetch_s)} to fetch and {format_seconds(self.collate_s)} to "
            f"collate a batch of {self.samples:.0f}, CPU busy {format_share(self.cpu_share)} of it"
        )


def extra_costs(records: np.ndarray) -> dict[str, Any]:
    """What the running totals of the records tell about tails, threads, CPUs and storage."""
    wall = records["fetch_wall_ns"] + records["collate_wall_ns"]
    found: dict[str, Any] = {}
    if len(records) >= FEWEST_FOR_TAIL and np.median(wall) > 0:
        found["slow_batch_factor"] = float(np.percentile(wall, 99) / np.median(wall))
    known = records["threads"][records["threads"] > 0]
    found["threads"] = int(np.median(known)) if len(known) else None
    changes = [_changes(records[records["worker"] == w]) for w in np.unique(records["worker"])]
    total = {name: _sum(changes, name) for name in TOTALS}
    later = {name: _sum(changes, name, part=(0.5, 1.0)) for name in TOTALS}
    first = {name: _sum(changes, name, part=(0.0, 0.25)) for name in TOTALS}
    measured_ns, samples = total["wall_ns"], total["samples"]
    if measured_ns:
        found["run_delay_share"] = _ratio(total["run_delay_ns"], measured_ns)
        if total["process_cpu_ns"] is not None and total["cpu_ns"] is not None:
            extra_ns = max(0.0, total["process_cpu_ns"] - total["cpu_ns"])
            found["extra_cpu_share"] = _ratio(extra_ns, measured_ns)
        found["open_share"] = _ratio(total["open_ns"], measured_ns)
    if samples:
        found["read_bytes_per_sample"] = _ratio(total["read_calls_bytes"], samples)
        found["opens_per_sample"] = _ratio(total["opens"], samples)
        for name in ("switches", "forced_switches", "major_faults"):
            found[f"{name}_per_sample"] = _ratio(total[name], samples)
    found["storage_share"] = _ratio(later["storage_bytes"], later["read_calls_bytes"])
    found["first_storage_share"] = _ratio(first["storage_bytes"], first["read_calls_bytes"])
    return found


TOTALS = (
    *("process_cpu_ns", "run_delay_ns", "read_calls_bytes", "storage_bytes", "opens", "open_ns"),
    *("switches", "forced_switches", "major_faults"),
    *("wall_ns", "cpu_ns", "samples"),
)


def _changes(own: np.ndarray) -> dict[str, np.ndarray]:
    """From record to record of one worker, what was added to each total."""
    parts: dict[str, np.ndarray] = {
        "wall_ns": (own["fetch_wall_ns"] + own["collate_wall_ns"])[1:],
        "cpu_ns": (own["fetch_cpu_ns"] + own["collate_cpu_ns"])[1:],
        "samples": own["samples"][1:],
    }
    for name in TOTALS:
        if name not in parts:
            known = (own[name][1:] != UNKNOWN) & (own[name][:-1] != UNKNOWN)
            step = np.diff(own[name]).astype(float)
            # a worker that started anew counts from zero again
            parts[name] = np.where(known & (step >= 0), step, np.nan)
    return parts


def _sum(
    changes: list[dict[str, np.ndarray]], name: str, part: tuple[float, float] = (0.0, 1.0)
) -> float | None:
    """One total over all workers and a part of the run; None where it is not known."""
    values = [c[name][int(part[0] * len(c[name])) : int(part[1] * len(c[name]))] for c in changes]
    joined = np.concatenate(values) if values else np.array([])
    known = joined[~np.isnan(joined.astype(float))]
    return float(known.sum()) if len(known) else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def instrument(
    dataloader: DataLoader, settings: LoaderSettings
) -> tuple[DataLoader, WorkerRecords, TimedSampler | None]:
    """Build the same loader with clocks inside.

    Args:
        dataloader: The loader to copy; it is not touched.
        settings: Settings of the copy.

    Returns:
        The copy, its records and the clock on its sampler (None for an iterable dataset); call
        `records.remove()` when done.

    Raises:
        TypeError: The loader cannot be built again (see `rebuild_dataloader`).
    """
    records = WorkerRecords(settings.num_workers)
    clock = BatchClock(records)
    samplers: list[TimedSampler] = []

    def timed_sampler(inner: Any) -> TimedSampler:
        samplers.append(TimedSampler(inner))
        return samplers[0]

    try:
        copy = rebuild_dataloader(
            dataloader,
            settings,
            dataset=_timed(dataloader.dataset, clock),
            collate_fn=TimedCollate(dataloader.collate_fn, clock),
            wrap_sampler=timed_sampler,
        )
        return copy, records, samplers[0] if samplers else None
    except BaseException:
        records.remove()
        raise


def _timed(dataset: Any, clock: BatchClock) -> Dataset:
    if not isinstance(dataset, IterableDataset):
        return TimedDataset(dataset, clock)
    kind = TimedIterableWithLen if hasattr(dataset, "__len__") else TimedIterable
    return kind(dataset, clock)
