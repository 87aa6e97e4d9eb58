"""Memory of the training process and its workers over time, and what its growth means.

USS is what a process alone holds, RSS what it can reach without a page fault, shared pages included.
Copying shared pages on write raises USS and leaves RSS; keeping new objects raises both. Pages of
mapped files are left out of both, where the system tells them apart: reading a large array through a
memory map fills them, and they can be dropped at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from dataloading.processes import read_memory

READ_EVERY_S = 0.25  # a reading takes 1 to 15 ms a worker
MOST_OF_THE_TIME = 0.05  # spent on readings, which never lie within a timed part of a step
MAIN_EVERY_S = 0.1  # the main process is read the cheap way
SETTLING_READINGS = 2  # the first readings show workers that are still starting
FEWEST_READINGS = 5  # fewer readings show no growth
PARTS = 4  # of a run, in each of which a leak grows
LEAST_RISE = 0.1  # of the growth, from one part to the next
LEVELLED_SHARE = 0.35  # of the growth of the first half in the second: it is ending


@dataclass(frozen=True)
class Growth:
    """How the memory of some processes grew while a loader ran.

    Attributes:
        uss_bytes, rss_bytes: From the first settled reading to the last, summed over processes.
        uss_per_batch_bytes: The same per batch, in the second half of the run.
        levels_off: Whether the second half grew far less than the first.
        goes_on: Whether every part of the run grew by its share, as with a leak.
        batches: Batches delivered in that time.
        readings: How many readings stand behind it.
    """

    uss_bytes: int
    rss_bytes: int
    uss_per_batch_bytes: float
    levels_off: bool
    batches: int
    readings: int
    goes_on: bool = False


@dataclass
class Readings:
    """USS and RSS over time, with the number of batches delivered by then."""

    batches: list[int] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)

    def add(self, batch: int, memory: tuple[int, int] | None) -> None:
        """Note a reading; one that failed is left out."""
        if memory is not None:
            self.batches.append(batch)
            self.memory.append(memory)

    def growth(self) -> Growth | None:
        """How the memory grew; None with too few readings."""
        return find_growth(np.array(self.batches), np.array(self.memory, dtype=float))


class MemoryLog:
    """Memory of the main process and of the workers, read between batches."""

    def __init__(self) -> None:
        self.main = Readings()
        self._all_workers = [Readings()]  # one series for each set of workers
        self._pids: list[int] = []
        self._next_s = self._next_main_s = 0.0

    def read(self, batch: int, iterator: Any) -> None:
        """Take a reading when it is time.

        Args:
            batch: Batches delivered so far.
            iterator: Of the loader; new workers begin a new series.
        """
        now = time.perf_counter()
        if now >= self._next_main_s:
            self._next_main_s = now + MAIN_EVERY_S
            self.main.add(batch, read_main())
        if now < self._next_s:
            return
        pids = worker_pids(iterator)
        if pids != self._pids:
            self._pids = pids
            self._all_workers.append(Readings())
        if pids:
            self._all_workers[-1].add(batch, read_sum(pids))
        cost_s = time.perf_counter() - now
        self._next_s = now + max(READ_EVERY_S, cost_s / MOST_OF_THE_TIME)

    @property
    def workers(self) -> Readings:
        """The longest series of one set of workers."""
        return max(self._all_workers, key=lambda readings: len(readings.batches))

    @property
    def worker_bytes(self) -> int | None:
        """Private memory of one of the present workers at the last reading; None without one."""
        read = self._all_workers[-1].memory
        return read[-1][0] // len(self._pids) if read and self._pids else None


def read_main() -> tuple[int, int] | None:
    """USS and RSS of this process; on Linux one cheap figure, resident memory without mapped files.

    Batches that came from workers lie in shared memory, and are part of it.
    """
    resident = _resident_without_files("self")
    return (resident, resident) if resident is not None else read_sum([psutil.Process().pid])


def read_sum(pids: Iterable[int]) -> tuple[int, int] | None:
    """USS and RSS summed over processes; None where one of them cannot be read."""
    uss = rss = 0
    for pid in pids:
        memory = _read_one(pid)
        if memory is None:
            return None
        uss, rss = uss + memory[0], rss + memory[1]
    return uss, rss


def _read_one(pid: int) -> tuple[int, int] | None:
    written = _kib_fields(f"/proc/{pid}/smaps_rollup").get("Private_Dirty")
    resident = _resident_without_files(pid)
    if written is not None and resident is not None:
        return written, resident
    try:
        memory = read_memory(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return None
    if memory.uss_bytes is None or memory.rss_bytes is None:
        return None
    return memory.uss_bytes, memory.rss_bytes


def _resident_without_files(pid: int | str) -> int | None:
    """Anonymous and shared memory of a process (Linux 4.5 and newer), else None."""
    fields = _kib_fields(f"/proc/{pid}/status")
    if "RssAnon" not in fields or "RssShmem" not in fields:
        return None
    return fields["RssAnon"] + fields["RssShmem"]


def _kib_fields(path: str) -> dict[str, int]:
    """The `name: number kB` lines of a file of /proc, in bytes; nothing where it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:  # not Linux, ended, or forbidden
        return {}
    return {words[0][:-1]: 1024 * int(words[1]) for words in lines if words[2:] == ["kB"]}


def find_growth(batches: np.ndarray, memory: np.ndarray) -> Growth | None:
    """Growth in readings of (USS, RSS).

    Args:
        batches: Batches so far at each reading; shape (readings,).
        memory: USS and RSS at each reading; shape (readings, 2).

    Returns:
        A `Growth`, or None with too few readings.

    Example:
        >>> find_growth(np.arange(9), np.outer(np.arange(9), [1000, 0])).levels_off
        False
    """
    if len(batches) < FEWEST_READINGS + SETTLING_READINGS:
        return None
    batches, memory = batches[SETTLING_READINGS:], memory[SETTLING_READINGS:]
    middle = len(batches) // 2
    first, second = memory[middle, 0] - memory[0, 0], memory[-1, 0] - memory[middle, 0]
    count = max(1, int(batches[-1] - batches[middle]))
    per_batch_first = first / max(1, int(batches[middle] - batches[0]))
    return Growth(
        uss_bytes=int(memory[-1, 0] - memory[0, 0]),
        rss_bytes=int(memory[-1, 1] - memory[0, 1]),
        uss_per_batch_bytes=float(second / count),
        levels_off=bool(per_batch_first > 0 and second / count < LEVELLED_SHARE * per_batch_first),
        batches=int(batches[-1] - batches[0]),
        readings=len(batches),
        goes_on=_goes_on(memory[:, 0]),
    )


def _goes_on(uss: np.ndarray) -> bool:
    """Whether the mean memory rises from each part of the run to the next; wandering does not."""
    parts = np.array_split(uss, min(PARTS, len(uss) // 2))
    rises = np.diff([part.mean() for part in parts])
    return bool(rises.sum() > 0 and (rises >= LEAST_RISE * rises.sum()).all())


def worker_pids(iterator: Any) -> list[int]:
    """Process ids of the workers behind a `DataLoader` iterator (torch 2.6 to 2.14), else none."""
    workers = getattr(iterator, "_workers", ())
    return [w.pid for w in workers if w.pid is not None and w.is_alive()]
