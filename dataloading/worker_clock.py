"""Clocks that travel with the dataset into the workers and note what each batch costs there.

Nothing of PyTorch is changed: the dataset and the collate function are wrapped, in a loader built
for the measurement only. Records go to a small file mapped into memory, one part per worker, so
that no queue adds the cost that it should measure.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from dataloading.results import Result, format_seconds
from dataloading.settings import LoaderSettings, rebuild_dataloader

SLOTS = 4096  # batches kept per worker; older ones are overwritten
RECORD = np.dtype(
    [
        ("fetch_wall_ns", "i8"),
        ("fetch_cpu_ns", "i8"),
        ("collate_wall_ns", "i8"),
        ("collate_cpu_ns", "i8"),
        ("samples", "i8"),
        ("ended_ns", "i8"),
    ]
)


class WorkerRecords:
    """A file of records, one row of slots per worker; opened where it is used."""

    def __init__(self, workers: int) -> None:
        self.workers = max(1, workers)
        handle, name = tempfile.mkstemp(prefix="dataloading-", suffix=".records")
        os.close(handle)
        self.path = Path(name)
        shape = (self.workers, SLOTS)
        np.memmap(self.path, dtype=RECORD, mode="w+", shape=shape).flush()
        self._open: np.memmap | None = None
        self._count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"workers": self.workers, "path": self.path, "_open": None, "_count": 0}

    def write(self, record: tuple[int, ...]) -> None:
        """Note one batch; called in the worker that made it."""
        info = get_worker_info()
        row = info.id % self.workers if info is not None else 0
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
        return WorkerCosts.from_records(self.read())

    def remove(self) -> None:
        """Delete the file."""
        self._open = None
        self.path.unlink(missing_ok=True)


class BatchClock:
    """The time of the batch that is being made in this process."""

    def __init__(self, records: WorkerRecords) -> None:
        self.records = records
        self.wall_ns = self.cpu_ns = self.samples = 0

    def add(self, wall_ns: int, cpu_ns: int, samples: int) -> None:
        """Count time spent on fetching samples."""
        self.wall_ns += wall_ns
        self.cpu_ns += cpu_ns
        self.samples += samples

    def close(self, collate_wall_ns: int, collate_cpu_ns: int) -> None:
        """The batch is collated: write it down and start with the next one."""
        now = time.perf_counter_ns()
        self.records.write(
            (self.wall_ns, self.cpu_ns, collate_wall_ns, collate_cpu_ns, self.samples, now)
        )
        self.wall_ns = self.cpu_ns = self.samples = 0


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
        item = self.inner[index]
        self.clock.add(time.perf_counter_ns() - wall, time.thread_time_ns() - cpu, 1)
        return item

    def __getitems__(self, indices: list[Any]) -> Any:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        if getattr(self.inner, "__getitems__", None):  # the same rule as in torch's fetcher
            items = self.inner.__getitems__(indices)
        else:
            items = [self.inner[index] for index in indices]
        self.clock.add(time.perf_counter_ns() - wall, time.thread_time_ns() - cpu, len(indices))
        return items


class TimedIterable(_Delegating, IterableDataset):
    """An iterable dataset that notes what each sample costs."""

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.inner)
        while True:
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            try:
                sample = next(samples)
            except StopIteration:
                return
            self.clock.add(time.perf_counter_ns() - wall, time.thread_time_ns() - cpu, 1)
            yield sample


class TimedIterableWithLen(TimedIterable):
    """The same for an iterable dataset that knows its length."""

    def __len__(self) -> int:
        return len(self.inner)


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
    """

    batches: int
    fetch_s: float
    fetch_cpu_s: float
    collate_s: float
    collate_cpu_s: float
    samples: float

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
            f"collate a batch of {self.samples:.0f}, CPU busy {self.cpu_share:.0%} of it"
        )


def instrument(
    dataloader: DataLoader, settings: LoaderSettings
) -> tuple[DataLoader, WorkerRecords]:
    """Build the same loader with clocks inside.

    Args:
        dataloader: The loader to copy; it is not touched.
        settings: Settings of the copy.

    Returns:
        The copy and its records; call `records.remove()` when done.

    Raises:
        TypeError: The loader cannot be built again (see `rebuild_dataloader`).
    """
    records = WorkerRecords(settings.num_workers)
    clock = BatchClock(records)
    try:
        return (
            rebuild_dataloader(
                dataloader,
                settings,
                dataset=_timed(dataloader.dataset, clock),
                collate_fn=TimedCollate(dataloader.collate_fn, clock),
            ),
            records,
        )
    except BaseException:
        records.remove()
        raise


def _timed(dataset: Any, clock: BatchClock) -> Dataset:
    if not isinstance(dataset, IterableDataset):
        return TimedDataset(dataset, clock)
    kind = TimedIterableWithLen if hasattr(dataset, "__len__") else TimedIterable
    return kind(dataset, clock)
