"""Clocks that travel with the dataset into the workers and note what each batch costs there.

Nothing of PyTorch is changed: the dataset and the collate function are wrapped, in a loader built
for the measurement only. Records go to a small file mapped into memory, one part per worker, so
that no queue adds the cost that it should measure.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from dataloading.file_opens import OpenCounter
from dataloading.settings import LoaderSettings, rebuild_dataloader
from dataloading.stages import with_clocks
from dataloading.thread_counters import ThreadCounters, read_counters
from dataloading.watchdog import ProbeTimeout
from dataloading.worker_costs import UNKNOWN
from dataloading.worker_records import WorkerRecords, worker_id
from dataloading.worker_stages import StageWatch

ENDED = object()  # what comes after the last sample of a stream
AT_ENTRY = re.compile(r"at entry (\d+)")  # torch's word for a place in the batch
FIRST_BATCHES = 8  # have readings of their own, so that a short run has some
COUNTERS_EVERY_NS = 20_000_000  # reading them takes some 50 µs; short batches share a reading


class BatchClock:
    """The time of the batch that is being made in this process."""

    def __init__(self, records: WorkerRecords) -> None:
        self.records = records
        self.opens = OpenCounter()
        self.wall_ns = self.cpu_ns = self.samples = 0
        self.indices: list[Any] = []  # of the batch that was fetched last
        self._counters = ThreadCounters()
        self._counters_due_ns = self._batches = 0
        self._watch: StageWatch | None = None
        self._turn = 0

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
        if not all(type(index) is int and index >= 0 for index in indices):
            return [self.noted(index, operator.getitem, dataset, index) for index in indices]
        if indices and (watch := self.watch) is not None and watch.is_due():
            # another sample each time: the first of a batch may not be like the rest
            self._turn += 1
            here = self._turn % len(indices)
            index = indices[here]
            return [
                *self._fetch_each(dataset, indices[:here]),
                self.noted(index, watch.fetch, operator.getitem, dataset, index),
                *self._fetch_each(dataset, indices[here + 1 :]),
            ]
        return self._fetch_each(dataset, indices)

    def _fetch_each(self, dataset: Any, indices: list[Any]) -> list[Any]:
        progress, worker = self.records.progress, worker_id()
        entries, place = progress.entry(worker)
        items: list[Any] = []
        began, clock, index = place + 1, time.perf_counter_ns, None
        try:
            for index in indices:  # a call of our own in here would cost each some 5 µs
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
        self._batches += 1
        if now > self._counters_due_ns or self._batches <= FIRST_BATCHES:
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
            self.opens.cost_ns,
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
        self.clock.indices = indices
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
        try:
            batch = self.inner(samples)
        except ProbeTimeout:
            raise
        except Exception as error:
            index = misfit(str(error), self.clock.indices)
            self.clock.records.progress.fail(worker_id(), index, error, collating=True)
            raise
        self.clock.close(time.perf_counter_ns() - wall, time.thread_time_ns() - cpu)
        return batch


def misfit(text: str, indices: list[Any]) -> Any:
    """The sample that does not fit in with the first of its batch; None where torch names no entry.

    Example:
        >>> misfit("stack expects each tensor to be equal size, but got [3] at entry 0 and [5] at "
        ...     "entry 2", [40, 7, 21])
        21
    """
    entries = [int(number) for number in AT_ENTRY.findall(text)]
    return indices[entries[-1]] if entries and entries[-1] < len(indices) else None


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
